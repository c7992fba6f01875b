"""NVTX ranges in the domain ``kvbm``: a profiler such as Nsight Systems shows KVBM's work on its timeline.

:class:`annotate` marks a function, or a few lines::

    @annotate("start_load_kv")
    def start_load_kv(self, ...): ...

    with annotate("copier.store"): ...

Ranges are off until :func:`switch` finds that they are wanted; the connector calls it once at start with the setting
``KVBM_NVTX``. While they are off, a call of a marked function takes 0.1 µs longer and marked lines 0.15 µs, which makes
some 5 µs for an engine's step of 36 layers; while they are on and no profiler listens, 0.5 µs (CPython 3.11 and 3.12 on
an AMD EPYC). The package ``nvtx`` is imported only when they are on.

A range is the time of the thread that calls. Work that a call starts on the GPU has its own rows in a profile.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial, wraps
from typing import Literal, ParamSpec, TypeVar

logger = logging.getLogger("kvbm")

DOMAIN = "kvbm"

# Set by Nsight Systems for what it starts, and by any tool that NVTX is to load.
PROFILERS = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH")

_P = ParamSpec("_P")
_R = TypeVar("_R")

_make: Callable[[str], AbstractContextManager[object]] | None = None  # None: off


def switch(wanted: Literal["auto", "on", "off"], environ: Mapping[str, str] = os.environ) -> bool:
    """Turn ranges on or off; ``auto`` turns them on when a profiler has started this process. Returns what they are.

    Called before anything is marked that is still open. Never raises: without the package there are no ranges.
    """
    global _make
    _make = None
    profiler = next((name for name in PROFILERS if environ.get(name)), None)
    if wanted == "off" or (wanted == "auto" and profiler is None):
        return False
    try:
        package = importlib.import_module("nvtx")
    except ImportError:
        reason = "KVBM_NVTX is on" if wanted == "on" else f"a profiler is attached ({profiler})"
        logger.warning("%s, but KVBM makes no ranges: the package nvtx is not installed. pip install nvtx", reason)
        return False
    # One a name: the package registers it with the profiler, and then only passes a handle.
    _make = cache(partial(package.annotate, domain=DOMAIN))
    return True


class annotate:  # noqa: N801  # reads like the nvtx package's own
    """A range of this name, as a decorator or in a ``with``. One object may be open many times, in any thread."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        if _make is not None:
            _make(self._name).__enter__()

    def __exit__(self, *exception: object) -> None:
        if _make is not None:
            _make(self._name).__exit__(None, None, None)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def marked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if _make is None:
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return marked
