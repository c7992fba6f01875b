"""Engine releases that KVBM is made for. Imports no engine, so that any module can import it."""

from __future__ import annotations

# Name of the package -> releases, as major.minor.
RELEASES: dict[str, tuple[str, ...]] = {
    "vllm": ("0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32"),
    "tensorrt_llm": ("1.0", "1.1", "1.2", "1.3"),
    "sglang": ("0.5",),
}
