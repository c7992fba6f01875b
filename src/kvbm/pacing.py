"""A bound on how often something happens, for work that others on the machine can cause."""

from __future__ import annotations

import time
from collections.abc import Callable


class Bucket:
    """A token bucket: ``burst`` tokens at once, then ``rate`` a second. For one thread."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._at = float(burst), clock()

    def delay(self) -> float:
        """Seconds until a token can be taken; 0 if one can be taken now."""
        now = self._clock()
        self._tokens = min(float(self._burst), self._tokens + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, (1 - self._tokens) / self._rate)

    def take(self, tokens: float = 1.0) -> None:
        """After :meth:`delay` was 0. Taking more than there is makes the next delay longer."""
        self._tokens -= tokens
