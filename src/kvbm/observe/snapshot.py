"""The state of a running KVBM at one moment: the contract between the engine and the metrics port, page and commands.

A *source* makes a :class:`Snapshot` on request only, so an engine without observers pays nothing. Threads other than
the engine's call it. It never waits, and reads numbers while the engine's thread changes them: each number is a moment
old, and two may be of different moments. A snapshot contains no content of requests: no tokens, texts or keys.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from kvbm.plans import DEVICE as DEVICE

# Incremented when a field changes its meaning or goes: `kvbm top` and `kvbm doctor` read engines of other releases.
FORMAT = 1

# The outcome of a lookup, as a label.
LOADED, REFUSED, NOT_FOUND, ON_DEVICE, TOO_SHORT, SKIPPED = (
    "loaded", "found, not loaded", "not found", "on the device", "too short", "not looked up",
)  # fmt: skip

# Why a lookup ended where it did.
NEW, EVICTED = "new", "evicted"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that are constant while the engine runs."""

    kvbm: str  # version
    engine: str  # for example "vllm"
    engine_version: str
    model: str
    ranks: int
    block_tokens: int
    block_bytes: int  # of one block on all ranks together
    packed: float = 1.0  # bytes of a block in a tier, by those in the engine's memory
    engine_blocks: int  # of the engine's own cache
    device: str = "GPU"  # where the engine's own cache is: "GPU" or "CPU"
    settings: dict[str, str] = {}  # those that were set, by variable, as text; no secrets


class TierState(msgspec.Struct, frozen=True, kw_only=True):
    """The slots of a tier. ``free + writing + idle + pinned`` is ``slots``."""

    tier: str
    slots: int
    free: int
    writing: int
    idle: int  # hold a block that no transfer reads; these can be evicted
    pinned: int  # hold a block that a transfer reads
    block_bytes: int
    evictions: int = 0
    # The cost model's estimate for loads from this tier; 0 without a cost model.
    bytes_per_second: float = 0.0
    measured: bool = False  # False: the number is the tier's prior
    bounded: bool = True  # False: the slots are the blocks that this engine knows of
    policy: str = ""  # of eviction


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that moved from one place to another since the start. Bytes are summed over all ranks."""

    source: str
    target: str
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0  # of the slowest rank, summed over transfers
    failed_blocks: int = 0
    queued_blocks: int = 0  # planned or running


class SourceFlow(msgspec.Struct, frozen=True, kw_only=True):
    """What has come from one of the sources of a tier that reads from several. Bytes are summed over all ranks."""

    tier: str
    source: str
    path: str = ""  # how the bytes come, in words
    blocks: int = 0
    bytes: int = 0
    bytes_per_second: float = 0.0  # of the slowest rank; 0: not measured
    refused: dict[str, int] = {}  # blocks that did not come or were refused, by kind
    suspended: bool = False


class HitRates(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that each tier had, of those that the latest requests looked up."""

    requests: int = 0
    blocks: int = 0
    hits: dict[str, int] = {}  # tier -> blocks

    def rate(self, tier: str) -> float:
        return self.hits.get(tier, 0) / self.blocks if self.blocks else 0.0


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate of the seconds to first token that loads have saved.

    For every load: the time to compute its tokens at the measured speed of prefill, less the time of the load. The time
    of a load that overlaps a forward pass counts in full, so the estimate is low. Loads that took longer than computing
    are summed separately.
    """

    saved_seconds: float = 0.0
    lost_seconds: float = 0.0
    loads: int = 0
    prefill_tokens_per_second: float = 0.0
    measured: bool = False  # False: the speed of prefill is still a guess


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A fault, a note or a success. ``name`` identifies the kind of finding, for scripts."""

    name: str
    level: Literal["good", "note", "bad"]
    text: str
    cure: str = ""  # the action to take


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request: its lookup and its load."""

    id: str
    at: float  # Unix time
    prompt_tokens: int
    device_tokens: int  # found in the engine's own cache
    found: dict[str, int]  # tier -> tokens
    loaded_tokens: int
    why: str  # a sentence: why so many were loaded, or why none
    in_step: bool = False
    load_seconds: float | None = None  # None while the load runs, and without a load
    failed_tokens: int = 0  # tokens of the load that did not arrive and were recomputed
    saved_seconds: float | None = None


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What other engines have read from this one through a tier. Bytes are summed over all ranks."""

    tier: str
    blocks: int = 0
    bytes: int = 0
    questions: int = 0
    refused: dict[str, int] = {}  # connections and reads, by kind


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    at: float  # Unix time
    started: float
    identity: Identity
    tiers: list[TierState]
    flows: list[Flow]
    lookups: int
    looked_up_blocks: int
    matched_tokens: int
    matched_blocks: dict[str, int]  # tier -> blocks
    hit_rates: HitRates
    refused_blocks: dict[str, int]  # not kept, by reason
    refused_loads: dict[str, int]  # blocks found but not loaded, by reason
    outcomes: dict[str, int]  # requests by outcome
    missed: dict[str, int]  # lookups that ended at a "new" or at an "evicted" block
    failures: dict[str, int]  # by reason
    saved: Saved
    record_dropped: int = 0  # lines that the record dropped
    unpackable_blocks: int = 0  # do not fit a packed slot, and were not kept
    escapes: float = 0.0  # the share of values of packed blocks that need an escape, of a sample
    hints: dict[str, int] = {}  # that came with requests, by what became of them
    requests: list[Request] = []  # the latest, newest first
    findings: list[Finding] = []
    sources: list[SourceFlow] = []
    served: list[Served] = []
    format: int = FORMAT


class Source(Protocol):
    def snapshot(self, requests: int = 0) -> Snapshot:
        """The current state, with this many of the latest requests. Called from any thread; never waits."""
        ...


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Snapshot).decode


def to_json(snapshot: Snapshot) -> bytes:
    return _encode(snapshot)


def from_json(data: bytes) -> Snapshot:
    """Raises msgspec.DecodeError for invalid data and for an unknown format."""
    snapshot = _decode(data)
    if snapshot.format != FORMAT:
        raise msgspec.DecodeError(f"the snapshot has format {snapshot.format}; this release reads format {FORMAT}")
    return snapshot
