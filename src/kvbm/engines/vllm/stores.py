"""Which blocks a step completes, and the plans to keep them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbm.core.keys import Key
from kvbm.engines.guard import Faults
from kvbm.engines.request import Completed
from kvbm.engines.session import Session
from kvbm.engines.vllm import compat
from kvbm.engines.vllm.groups import Groups
from kvbm.engines.vllm.keys import RequestKeys
from kvbm.engines.vllm.request import RequestState
from kvbm.engines.vllm.steps import computed_of, starting_requests
from kvbm.plans import AdapterUse, StorePlan

# Requests that complete no more blocks than this in a step, as those do that decode, are stored together.
FEW_BLOCKS = 4

Grown = list[tuple[RequestState, Completed]]


@dataclass(frozen=True)
class Stores:
    """``told``: is called with a request, its keys and the first and the end of its blocks that are now on their
    way."""

    session: Session
    keys: RequestKeys
    groups: Groups
    told: Callable[[Any, Sequence[Key], int, int], None]
    faults: Faults

    def plan(
        self, output: Any, requests: Mapping[str, RequestState], stores: list[StorePlan], uses: list[AdapterUse]
    ) -> None:
        """Add plans for all blocks that this step completes, and the adapters that they depend on. A failure
        leaves the plans made before it in the lists: the caller must deliver them."""
        computed, size = computed_of(output), self.session.block_size
        offers, starting = compat.offered_states(output), starting_requests(output)
        together: Grown = []  # an order to the copier costs as much for one block as for many
        adapted: Grown = []  # as well, and refused as one
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = requests.get(request_id)
            if state is None or state.tables is None or not state.keep:
                continue
            before = computed[request_id]
            if before // size == state.stored == (before + scheduled) // size:
                continue  # decoding, within a block: 256 such requests take 40 µs
            try:
                grown = self._completed(state, before, scheduled)
            except Exception as error:
                self.faults.record("planning stores", error)  # of this request
                continue
            if grown is None:
                continue
            state.offers = offers.get(request_id, ())
            if request_id in starting:
                # vLLM does not offer the states of its own prefix cache, and a tier may have lost them.
                state.offers = [*state.offers, *self.groups.found_states(state.tables, before)]
            if grown.end - grown.first > FEW_BLOCKS:
                stores += self._store([(state, grown)], uses)
            elif getattr(state.request, "lora_request", None) is None:
                together.append((state, grown))
            else:
                adapted.append((state, grown))
        stores += self._store(together, uses)
        stores += self._store(adapted, uses)

    def _completed(self, state: RequestState, computed: int, scheduled: int) -> Completed | None:
        """The blocks of a request that this step completes, as far as they have keys.

        Tokens that are only guessed yet (speculation, asynchronous scheduling) have none; their blocks wait for a later
        step.
        """
        assert state.tables is not None
        end = self.session.completed(state, computed, scheduled, state.request.num_prompt_tokens)
        if end <= state.stored:
            return None
        keys = self.keys.of(state.request)
        end = min(end, len(keys), *map(len, state.tables))
        return Completed(state, keys, state.stored, end, computed) if end > state.stored else None

    def _store(self, grown: Grown, uses: list[AdapterUse]) -> list[StorePlan]:
        """One plan for all of these, or none."""
        if not grown:
            return []
        keys: list[Key] = []
        blocks: list[int] = []
        counts: list[int] = []
        for state, (_, known, first, end, computed) in grown:
            assert state.tables is not None
            fresh, places = self.groups.completed(known, state.tables, first, end, computed, state.offers)
            keys += fresh
            blocks += places
            counts.append(len(fresh))
        plan = self.session.store([part for _, part in grown], keys, blocks, counts)
        for state, (_, known, first, end, _) in grown:
            self.told(state.request, known, first, end)
        if plan is None:
            return []
        if getattr(grown[0][0].request, "lora_request", None) is None:
            return [plan]  # none of them has an adapter
        adapters = {self.keys.bound_weights(state.request) for state, _ in grown}
        uses += [weights.used_by(stores=[plan.id]) for weights in adapters if weights is not None]
        return [plan]
