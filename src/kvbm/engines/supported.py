"""Engine releases that KVBM is made for. Imports no engine, so that any module can import it."""

from __future__ import annotations

import re

# Name of the package -> releases, oldest first: major.minor, or more where patch releases differ.
RELEASES: dict[str, tuple[str, ...]] = {
    "vllm": ("0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32"),
    "tensorrt_llm": ("1.0", "1.1", "1.2", "1.3"),
    "sglang": ("0.5.23",),
}


def is_supported(package: str, version: str) -> bool:
    return any(f"{version}.".startswith((f"{release}.", f"{release}+")) for release in RELEASES[package])


def is_too_old(package: str, version: str) -> bool:
    """Older than the oldest release that KVBM supports."""
    return _numbers(version) < _numbers(RELEASES[package][0])


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else (0,)
