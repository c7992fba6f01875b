"""The messages between leader and worker: the one contract of the two halves.

The leader decides, the workers move bytes. A *step plan* travels down with every engine step (inside the engine's own
metadata, or over :mod:`kvbm.runtime.channel`); a *report* travels up from each rank. Both are msgpack, never pickle, so
that nothing read from a socket can run code. Slots and blocks are plain integers: a slot is a place in a tier, a block
is a place in the engine's own KV cache, and the same number means the same place on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import chain
from typing import Any, TypeVar

import msgspec


class Tier(IntEnum):
    """Where bytes lie, fastest first."""

    DEVICE = 1
    HOST = 2
    DISK = 3
    OBJECT = 4


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """One stretch of blocks on one tier: ``slots[i]`` of the tier belongs to ``blocks[i]`` of the engine.

    Tiers below host memory are not next to the engine: their blocks pass through host slots.
    """

    tier: Tier
    slots: list[int]
    blocks: list[int]
    # Host slots to pass through. As many as there are blocks: each block has its own and stays. Fewer: they are used in
    # turn, and nothing stays. None: there was no room, and the blocks cannot come.
    via: list[int] = []
    # Keys of the blocks: a tier that outlives the engine makes sure that its slots hold just these.
    tags: list[bytes] = []


class LoadPlan(msgspec.Struct, frozen=True, array_like=True):
    """Bring blocks back into the engine's cache for one request."""

    id: int
    request: str
    copies: list[Copy]
    # True: this very step computes on the blocks. False: the request waits outside the batch until all ranks are done.
    in_step: bool
    # Store plans that still read the engine blocks this load is about to overwrite.
    after: list[int] = []
    # Whether attention may wait for its own layer only. Not when the step could be replayed from a full CUDA graph, in
    # which no layer asks: then the whole load comes before the step. Means nothing outside of a step.
    layered: bool = False
    # How many tokens of the request are left to compute: what a load by layer can hide behind.
    tokens: int = 0
    # Seconds after which what has not come from a tier below host memory is given up; 0: never.
    within: float = 0.0

    @property
    def blocks(self) -> list[int]:
        return [block for copy in self.copies for block in copy.blocks]


class StorePlan(msgspec.Struct, frozen=True, array_like=True):
    """Copy finished blocks out of the engine's cache once this step's forward pass has written them."""

    id: int
    copy: Copy


class SpillPlan(msgspec.Struct, frozen=True, array_like=True):
    """Copy blocks from host slots on to slots of the disk."""

    id: int
    slots: list[int]
    targets: list[int]
    tags: list[bytes]


class Recompute(msgspec.Struct, frozen=True, array_like=True):
    """A request whose load has failed on some rank, for engines that cannot be told of it: every rank must itself set
    the request back to ``position``, the first token to compute, and answers with a :class:`LoadResult` of this id."""

    id: int
    request: str
    position: int
    # True: every rank has set the request back, so that it may go on.
    agreed: bool = False


class AdapterUse(msgspec.Struct, frozen=True, array_like=True):
    """What this step may only do while an adapter's weights are those that the leader knows of."""

    adapter: int
    # The load of these weights on each rank, as the rank has numbered it (``Report.adapters``).
    loads_by_rank: list[int]
    # Plans of this step that are refused otherwise.
    loads: list[int] = []
    stores: list[int] = []
    # vLLM blocks filled by an earlier asynchronous load. If the adapter has changed since, the worker reports them as
    # failed.
    blocks: list[int] = []


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """Everything the workers do around one engine step."""

    loads: list[LoadPlan] = []
    stores: list[StorePlan] = []
    # Stores that must have read their source before this step writes: their blocks have been handed to another request.
    fences: list[int] = []
    recompute: list[Recompute] = []
    spills: list[SpillPlan] = []
    # Stores that must be over before anything of this step begins: somebody else writes to their blocks, and not in the
    # engine's order.
    settle: list[int] = []
    # Stores that every rank has confirmed, and whether they are good: where host memory outlives the engine, those that
    # are shall be found by the next one.
    keeps: dict[int, bool] = {}
    # Adapters that the step's loads and stores depend on.
    adapters: list[AdapterUse] = []
    # Adapters that the leader wants to know, as the engine describes them: every rank loads each unless it has it, and
    # reports its weights.
    wanted: list[bytes] = []
    # How many changes of weights the leader has heard of, by rank; empty while there were none.
    changes_heard: list[int] = []

    def __bool__(self) -> bool:
        return bool(
            self.loads or self.stores or self.fences or self.recompute or self.spills or self.settle or self.keeps
            or self.adapters or self.wanted
        )  # fmt: skip


