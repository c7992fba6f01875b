"""How long vLLM's steps take, seen from its scheduler.

A step begins when it has been scheduled, or when the one before it ended if that is later: with asynchronous scheduling
vLLM schedules a step while the one before still runs. It ends when the scheduler is told of its results. Steps end in
the order in which they were scheduled, every one of them, also those in which nothing was computed.

What such a time means is known only where the step did one thing. A step that waited for blocks to be loaded is left
out; one with prompts in it teaches the price of a token; one without, the price of a step.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from kvbm.core.cost import CostModel

# vLLM has two steps under way, or one for each stage of a pipeline. Beyond this, nobody tells us when they end.
_MOST_UNDER_WAY = 64


class Work(NamedTuple):
    """What a step computes."""

    prompt_tokens: int
    before: int  # tokens that come before those, on average
    decodes: bool  # and nothing else
    waits: bool  # for blocks that are loaded in this very step


def work_of(output: Any, decode_tokens: int, waits: bool) -> Work:
    """What vLLM has just scheduled. A request with more tokens than a decoding one has is computing its prompt."""
    scheduled = output.num_scheduled_tokens
    if output.total_num_scheduled_tokens == len(scheduled):
        return Work(0, 0, bool(scheduled), waits)
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    tokens = weighed = 0
    for name, count in scheduled.items():
        if count > decode_tokens:
            tokens += count
            weighed += count * computed.get(name, 0)
    return Work(tokens, weighed // tokens if tokens else 0, not tokens, waits)


class StepTimes:
    """Tells a cost model what steps take."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._under_way: deque[tuple[float, Work]] = deque()
        self._last_end = 0.0

    def scheduled(self, work: Work, now: float) -> None:
        if len(self._under_way) >= _MOST_UNDER_WAY:
            self._under_way.clear()
        self._under_way.append((now, work))

    def ended(self, now: float) -> None:
        """The scheduler has heard of the oldest step's results."""
        if not self._under_way:
            return
        began, work = self._under_way.popleft()
        seconds = now - max(began, self._last_end)
        self._last_end = now
        if work.waits:
            return
        if work.prompt_tokens:
            self._cost.observe_prefill(work.prompt_tokens, seconds, work.before)
        elif work.decodes:
            self._cost.observe_step(seconds)
