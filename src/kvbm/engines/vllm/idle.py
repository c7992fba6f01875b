"""Blocks on their way to other tiers, and whether vLLM steps on for them when it has no requests."""

from __future__ import annotations

import time

from kvbm.engines.guard import Faults
from kvbm.engines.session import Session
from kvbm.plans import MovePlan

# Without requests vLLM steps on for moves only while their stores make progress.
MAX_MOVE_STALL_SECONDS = 2.0

# vLLM stops stepping when it is told that there is no work. When it asks again so much later, something woke it up.
ASLEEP_SECONDS = 0.5


class MoveSteps:
    """vLLM does not wait for a store that hangs. The store gets another chance when vLLM has stopped stepping and wakes
    up: for a request, for a call from outside, or to end. By then the store may have finished writes that the leader
    has not heard of."""

    def __init__(self, session: Session, faults: Faults) -> None:
        self._session = session
        self._faults = faults
        self._uses = 0  # of the session, when it was last looked at
        self._progress = 0.0  # when there was something new for a store, or from it
        self._asked = 0.0  # when vLLM last asked
        self._wanted = False  # the answer to that

    def plan(self) -> list[MovePlan]:
        """The moves of the next step."""
        leader = self._session.leader
        try:
            moves = [] if leader is None else leader.plan_moves()
        except Exception as error:
            self._faults.record("planning moves", error)
            return []
        if moves:
            self.progressed()
        return moves

    def progressed(self) -> None:
        self._progress = time.monotonic()

    def are_wanted(self) -> bool:
        leader, now = self._session.leader, time.monotonic()
        woken, self._asked = not self._wanted and now - self._asked > ASLEEP_SECONDS, now
        if woken or self._uses != self._session.uses:
            self._progress, self._uses = now, self._session.uses
        has_work = leader is not None and any(
            edge.can_progress and not leader.breakers[edge.target].late for edge in leader.edges
        )
        self._wanted = has_work and now < self._progress + MAX_MOVE_STALL_SECONDS
        return self._wanted
