"""Engine releases that KVBM has been tested with. Imports no engine, so that anybody may ask."""

from __future__ import annotations

# Name of the package -> releases, as major.minor.
TESTED: dict[str, tuple[str, ...]] = {
    "vllm": ("0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32"),
}
