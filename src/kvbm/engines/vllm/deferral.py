"""Deferrals: which requests vLLM asks for again in the next step instead of loading them now, and for how long."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvbm.core.cost import CostModel
from kvbm.core.keys import Key
from kvbm.core.manager import BlockManager
from kvbm.core.match import Match
from kvbm.engines.vllm.request import RequestState
from kvbm.plans import LoadPlan

# The leader defers a request whose next block is being written to the next step, for at most this long. A store takes
# milliseconds and recomputing the block takes longer, but a stuck store must not hold up the request.
PATIENCE_SECONDS = 0.25

# How long the loads in front of a load may defer it, a step at a time. After that, for example behind requests of a
# higher priority, it runs outside of the step.
LONGEST_PUT_OFF = 1.0


class Deferrals:
    """``block_bytes``: of the rank that has the most to move."""

    def __init__(self, manager: BlockManager, cost: CostModel, block_size: int, block_bytes: int) -> None:
        self._manager = manager
        self._cost = cost
        self._block_size = block_size
        self._block_bytes = block_bytes

    def for_block(self, state: RequestState, found: Match, tokens: int) -> bool:
        """Whether the block after a match, which is just being written or looked for, is worth waiting for.

        A block that is being staged from a slow tier takes longer than a store does: it is worth as long a wait as
        computing would take. A remote tier's answer is worth it while loading all that may be there still beats
        computing; the tier itself bounds how long an answer is due.
        """
        patience = PATIENCE_SECONDS
        awaited = self._awaited(found)
        end = found.start + found.blocks
        computed, left = end * self._block_size, (len(found.keys) - end) * self._block_bytes
        if (answer := self._manager.awaited_answer(awaited)) is not None:
            return self._cost.is_worth_asking(*answer, left, computed, tokens - computed)
        if (tier := self._manager.coming_from(awaited)) is not None:
            if tier in self._manager.suspended:
                return False  # its read is late
            compute = self._cost.compute_seconds(computed, tokens - computed)
            # A fetch ahead of its load has no deadline of its own, as a load has. A store that stalls must not cost the
            # request the time of computing twice.
            is_remote = self._manager.catalogs[tier].is_remote
            patience = min(compute, self._cost.patience_seconds(tier, left)) if is_remote else max(patience, compute)
        now = time.monotonic()
        if state.waits_since is None:
            state.waits_since = now
        return now < state.waits_since + patience

    def ends_at(self, found: Match) -> bool:
        """Whether the match ends at a block that is being fetched from a remote tier and has not come in time: fetching
        it a second time would take as long again."""
        return self._manager.coming_from(self._awaited(found)) in self._manager.remote

    @staticmethod
    def _awaited(found: Match) -> Key:
        return found.awaited or found.keys[found.start + found.blocks]

    def for_room(self, state: RequestState, blocks: int, loads: Sequence[LoadPlan]) -> bool:
        """Whether a load of so many blocks waits for the next step, rather than hold up the loads of this one."""
        if not self._is_full(loads, blocks):
            state.put_off = 0
            return False
        now = time.monotonic()
        if not state.put_off:
            state.put_off, state.put_off_since = blocks, now
        return now < state.put_off_since + LONGEST_PUT_OFF

    def _is_full(self, loads: Sequence[LoadPlan], blocks: int) -> bool:
        """Whether a step waits for loads already, and longer than a step takes with so many blocks more.

        The bus brings one prompt after the other, whichever steps they are in, and the first to arrive can be answered
        while the second is on its way. So only loads that take no longer than a step anyway have one together.
        """
        ahead = sum(len(copy.blocks) for load in loads if load.in_step for copy in load.copies)
        if not ahead:
            return False
        return (
            self._cost.load_seconds(self._manager.near_tier, (ahead + blocks) * self._block_bytes)
            > self._cost.step_seconds
        )
