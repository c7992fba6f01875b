"""The engine never dies of its cache.

Every call from an engine goes through :func:`guarded`. It counts an exception of KVBM, logs the first of each kind with
its traceback, and returns a neutral value. A method that has promised the engine a load or a store cleans up itself
first.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from kvbm.tracing import annotate

logger = logging.getLogger("kvbm")

MAX_KINDS = 256  # kinds of faults that are counted and logged separately
OTHERS = "more faults, of other kinds"

F = TypeVar("F", bound=Callable[..., Any])


class Faults:
    """Counts faults and logs the first of each kind."""

    def __init__(self, engine_lock: AbstractContextManager[Any] | None = None) -> None:
        # Held during each call from the engine. The control socket takes it to run a command between two calls.
        self.engine_lock = threading.RLock() if engine_lock is None else engine_lock
        self._counting = threading.Lock()
        self.counts: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()

    def record(self, where: str, error: BaseException) -> None:
        kind = f"{where}: {type(error).__name__}"
        with self._counting:
            self.counts[kind] += 1
            first = self.counts[kind] == 1
        if first:
            logger.error(
                "%s failed (%s); the engine goes on without this hit. Further failures of this kind are only counted.",
                where, error, exc_info=error,
            )  # fmt: skip

    def count(self, kind: str) -> None:
        """Count a fault that has been logged already. For any thread."""
        with self._counting:
            self.counts[kind] += 1

    def take(self) -> dict[str, int]:
        """Faults counted since the last call. A worker reports them to the leader, which counts for all ranks."""
        if not self.counts:
            return {}
        fresh = self.counts - self._taken
        self._taken = self.counts.copy()
        return dict(fresh)

    def note(self, reason: str, times: int) -> None:
        """Count a fault that a worker has reported. ``MAX_KINDS`` bounds the number of different texts."""
        if reason not in self.counts and len(self.counts) >= MAX_KINDS:
            reason = OTHERS
        if reason not in self.counts:
            logger.warning("%s; the blocks are computed again. Further faults of this kind are only counted.", reason)
        self.counts[reason] += times


def guarded(neutral: Any, failed: Any = ...) -> Callable[[F], F]:
    """Return ``neutral`` (a value, or a function that makes one) if the method raises or KVBM is off. ``failed``: what
    to return instead if it raises.

    A profiler shows each call as a range with the method's name.
    """
    if failed is ...:
        failed = neutral

    def decorate(method: F) -> F:
        ranged = annotate(method.__name__)(method)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            answer = neutral
            if self._adapter is not None:
                with self._faults.engine_lock:
                    try:
                        return ranged(self, *args, **kwargs)
                    except Exception as error:
                        self._faults.record(method.__name__, error)
                        answer = failed
            return answer() if callable(answer) else answer

        return call  # type: ignore[return-value]

    return decorate