def joined(plans: Sequence[StepPlan]) -> StepPlan:
    """What several plans ask for, in their order: none may be passed over."""
    fields: dict[str, Any] = {}
    for name in StepPlan.__struct_fields__:
        parts = [getattr(plan, name) for plan in plans]
        if all(isinstance(part, dict) for part in parts):
            fields[name] = dict(chain.from_iterable(part.items() for part in parts))
        else:
            fields[name] = list(chain.from_iterable(parts))
    # Take the lowest counts: one plan made before the leader knew of a change makes the whole step outdated.
    fields["changes_heard"] = min((plan.changes_heard for plan in plans), default=[])
    return StepPlan(**fields)


class LoadResult(msgspec.Struct, frozen=True, array_like=True):
    """A load that is over on one rank. ``bad`` holds the positions (within the plan) that did not arrive."""

    id: int
    bad: list[int] = []
    seconds: float = 0.0  # how long the copy took, where that is known
    # Positions that did not arrive either, with nothing known against their blocks: there was no room, or no time left.
    missed: list[int] = []
    # The host slots of the plan are still being written to, by reads that were given up. One more result will follow:
    # the engine is not concerned, but the slots must not be used before it.
    late: bool = False
    # How long each tier took, where a load is not from host memory alone.
    tier_seconds: dict[Tier, float] = {}


class StoreResult(msgspec.Struct, frozen=True, array_like=True):
    """A store that is over on one rank; ``ok`` is False when any of its blocks was not written."""

    id: int
    ok: bool = True
    seconds: float = 0.0  # as a load's


class SpillResult(msgspec.Struct, frozen=True, array_like=True):
    """A spill that is over on one rank. ``bad`` holds the positions that were not written."""

    id: int
    bad: list[int] = []
    seconds: float = 0.0


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has finished since its last report."""

    rank: int
    loads: list[LoadResult] = []
    stores: list[StoreResult] = []
    # Reasons of failures seen on this rank, for the log and the counters: reason -> how often.
    faults: dict[str, int] = {}
    spills: list[SpillResult] = []
    # Adapters that have new weights on this rank, or were asked for: adapter -> (number of the load, digest of the
    # weights). The number changes whenever the weights do, and never comes back. 0: the rank does not have them.
    adapters: dict[int, tuple[int, str]] = {}
    # How often weights have changed in this rank's memory since its start, where that is news.
    weight_changes: int = 0

    def __bool__(self) -> bool:
        parts = (self.loads, self.stores, self.faults, self.spills, self.adapters, self.weight_changes)
        return any(map(bool, parts))


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """What a worker tells the leader about itself when they meet."""

    rank: int
    block_bytes: int
    slots: dict[Tier, int]
    layout: str
    # How many ranks keep these bytes once among them: more than one where every rank has the same KV.
    shared_by: int = 1
    # What a measurement at start has found of tiers: bytes a second, and seconds that any load takes.
    rates: dict[Tier, tuple[float, float]] = {}
    # Of host memory that outlives the engine: a bit a slot, 1 for those that hold what the index of the last engine
    # says they do. Empty where it does not.
    kept: bytes = b""
    # What tells that index from any other: the bits mean nothing beside a different one.
    compared: bytes = b""
    # The name of the directory that its blocks on disk lie in, where it has a disk.
    disk: str = ""
    # The digest of the weights that all ranks have agreed on; empty where nothing outlives the engine.
    weights: str = ""


_T = TypeVar("_T")
_encode = msgspec.msgpack.Encoder().encode


def _decoder(kind: type[_T]) -> Callable[[bytes], _T]:
    """Decodes ``kind``; raises msgspec.DecodeError, and nothing else, on bytes that are no such message."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def checked(data: bytes) -> _T:
        try:
            return decode(data)
        except (UnicodeDecodeError, RecursionError) as error:  # what msgspec lets through
            raise msgspec.DecodeError(str(error)) from error

    return checked


decode_step = _decoder(StepPlan)
decode_reports = _decoder(list[Report])
decode_hello = _decoder(Hello)


def encode(message: StepPlan | list[Report] | Hello) -> bytes:
    return _encode(message)
