"""The trained models that phase 8 serves."""

from __future__ import annotations

import os
import pathlib

from phases.checkout import find_checkout
from phases.gate import Context
from phases.trained_models import TrainedModels, trained_models

__all__ = ["models_of"]


def models_of(ctx: Context) -> TrainedModels:
    """Trained once: they lie where KD_TRAINED_MODELS says, else with the checkout's state."""
    said = os.environ.get("KD_TRAINED_MODELS")
    folder = pathlib.Path(said).resolve() if said else find_checkout().state / "trained"
    return trained_models(folder, seed=ctx.seed, progress=ctx.progress)
