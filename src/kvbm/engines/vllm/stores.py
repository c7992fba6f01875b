"""Which blocks a step completes, and the plans to keep them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvbm.core.keys import Key
from kvbm.engines.guard import Faults
from kvbm.engines.vllm.groups import Groups
from kvbm.engines.vllm.keys import RequestKeys
from kvbm.engines.vllm.request import RequestState
from kvbm.engines.vllm.steps import computed_of
from kvbm.plans import AdapterUse, StorePlan
from kvbm.runtime.leader import Leader

# Requests that complete no more blocks than this in a step, as those do that decode, are stored together.
FEW_BLOCKS = 4


class _Grown(NamedTuple):
    """Blocks that a request completes in a step."""

    state: RequestState
    keys: Sequence[Key]  # all of the request
    first: int
    end: int
    computed: int  # tokens, before the step


class Stores:
    """``answers``: whether blocks behind the prompt are kept as well. ``told``: is called with a request, its keys and
    the first and the end of its blocks that are now on their way."""

    def __init__(
        self,
        leader: Leader,
        keys: RequestKeys,
        groups: Groups,
        block_size: int,
        answers: bool,
        told: Callable[[Any, Sequence[Key], int, int], None],
        faults: Faults,
    ) -> None:
        self._leader = leader
        self._keys = keys
        self._groups = groups
        self._block_size = block_size
        self._answers = answers
        self._told = told
        self._faults = faults

    def plan(
        self, output: Any, requests: Mapping[str, RequestState], stores: list[StorePlan], uses: list[AdapterUse]
    ) -> None:
        """Add plans for all blocks that this step completes, and the adapters that they depend on. What has been
        planned must be delivered, whatever becomes of the next one."""
        computed = computed_of(output)
        together: list[_Grown] = []  # an order to the copier costs as much for one block as for many
        adapted: list[_Grown] = []  # as well, and refused as one
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = requests.get(request_id)
            if state is None or state.tables is None or not state.keep:
                continue
            try:
                grown = self._grown(state, computed[request_id], scheduled)
            except Exception as error:
                self._faults.record("planning stores", error)  # of this request
                continue
            if grown is None:
                continue
            if grown.end - grown.first > FEW_BLOCKS:
                stores += self._offload([grown], uses)
            elif getattr(state.request, "lora_request", None) is None:
                together.append(grown)
            else:
                adapted.append(grown)
        stores += self._offload(together, uses)
        stores += self._offload(adapted, uses)

    def _grown(self, state: RequestState, computed: int, scheduled: int) -> _Grown | None:
        """The blocks of a request that this step completes, as far as they have keys.

        Tokens that are only guessed yet (speculation, asynchronous scheduling) have none; their blocks wait for a later
        step. vLLM may step back: after a failed load the blocks behind it are computed, and stored, once more.
        """
        assert state.tables is not None
        first, end = computed // self._block_size, (computed + scheduled) // self._block_size
        if first < state.stored:
            state.stored = first
        if end <= state.stored:
            return None
        if not self._answers:
            end = min(end, state.request.num_prompt_tokens // self._block_size)
        keys = self._keys.of(state.request)
        end = min(end, len(keys), *map(len, state.tables))
        return _Grown(state, keys, state.stored, end, computed) if end > state.stored else None

    def _offload(self, grown: list[_Grown], uses: list[AdapterUse]) -> list[StorePlan]:
        """One plan for all of these, or none."""
        if not grown:
            return []
        keys: list[Key] = []
        blocks: list[int] = []
        for state, known, first, end, computed in grown:
            assert state.tables is not None
            fresh, places = self._groups.completed(known, state.tables, first, end, computed)
            keys += fresh
            blocks += places
        pool = self._leader.manager.near
        if pool.free < len(keys):
            # Something must go for these blocks, and not the blocks in front of them.
            for _, known, first, _, _ in grown:
                pool.touch(self._groups.used(known, first))
        plan = self._leader.offload(keys, blocks)
        for state, known, first, end, _ in grown:
            state.stored = end
            self._told(state.request, known, first, end)
        if plan is None:
            return []
        if getattr(grown[0].state.request, "lora_request", None) is None:
            return [plan]  # none of them has an adapter
        adapters = {self._keys.bound_weights(state.request) for state, *_ in grown}
        uses += [weights.used_by(stores=[plan.id]) for weights in adapters if weights is not None]
        return [plan]
