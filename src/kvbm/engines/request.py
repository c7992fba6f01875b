"""One request, as the rules of :mod:`~kvbm.engines.session` see it: what was looked up and decided for it, which of its
blocks a step completes, and what is left to do when it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvbm.core.cost import Decision, Prices
from kvbm.core.keys import Key
from kvbm.core.match import Match
from kvbm.core.policy import COMMON, NO_HINTS, Turn


class Lookup(NamedTuple):
    """The result of the last lookup for a request, and the decision."""

    prompt_tokens: int
    device_tokens: int
    outcome: str = ""  # when nothing was looked up
    limit: int = 0  # the lookup asked for blocks up to this one
    found: Match | None = None
    decision: Decision | None = None
    prices: Prices | None = None  # of the decision, if it is recorded


class RequestState:
    """The lifecycle's record of one request. Adapters add what their engine needs."""

    __slots__ = (
        "deadline_seconds", "declined", "found", "in_step", "is_held", "keep", "lookup", "match", "name", "stored",
        "tenant", "turn",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.lookup: Lookup | None = None  # the last one, until the engine admits the request
        self.match: Match | None = None  # offered to the engine, which has not made room for it yet
        self.is_held = False  # the match's slots are pinned
        self.in_step = False  # the offered load happens in the step
        self.deadline_seconds = 0.0  # of a load from a staged tier; 0: none
        self.declined = False  # a refusal of this request has been counted
        self.keep = True  # False: its blocks may depend on KV that is gone or wrong, and are not stored
        self.stored = 0  # blocks from the front that need no store
        self.found: int | None = None  # blocks that it did not have to compute when it was first scheduled
        self.tenant = COMMON  # as tenant_of says
        self.turn = NO_HINTS  # what the caller says of the request


class Completed(NamedTuple):
    """Blocks of a request that a step completes."""

    state: RequestState
    keys: Sequence[Key]  # all of the request
    first: int
    end: int
    computed: int  # tokens, before the step


class Ended(NamedTuple):
    """A request that is over for the engine."""

    output_tokens: int
    keys: Sequence[Key]  # of all its full blocks, those of its answer included
    stored: int  # blocks from the front that a tier has, or had
    found: int  # blocks from the front that it did not have to compute
    turn: Turn = NO_HINTS  # what its caller says of it
    tenant: int = COMMON
