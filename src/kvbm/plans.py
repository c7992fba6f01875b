"""The messages between leader and worker: the one contract of the two halves.

The leader decides, the workers move bytes. A *step plan* travels down with every engine step (inside the engine's own
metadata, or over :mod:`kvbm.runtime.channel`); a *report* travels up from each rank. Both are msgpack, never pickle, so
that nothing read from a socket can run code. Slots and blocks are plain integers: a slot is a place in a tier, a block
is a place in the engine's own KV cache, and the same number means the same place on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

import msgspec


class Tier(IntEnum):
    """Where bytes lie, fastest first."""

    DEVICE = 1
    HOST = 2
    DISK = 3
    OBJECT = 4


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """One stretch of blocks on one tier: ``slots[i]`` of the tier belongs to ``blocks[i]`` of the engine."""

    tier: Tier
    slots: list[int]
    blocks: list[int]


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

    @property
    def blocks(self) -> list[int]:
        return [block for copy in self.copies for block in copy.blocks]


class StorePlan(msgspec.Struct, frozen=True, array_like=True):
    """Copy finished blocks out of the engine's cache once this step's forward pass has written them."""

    id: int
    copy: Copy


class Recompute(msgspec.Struct, frozen=True, array_like=True):
    """A request whose load has failed on some rank, for engines that cannot be told of it: every rank must itself set
    the request back to ``position``, the first token to compute, and answers with a :class:`LoadResult` of this id."""

    id: int
    request: str
    position: int
    # True: every rank has set the request back, so that it may go on.
    agreed: bool = False


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """Everything the workers do around one engine step."""

    loads: list[LoadPlan] = []
    stores: list[StorePlan] = []
    # Stores that must have read their source before this step writes: their blocks have been handed to another request.
    fences: list[int] = []
    recompute: list[Recompute] = []

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores or self.fences or self.recompute)


class LoadResult(msgspec.Struct, frozen=True, array_like=True):
    """A load that is over on one rank. ``bad`` holds the positions (within the plan) that did not arrive."""

    id: int
    bad: list[int] = []
    seconds: float = 0.0  # how long the copy took, where that is known


class StoreResult(msgspec.Struct, frozen=True, array_like=True):
    """A store that is over on one rank; ``ok`` is False when any of its blocks was not written."""

    id: int
    ok: bool = True
    seconds: float = 0.0  # as a load's


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has finished since its last report."""

    rank: int
    loads: list[LoadResult] = []
    stores: list[StoreResult] = []
    # Reasons of failures seen on this rank, for the log and the counters: reason -> how often.
    faults: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores or self.faults)


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """What a worker tells the leader about itself when they meet."""

    rank: int
    block_bytes: int
    slots: dict[Tier, int]
    layout: str


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
