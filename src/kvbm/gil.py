"""The interpreter lock (GIL): short switch intervals while the engine's thread submits urgent work.

A call to CUDA releases the interpreter. To get it back from a thread that computes, the caller waits for a whole switch
interval of 5 ms, however short the call was. While the engine's thread submits the copies of a long prompt, another
thread may be hashing the next prompt: a dozen calls then take 20 ms, and the bus is idle.

A decode step has the same problem: the engine's thread submits it for half of its time and waits for the GPU for the
other half. A thread with a millisecond of deferrable work calls :meth:`Submitting.wait` and runs in the second half.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH_SECONDS = 5e-5
_MAX_SUBMISSION_SECONDS = 4e-3  # a submission that has not ended by then counts as ended

_MAX_TURN_SECONDS = 1e-3  # a new request waits for so long, and so does a load that a GPU ends

_lock = threading.Lock()
_notified = threading.Event()
_inside = 0
_usual = 0.0


def begin_short_turns() -> None:
    """Let waiting threads get the interpreter soon, until :func:`end_short_turns` in any thread. Only for short work:
    the interval is short for all threads. Before work is handed to a thread, so that the thread can begin."""
    global _inside, _usual
    with _lock:
        if not _inside:
            _usual = sys.getswitchinterval()
            sys.setswitchinterval(min(_usual, _SWITCH_SECONDS))
        _inside += 1


def end_short_turns() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if not _inside:
            sys.setswitchinterval(_usual)


@contextmanager
def short_turns() -> Iterator[None]:
    begin_short_turns()
    try:
        yield
    finally:
        end_short_turns()


def give_turn(others_notify: bool) -> None:
    """For an engine's thread that steps without work until a load is over: its steps would take the core and the
    interpreter from the threads that bring the load. ``others_notify``: these are threads of this process and call
    :func:`notify`, which ends the pause."""
    _notified.wait(_MAX_TURN_SECONDS if others_notify else _SWITCH_SECONDS)
    _notified.clear()


def notify() -> None:
    """A transfer has ended, or an answer has come: the engine's thread has something to do."""
    _notified.set()


class Submitting:
    """The engine's thread between the plan of a step and the end of its submission."""

    def __init__(self) -> None:
        self._thread = 0
        self._ends = 0.0  # monotonic time at which the submission counts as ended

    def begin(self) -> None:
        self._thread = threading.get_ident()
        self._ends = time.monotonic() + _MAX_SUBMISSION_SECONDS

    def end(self) -> None:
        self._ends = 0.0

    def wait(self) -> None:
        """Wait for the current submission only, and not on the thread that submits."""
        latest = time.monotonic() + _MAX_SUBMISSION_SECONDS
        while time.monotonic() < min(self._ends, latest) and threading.get_ident() != self._thread:
            time.sleep(_SWITCH_SECONDS)


decoding = Submitting()  # of a step that only decodes
