"""What KVBM knows of one of vLLM's requests, from its arrival to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbm.core.catalog import Hint
from kvbm.core.policy import COMMON
from kvbm.engines import request as requests
from kvbm.engines.vllm.groups import Offer


class RequestState(requests.RequestState):
    """Of a request that vLLM is working on."""

    __slots__ = (
        "deferred", "failures", "fetched", "hint", "loaded", "loads", "local_tokens", "offers", "outside", "put_off",
        "put_off_since", "refused", "request", "tables", "waits_since",
    )  # fmt: skip

    def __init__(self, request: Any, tenant: int = COMMON, hint: Hint | None = None) -> None:
        super().__init__(request.request_id)
        self.tenant = tenant
        self.request = request
        self.hint = hint  # where a router says that its prefix lies
        # The engine's block tables, one a group of layers, kept here because releases hand them over differently; None
        # while they are not known. Blocks that the engine has let go of, behind a sliding window, stay in them.
        self.tables: list[list[int]] | None = None
        self.deferred = False  # vLLM asks again in the next step, because an answer or a block is due
        # Blocks that a remote tier sends while the request waits; None: not looked for yet.
        self.fetched: int | None = None
        self.offers: Sequence[Offer] = ()  # states that vLLM has saved in the current step
        self.loads = False  # blocks are on their way to it, or have been
        self.local_tokens = 0  # that vLLM's own prefix cache had when it last asked for more
        self.loaded = range(0)  # blocks of the load that was planned since
        self.outside = False  # since it was last in a step a load outside of one was planned
        self.refused = False  # a load of it could not even be planned, or several have failed: nothing more is offered
        self.failures = 0  # loads with at least one missing block
        self.waits_since: float | None = None
        self.put_off = 0  # blocks that it was to have in a step that was full
        self.put_off_since = 0.0

    def new_tables(self, tables: Sequence[Sequence[int]], computed: int) -> None:
        self.tables = [list(table) for table in tables]
        self.stored = 0
        self.outside = False
        if not computed:
            self.keep = True  # it starts from nothing

    def comes_back(self) -> bool:
        """Whether a load outside of the step has left the request with nothing at all.

        vLLM then puts it first in its queue, before requests that hold blocks and wait to be scheduled. If there is no
        room for it beside them, none of them proceeds. A deferred request stands behind them.
        """
        outside, self.outside = self.outside, False
        return outside
