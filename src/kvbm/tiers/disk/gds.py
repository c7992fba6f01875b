"""GPUDirect Storage: whether NVIDIA's library for it is there. It is not used: docs/disk.md says why."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

_NAMES = ("libcufile.so.0", "libcufile.so")


@cache
def statement(load: Callable[[str], object] = ctypes.CDLL) -> str:
    """One line for the log and for `kvbm doctor`."""
    for name in _NAMES:
        try:
            load(name)
        except OSError:
            continue
        return f"cuFile ({name}) is there and not used: disk and GPU exchange blocks through pinned host memory"
    return "cuFile is not there: disk and GPU exchange blocks through pinned host memory"
