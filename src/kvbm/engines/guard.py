"""The engine never dies of its cache.

Every call from an engine goes through :func:`guarded`: an exception of ours is counted, logged once for each kind with
its traceback, and answered with a neutral value. Methods that have promised the engine something clean up themselves
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

MAX_KINDS = 256  # that are counted, and said, each for itself
OTHERS = "more faults, of other kinds"

F = TypeVar("F", bound=Callable[..., Any])


class Faults:
    """Counts what went wrong and says each thing once."""

    def __init__(self, engine_lock: AbstractContextManager[Any] | None = None) -> None:
        # Held while the engine is in one of our calls: who carries out an order from outside waits for it.
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
        """A fault that has been told of already. May be called from any thread."""
        with self._counting:
            self.counts[kind] += 1

    def take(self) -> dict[str, int]:
        """What has been counted since the last call: a worker passes it on to the leader, who counts for all."""
        if not self.counts:
            return {}
        fresh = self.counts - self._taken
        self._taken = self.counts.copy()
        return dict(fresh)

    def note(self, reason: str, times: int) -> None:
        """A fault that a worker has reported. An error's text may be another every time, and is not kept for ever."""
        if reason not in self.counts and len(self.counts) >= MAX_KINDS:
            reason = OTHERS
        if reason not in self.counts:
            logger.warning("%s; the blocks are computed again. Further faults of this kind are only counted.", reason)
        self.counts[reason] += times


def guarded(neutral: Any) -> Callable[[F], F]:
    """Answer with ``neutral`` (a value, or a function that makes one) when the method raises or KVBM is off.

    Each call is a range of the method's name in a profile.
    """

    def decorate(method: F) -> F:
        ranged = annotate(method.__name__)(method)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._adapter is not None:
                with self._faults.engine_lock:
                    try:
                        return ranged(self, *args, **kwargs)
                    except Exception as error:
                        self._faults.record(method.__name__, error)
            return neutral() if callable(neutral) else neutral

        return call  # type: ignore[return-value]

    return decorate
