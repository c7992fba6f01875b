"""What can be seen of a running KVBM at one moment: the one contract between the engine and whoever looks at it.

A *source* makes a :class:`Snapshot` when it is asked to and at no other time, so nobody pays while nobody looks. It is
asked by threads of its own (the metrics server, the log line), never waits, and takes numbers that the engine's thread
goes on changing: each of them was true a moment ago, and two of them need not be of the same moment. Nothing here holds
what was said: no tokens, no texts, no keys.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from kvbm.plans import DEVICE

__all__ = ["DEVICE", "Finding", "Flow", "HitRates", "Identity", "Request", "Saved", "Snapshot", "Source", "TierState"]

# Raised when a field changes its meaning or goes; `kvbm top` and `kvbm doctor` look at engines of other releases.
FORMAT = 1

# What becomes of a lookup, as a label.
LOADED, REFUSED, NOT_FOUND, ON_DEVICE, TOO_SHORT, SKIPPED = (
    "loaded", "found, not loaded", "not found", "on the device", "too short", "not looked up",
)  # fmt: skip

# Why a lookup ended where it did.
NEW, EVICTED = "new", "evicted"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the engine runs."""

    kvbm: str  # version
    engine: str  # for example "vllm"
    engine_version: str
    model: str
    ranks: int
    block_tokens: int
    block_bytes: int  # of one block on all ranks together
    engine_blocks: int  # of the engine's own cache
    settings: dict[str, str] = {}  # those that were set, by variable, as text; no secrets


class TierState(msgspec.Struct, frozen=True, kw_only=True):
    """The slots of a tier. ``free + writing + idle + pinned`` is ``slots``."""

    tier: str
    slots: int
    free: int
    writing: int
    idle: int  # hold a block that nobody is reading; these may be evicted
    pinned: int  # somebody is reading them
    block_bytes: int
    evictions: int = 0
    # What the cost model believes a load from here takes; 0 where it has no say.
    bytes_per_second: float = 0.0
    measured: bool = False  # False: nothing has been measured yet, the number is a guess


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that went from one place to another since the start. Bytes are those of all ranks together."""

    source: str
    target: str
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0  # of the slowest rank, summed over transfers
    failed_blocks: int = 0
    queued_blocks: int = 0  # planned and not over yet


class HitRates(msgspec.Struct, frozen=True, kw_only=True):
    """Over the latest requests: of the blocks that were looked up, how many each tier had."""

    requests: int = 0
    blocks: int = 0
    hits: dict[str, int] = {}  # tier -> blocks

    def rate(self, tier: str) -> float:
        return self.hits.get(tier, 0) / self.blocks if self.blocks else 0.0


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to first token that loading has spared requests, as an estimate.

    For every load: what computing its tokens would have taken at the speed that prefill was measured to have, less what
    the load took. A load that ran under a forward pass is counted in full, so this is rather too little. Loads that
    came out slower than computing are summed up apart.
    """

    saved_seconds: float = 0.0
    lost_seconds: float = 0.0
    loads: int = 0
    prefill_tokens_per_second: float = 0.0
    measured: bool = False  # False: the speed of prefill is a guess so far


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that stands out. ``name`` is the same for the same thing whatever the numbers, for scripts."""

    name: str
    level: Literal["good", "note", "bad"]
    text: str
    cure: str = ""  # what to do about it


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request when the engine let it in."""

    id: str
    at: float  # Unix time
    prompt_tokens: int
    device_tokens: int  # the engine had them itself
    found: dict[str, int]  # tier -> tokens that were there
    loaded_tokens: int
    why: str  # a sentence: why so many were loaded, or why none
    in_step: bool = False
    load_seconds: float | None = None  # None until the load is over, or when there was none
    failed_tokens: int = 0  # of the loaded ones: did not arrive and were computed
    saved_seconds: float | None = None


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
    refused_loads: dict[str, int]  # blocks that were found and not loaded, by reason
    outcomes: dict[str, int]  # requests by what became of them
    missed: dict[str, int]  # lookups that ended at a block which is "new", or was kept once and "evicted"
    failures: dict[str, int]  # by reason
    saved: Saved
    record_dropped: int = 0  # lines that the record had no room for
    requests: list[Request] = []  # the latest, newest first
    findings: list[Finding] = []
    format: int = FORMAT


class Source(Protocol):
    def snapshot(self, requests: int = 0) -> Snapshot:
        """The state of affairs, with so many of the latest requests. Called from any thread; never waits."""
        ...


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Snapshot).decode


def to_json(snapshot: Snapshot) -> bytes:
    return _encode(snapshot)


def from_json(data: bytes) -> Snapshot:
    """Raises msgspec.DecodeError when this is no snapshot, or one of a format that is not known here."""
    snapshot = _decode(data)
    if snapshot.format != FORMAT:
        raise msgspec.DecodeError(f"a snapshot of format {snapshot.format}, and only {FORMAT} is known here")
    return snapshot
