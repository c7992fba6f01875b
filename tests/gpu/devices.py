"""Where the tests of this folder run: on a CUDA device or, to try the tests themselves, on the CPU.

python tests/gpu/devices.py      # status 0 when they can run, else a sentence and status 3
"""

from __future__ import annotations

import os
import sys

NO_DEVICE = 3  # exit status
DEVICE = os.environ.get("KVBM_TEST_DEVICE") or "cuda"
ON_CUDA = DEVICE == "cuda"


def why_not() -> str | None:
    """A sentence that says why nothing can be tested here; None when it can."""
    if DEVICE not in ("cuda", "cpu"):
        return f"The GPU tests are skipped: KVBM_TEST_DEVICE is {DEVICE!r}; it takes cuda or cpu."
    try:
        import torch
    except ImportError as error:
        return f"The GPU tests are skipped: torch cannot be imported by {sys.executable} ({error})."
    if ON_CUDA and not torch.cuda.is_available():
        return f"The GPU tests are skipped: torch {torch.__version__} sees no CUDA device on this machine."
    return None


if __name__ == "__main__":
    reason = why_not()
    if reason is not None:
        print(reason)
    sys.exit(0 if reason is None else NO_DEVICE)
