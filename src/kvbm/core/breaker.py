"""A circuit breaker: a tier that is late or keeps failing gets no work until it has answered again.

Two things open it. *Late*: the tier owes a read that the worker has given up; the breaker stays open until that read
has ended. *Failing*: ``MAX_FAILURES`` operations in a row that delivered nothing; the breaker stays open for
``FIRST_PAUSE_SECONDS``, then lets work through again as a probe, and doubles the pause each time the probe fails too.
"""

from __future__ import annotations

MAX_FAILURES = 3
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0


class Breaker:
    """Of one tier. The leader's thread calls it with the time, as ``core`` has no clock."""

    def __init__(self) -> None:
        self.late = 0  # reads that were given up and have not ended
        self.opened = 0  # times
        self._failures = 0  # in a row
        self._pause = FIRST_PAUSE_SECONDS
        self._closed_at = 0.0

    def is_open(self, now: float) -> bool:
        return self.late > 0 or now < self._closed_at

    def succeeded(self) -> None:
        self._failures = 0
        self._pause = FIRST_PAUSE_SECONDS
        self._closed_at = 0.0

    def failed(self, now: float) -> None:
        """An operation brought nothing, for a reason that lies with the tier and not with one block."""
        self._failures += 1
        if self._failures < MAX_FAILURES:
            return
        self.opened += 1
        self._closed_at = now + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)
        self._failures = MAX_FAILURES - 1  # one failed probe is enough from here on
