"""The whole report, out of what is kept."""

from __future__ import annotations

from collections.abc import Callable

from phases.checkout import Checkout
from phases.evidence import now
from phases.moe_imbalance import Imbalance
from phases.reporting.decisions import decisions_section
from phases.reporting.experts import experts_section, predicted
from phases.reporting.gates import gates_headline, gates_section
from phases.reporting.kept import Kept
from phases.reporting.kernel import kernel_headlines, kernel_section, roofline_section
from phases.reporting.model import Report, writable
from phases.reporting.profiles import profiles_section
from phases.reporting.service import service_headline, service_section
from phases.reporting.slots import slots_headline, slots_section
from phases.reporting.unmeasured import unmeasured_section

__all__ = ["gather"]


def gather(kept: Kept, checkout: Checkout, predict: Callable[[], Imbalance] = predicted) -> Report:
    """predict: makes the MoE prediction, which takes seconds.

    What is kept may have been written by another program, so of its texts only what every rendering
    can write is taken over.
    """
    commit, dirty = checkout.revision()
    revision = (commit or "unknown")[:12] + (" with changes" if dirty else "")
    headlines = (
        gates_headline(kept),
        *kernel_headlines(kept),
        service_headline(kept),
        slots_headline(kept),
    )
    found = Report(
        f"{now():%Y-%m-%d %H:%M} UTC",
        revision,
        tuple(one for one in headlines if one is not None),
        (
            gates_section(kept),
            kernel_section(kept),
            roofline_section(kept),
            service_section(kept),
            profiles_section(kept),
            slots_section(kept),
            experts_section(predict(), revision),
            decisions_section(kept),
            unmeasured_section(kept),
        ),
    )
    return writable(found)
