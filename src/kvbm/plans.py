"""The messages between leader and worker: the only contract between them.

The leader decides, the workers move bytes. A *step plan* travels down with every engine step (inside the engine's own
metadata, or over :mod:`kvbm.runtime.channel`); a *report* travels up from each rank. Both are msgpack, never pickle, so
nothing read from a socket can run code. Slots and blocks are plain integers: a slot is a place in a tier, a block is a
place in the engine's own KV cache, and the same number means the same place on every rank. Tiers go by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import TypeVar

import msgspec

# A tier's name, as its folder under kvbm/tiers declares it, for example in metrics and logs.
TierName = str

# The engine's own KV cache, as the source or target of a transfer. Not a tier: the engine manages it.
DEVICE = "device"


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """One stretch of blocks on one tier: ``slots[i]`` of the tier belongs to ``blocks[i]`` of the engine.

    The copier reaches the near tier only. Blocks of every other tier are staged through slots of the near tier.
    """

    tier: TierName
    slots: list[int]
    blocks: list[int]
    # Near slots to stage through. One for each block: the blocks stay there. Fewer: the slots are used in turn, and
    # nothing stays. None: no slot was free, and the blocks cannot come.
    via: list[int] = []
    # Keys of the blocks: a tier that outlives the engine verifies that its slots hold exactly these.
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
    # Whether attention may wait for its own layer only. False where the step could be replayed from a full CUDA graph,
    # in which no layer asks: the whole load then comes before the step. Has no meaning outside of a step.
    layered: bool = False
    # Tokens of the request that are left to compute: the work a load by layer can hide behind.
    tokens: int = 0
    # Seconds after which the worker gives up blocks that have not come from a staged tier; 0: never.
    deadline_seconds: float = 0.0
    # And seconds in which nothing at all comes from that tier; 0: as long as its store says.
    stall_seconds: float = 0.0

    @property
    def blocks(self) -> list[int]:
        return [block for copy in self.copies for block in copy.blocks]

    def by_tier(self, positions: Collection[int] | None = None) -> Counter[TierName]:
        """How many of its blocks come from each tier; only of those at these positions, if they are given."""
        found: Counter[TierName] = Counter()
        end = 0
        for copy in self.copies:
            first, end = end, end + len(copy.blocks)
            found[copy.tier] += end - first if positions is None else sum(first <= at < end for at in positions)
        return found


class StorePlan(msgspec.Struct, frozen=True, array_like=True):
    """Copy finished blocks out of the engine's cache once this step's forward pass has written them."""

    id: int
    copy: Copy


class MovePlan(msgspec.Struct, frozen=True, array_like=True):
    """Copy blocks from places of one tier to places of another.

    Stores move bytes between their tier and near slots only. Blocks of any other source are staged through ``via``.
    """

    id: int
    source: TierName
    target: TierName
    slots: list[int]
    targets: list[int]
    tags: list[bytes]
    via: list[int] = []  # near slots, one a block; empty where the source is the near tier


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
    moves: list[MovePlan] = []
    # Stores that must be over before anything of this step begins: another connector writes to their blocks, and not in
    # the engine's order.
    drain_stores: list[int] = []
    # Stores that every rank has confirmed, and whether they are good. Where the near tier outlives the engine, a worker
    # records the checksums of the good ones, so that the next engine finds them.
    verdicts: dict[int, bool] = {}
    # Adapters that the step's loads and stores depend on.
    adapters: list[AdapterUse] = []
    # Adapters that the leader wants to know, as the engine describes them: every rank loads each unless it has it, and
    # reports its weights.
    wanted: list[bytes] = []
    # How many changes of weights the leader has heard of, by rank; empty while there were none.
    changes_heard: list[int] = []
    # Loads outside of the step whose requests the engine still takes for waiting: nothing in this step touches their
    # blocks. The step waits for every other load that a worker has announced.
    unheard: list[int] = []

    def __bool__(self) -> bool:
        return bool(
            self.loads or self.stores or self.fences or self.recompute or self.moves or self.drain_stores
            or self.verdicts or self.adapters or self.wanted or self.unheard
        )  # fmt: skip


class LoadResult(msgspec.Struct, frozen=True, array_like=True):
    """A load that is over on one rank. ``bad`` holds the positions (within the plan) that did not arrive."""

    id: int
    bad: list[int] = []
    seconds: float = 0.0  # how long the copy took, where that is known
    # Positions that did not arrive either, with nothing known against their blocks: no slot was free, or the deadline
    # passed.
    missed: list[int] = []
    # Tiers whose abandoned reads still write to the plan's near slots. One more result follows: the engine is not
    # concerned, but the slots must not be used before it.
    late: list[TierName] = []
    # How long each tier took, where a load is not from the near tier alone.
    tier_seconds: dict[TierName, float] = {}


class StoreResult(msgspec.Struct, frozen=True, array_like=True):
    """A store that is over on one rank; ``ok`` is False when any of its blocks was not written."""

    id: int
    ok: bool = True
    seconds: float = 0.0  # as a load's
    # Positions (within the plan) of blocks that do not fit a packed slot: they are not kept, and nothing has failed.
    unpackable: list[int] = []
    escapes: float | None = None  # the share of values with an escape, in one packed block of some stores


class MoveResult(msgspec.Struct, frozen=True, array_like=True):
    """A move that is over on one rank. ``bad`` holds the positions that were not written."""

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
    moves: list[MoveResult] = []
    # Adapters that have new weights on this rank, or were asked for: adapter -> (number of the load, digest of the
    # weights). The number changes whenever the weights do, and never comes back. 0: the rank does not have them.
    adapters: dict[int, tuple[int, str]] = {}
    # How often weights have changed in this rank's memory since its start, where that is news.
    weight_changes: int = 0

    def __bool__(self) -> bool:
        parts = (self.loads, self.stores, self.faults, self.moves, self.adapters, self.weight_changes)
        return any(map(bool, parts))


class TierHello(msgspec.Struct, frozen=True, array_like=True):
    """One tier as a rank has opened it."""

    name: TierName
    slots: int  # 0 for a tier that is addressed by key
    # Measured at start: bytes a second, and seconds that any read takes. None where nothing was measured.
    rate: tuple[float, float] | None = None
    # Names the store behind the tier, for example its cache directory: every rank must have opened the same one.
    store: str = ""
    # Of a near tier that outlives the engine: one bit a slot, set for the slots whose content matches the index of the
    # last engine. Empty where the tier does not outlive it.
    intact: bytes = b""
    # Digest of that index: the bits have no meaning beside a different one.
    index: bytes = b""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """A worker's description of itself in the handshake with the leader."""

    rank: int
    block_bytes: int
    layout: str
    tiers: list[TierHello]  # the near tier first
    # How many ranks keep these bytes once among them: more than one where every rank has the same KV.
    shared_by: int = 1
    # The digest of the weights that all ranks have agreed on; empty where nothing outlives the engine.
    weights: str = ""
    # Bytes of a block in the engine's memory, where slots hold packed blocks; 0: as many as in a slot.
    raw_bytes: int = 0
    # Where slots hold packed blocks: the name of the note that keeps the next start from it
    # (:mod:`kvbm.runtime.packing_notes`).
    packing_note: str = ""

    def tier(self, name: TierName) -> TierHello | None:
        return next((tier for tier in self.tiers if tier.name == name), None)

    @property
    def slots(self) -> dict[TierName, int]:
        return {tier.name: tier.slots for tier in self.tiers}


_T = TypeVar("_T")
encode = msgspec.msgpack.Encoder().encode


def _decoder(kind: type[_T]) -> Callable[[bytes], _T]:
    """Decodes ``kind``; raises msgspec.DecodeError, and nothing else, on bytes that are no such message."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def checked(data: bytes) -> _T:
        try:
            return decode(data)
        except (UnicodeDecodeError, RecursionError) as error:  # msgspec lets these through
            raise msgspec.DecodeError(str(error)) from error

    return checked


decode_step = _decoder(StepPlan)
decode_reports = _decoder(list[Report])
decode_hello = _decoder(Hello)
