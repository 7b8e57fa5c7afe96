"""`python -m tests.golden_batches.record [NAME ...]`: make the hashes that are kept.

Of cases that are not kept yet, and of those named: tests/golden_plans/README.md says when a
case may be named.
"""

import json
import os
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")  # before kernels are defined
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from tests.golden_batches.batches import KEPT, cases, digest


def main(names: list[str]) -> None:
    """Add what is missing; cases that are named are drawn anew."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for case in cases():
        if case.name not in kept or case.name in names:
            kept[case.name] = digest(case)
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
