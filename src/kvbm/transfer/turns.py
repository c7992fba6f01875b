"""The interpreter's turns, kept short while something urgent is submitted.

Calls to CUDA let go of the interpreter. A thread that wants it back from one that computes waits for a whole turn, five
milliseconds, however short its call was; and while an engine submits the copies of one long prompt, another of its
threads may be hashing the next. A dozen calls then take twenty milliseconds, in which the bus has nothing to carry.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SHORT_SECONDS = 5e-5

_lock = threading.Lock()
_inside = 0
_usual = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """Whoever waits for the interpreter meanwhile gets it soon. Not for long work: everybody's turns are short."""
    global _inside, _usual
    with _lock:
        if not _inside:
            _usual = sys.getswitchinterval()
            sys.setswitchinterval(min(_usual, _SHORT_SECONDS))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                sys.setswitchinterval(_usual)
