"""What KVBM knows of one of vLLM's requests, from its arrival to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvbm.core.keys import Key
from kvbm.core.manager import Match
from kvbm.engines.vllm.reporting import Lookup


class RequestState:
    """Of a request that vLLM is working on."""

    __slots__ = (
        "deadline_seconds", "declined", "failures", "found", "in_step", "keep", "loaded", "loads", "local_tokens",
        "lookup", "match", "outside", "put_off", "put_off_since", "refused", "request", "stored", "tables",
        "waits_since",
    )  # fmt: skip

    def __init__(self, request: Any) -> None:
        self.request = request
        # The engine's block tables, one a group of layers, kept here because releases hand them over differently; None
        # while they are not known. Blocks that the engine has let go of, behind a sliding window, stay in them.
        self.tables: list[list[int]] | None = None
        self.stored = 0  # blocks from the front that need no more thought
        self.loads = False  # blocks are on their way to it, or have been
        self.keep = True  # False: what it computes rests on blocks from before a reset, or on blocks that were lost
        self.local_tokens = 0  # that vLLM's own prefix cache had when it last asked for more
        self.loaded = range(0)  # blocks of the load that was planned since
        self.match: Match | None = None
        self.lookup: Lookup | None = None  # the last one, until the request is let in
        self.in_step = False
        self.outside = False  # since it was last in a step a load outside of one was planned
        self.refused = False  # a load of it could not even be planned, or several have failed: nothing more is offered
        self.failures = 0  # loads of which something did not arrive
        self.declined = False  # blocks were found that are sooner computed than loaded
        self.waits_since: float | None = None
        self.put_off = 0  # blocks that it was to have in a step that was full
        self.put_off_since = 0.0
        self.deadline_seconds = 0.0  # of a load from a staged tier
        self.found: int | None = None  # blocks it did not have to compute when it was first scheduled

    def new_tables(self, tables: Sequence[Sequence[int]], computed: int) -> None:
        self.tables = [list(table) for table in tables]
        self.stored = 0
        self.outside = False
        if not computed:
            self.keep = True  # it starts from nothing


class Ended(NamedTuple):
    """A request that is over for vLLM."""

    name: str
    output_tokens: int
    keys: Sequence[Key]  # of all its full blocks, those of its answer included
    stored: int  # blocks from the front that a tier has, or had
    found: int  # blocks from the front that it did not have to compute
