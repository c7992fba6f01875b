"""The interpreter's turns, kept short while something urgent is submitted.

Calls to CUDA let go of the interpreter. A thread that wants it back from one that computes waits for a whole turn, five
milliseconds, however short its call was; and while an engine submits the copies of one long prompt, another of its
threads may be hashing the next. A dozen calls then take twenty milliseconds, in which the bus has nothing to carry.

Likewise a step of requests that decode: for half of its time the engine's thread submits it, and waits for it for the
other half. Whoever has a millisecond of work that can wait does it in that half.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SHORT_SECONDS = 5e-5
_LONGEST_SUBMISSION = 4e-3  # seconds; whoever has not ended one by then has forgotten it

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


class Submitting:
    """Of a step, by the engine's thread."""

    def __init__(self) -> None:
        self._thread = 0
        self._ends = 0.0  # at the latest

    def begin(self) -> None:
        self._thread = threading.get_ident()
        self._ends = time.monotonic() + _LONGEST_SUBMISSION

    def end(self) -> None:
        self._ends = 0.0

    def wait(self) -> None:
        """Until it is over, in a thread that is not the one which submits; not for the next, if that has begun before
        this one was seen to end."""
        latest = time.monotonic() + _LONGEST_SUBMISSION
        while time.monotonic() < min(self._ends, latest) and threading.get_ident() != self._thread:
            time.sleep(_SHORT_SECONDS)


decoding = Submitting()  # of a step in which requests decode and nothing else
