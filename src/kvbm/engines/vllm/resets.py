"""Resets of vLLM's prefix cache while loads and steps are under way.

``reset_prefix_cache(reset_running_requests=True)`` preempts all running requests and raises if a block is still in use.
Two kinds of blocks are: those of a request that waits for a load outside of the step, and, with overlapping steps and a
connector that loads, those that a submitted step may still write to. vLLM calls no method of a connector in between.

So KVBM wraps the scheduler's method. The loads are withdrawn: their requests give their blocks up and start again, as
after a load that has failed. Blocks that vLLM keeps back for a submitted step are free at once. Nothing may be written
over by what is still under way, so no request gets a block until the submitted steps and the withdrawn loads are over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from kvbm.runtime.leader import Leader
from kvbm.runtime.steps import StepTimes


class Resets:
    """Of one scheduler. ``unheard``: loads that vLLM has not heard the end of, by request."""

    def __init__(self, steps: StepTimes, unheard: dict[str, int]) -> None:
        self._steps = steps
        self._unheard = unheard
        self._last_step = 0  # of those that were submitted before the reset
        self._loads: Collection[int] = ()
        self._requests: Collection[str] = ()
        self._holds = False

    def begin(self, scheduler: Any, leader: Leader | None) -> bool:
        """vLLM's scheduler is about to reset its cache. False: KVBM leaves it to that."""
        if not can_give_blocks_up(scheduler):
            return False
        self._last_step = self._steps.ended_steps + self._steps.under_way
        self._loads = () if leader is None else tuple(leader.loads)
        self._requests = list(self._unheard)
        self._holds = True
        give_blocks_up(scheduler)
        return True

    def hold_requests(self, leader: Leader | None) -> bool:
        """Whether a step or a load from before the reset may still write to blocks that vLLM takes for free."""
        self._holds = self._holds and (
            (self._steps.under_way > 0 and self._steps.ended_steps < self._last_step)
            or (leader is not None and not leader.loads.isdisjoint(self._loads))
            or any(name in self._unheard for name in self._requests)
        )
        return self._holds


def can_give_blocks_up(scheduler: Any) -> bool:
    """Not where a request waits for more input: it keeps its blocks, so the reset fails in any case, and gets more of
    them without a question to the connector."""
    needed = ("defer_block_free", "deferred_frees", "failed_recving_kv_req_ids")
    waiting = (request.status.name == "WAITING_FOR_STREAMING_REQ" for request in scheduler.requests.values())
    return all(hasattr(scheduler, name) for name in needed) and not any(waiting)


def give_blocks_up(scheduler: Any) -> None:
    """Let every request that does not run, and all that vLLM frees later, give its blocks up."""
    from vllm.v1.request import RequestStatus

    manager = scheduler.kv_cache_manager
    for request in scheduler.requests.values():
        if request.status == RequestStatus.RUNNING or not any(manager.get_block_ids(request.request_id)):
            continue
        manager.free(request)
        if not request.is_finished():
            request.num_computed_tokens = 0
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                scheduler.failed_recving_kv_req_ids.add(request.request_id)
    while scheduler.deferred_frees:
        _, blocks = scheduler.deferred_frees.popleft()
        manager.block_pool.free_blocks(reversed(blocks))


def install() -> None:
    """Wrap the method of vLLM's scheduler, in this process."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if not hasattr(Scheduler.reset_prefix_cache, "__wrapped__"):
        Scheduler.reset_prefix_cache = _beside_loads(Scheduler.reset_prefix_cache)


def _beside_loads(own: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(own)
    def reset_prefix_cache(scheduler: Any, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        before_reset = getattr(scheduler.connector, "before_reset", None)
        if not reset_running_requests or before_reset is None or not before_reset(scheduler):
            return own(scheduler, reset_running_requests, *args, **kwargs)
        defers, scheduler.defer_block_free = scheduler.defer_block_free, False
        try:
            return own(scheduler, reset_running_requests, *args, **kwargs)
        finally:
            scheduler.defer_block_free = defers

    return reset_prefix_cache
