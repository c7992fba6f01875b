"""How long an engine's steps take, seen from its scheduler.

A step begins when it has been scheduled, or when the one before it ended if that is later: engines schedule a step
while the one before still runs. It ends when the scheduler is told of its results. Steps end in the order in which they
were scheduled, every one of them, also those in which nothing was computed.

Each step teaches the cost model one price. A step with prompts teaches the price of a token, a step that only decodes
the price of a step. A step that waited for a load teaches nothing.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvbm.core.cost import CostModel

# Engines have two steps under way, or one for each stage of a pipeline. With this many, the engine does not report the
# ends of its steps.
_MAX_UNDER_WAY = 64


class Work(NamedTuple):
    """The work of a step."""

    prompt_tokens: int
    before: int  # tokens that come before those, on average
    decodes: bool  # and nothing else
    waits: bool  # for blocks that are loaded in this very step


class StepTimes:
    """Tells a cost model what steps take."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._under_way: deque[tuple[float, Work]] = deque()
        self._last_end = 0.0
        self.ended_steps = 0  # since the start

    def scheduled(self, work: Work, now: float) -> None:
        if len(self._under_way) >= _MAX_UNDER_WAY:
            self._under_way.clear()
        self._under_way.append((now, work))

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def ended(self, now: float) -> None:
        """The scheduler has heard of the oldest step's results."""
        if not self._under_way:
            return
        self.ended_steps += 1
        began, work = self._under_way.popleft()
        seconds = now - max(began, self._last_end)
        self._last_end = now
        if work.waits:
            return
        if work.prompt_tokens:
            self._cost.observe_prefill(work.prompt_tokens, seconds, work.before)
        elif work.decodes:
            self._cost.observe_step(seconds)
