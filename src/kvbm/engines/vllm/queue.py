"""What begins while a request waits in vLLM's queue: remote tiers look for its blocks, then fetch them to host memory.

vLLM asks a connector only for requests that it is about to admit. The time before that is enough for a network.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvbm.core.catalog import Hint
from kvbm.core.cost import Decision
from kvbm.core.match import Match
from kvbm.engines.vllm import compat
from kvbm.engines.vllm.keys import RequestKeys
from kvbm.engines.vllm.request import RequestState
from kvbm.runtime.leader import Leader

MAX_REQUESTS = 4  # of the queue's front whose blocks are fetched ahead: host memory is for running requests first


@dataclass(frozen=True)
class QueuedFetches:
    """``decide``: how much of a match a request would load. ``on_device``: whether vLLM's prefix cache has a block."""

    leader: Leader
    keys: RequestKeys
    block_size: int
    decide: Callable[[Any, Match], Decision]
    on_device: Callable[[bytes], bool]

    def arrived(self, request: Any, hint: Hint | None) -> None:
        """Remote tiers begin to look for a new request's blocks."""
        start, limit = self._span(request)
        if start < limit:
            self.leader.manager.expect(self.keys.of(request), start, limit, hint)

    def fetch(self, line: Iterable[RequestState]) -> None:
        """Fetch what the first requests of the queue would load, once for each request. A request that vLLM has just
        asked for gets its load when vLLM asks again, with a deadline. vLLM does not ask again once its seats are
        taken, so one step counts."""
        room = self.leader.fetches.max_blocks
        for state, _ in zip(line, range(MAX_REQUESTS), strict=False):
            if state.deferred:
                state.deferred = False
            elif state.fetched is None:
                self._look(state, room)
            room -= state.fetched or 0
            if room <= 0:
                return

    def _look(self, state: RequestState, room: int) -> None:
        request = state.request
        start, limit = self._span(request)
        if start >= limit:
            state.fetched = 0
            return
        found = self.leader.manager.lookup(self.keys.of(request), start, limit, hint=state.hint)
        if found.pending:
            return  # again in the next step
        wanted = self.decide(request, found).blocks
        state.fetched = self.leader.fetches.start(found.cut(min(wanted, room)), state.tenant) if wanted else 0

    def _span(self, request: Any) -> tuple[int, int]:
        """The blocks to look for, from the first that vLLM's prefix cache lacks. vLLM evicts a prefix from its end, so
        a binary search finds that block. A wrong start costs a few blocks."""
        if compat.needs_every_token(request):
            return 0, 0
        limit = min(int(request.num_tokens - 1) // self.block_size, len(self.keys.of(request)))
        hashes = request.block_hashes[:limit]
        return bisect_left(hashes, True, key=lambda each: not self.on_device(each)), limit
