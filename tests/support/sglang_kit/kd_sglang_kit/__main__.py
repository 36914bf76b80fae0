"""python -m kd_sglang_kit: a request, as JSON, comes in; a line of JSON for each case goes out.

What SGLang and its libraries print goes to stderr, so that stdout carries results alone.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from kd_sglang_kit.cases import Kit


def main() -> None:
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(**fields: Any) -> None:
        print(json.dumps(fields), file=results)

    request = json.load(sys.stdin)
    kit = Kit(request["backend"], request["device"])
    for case in request["cases"]:
        # Said beforehand, so that a case that kills the process can be named.
        tell(begins=case["name"])
        tell(case=case["name"], **kit.run(case))


if __name__ == "__main__":
    main()
