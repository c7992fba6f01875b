"""What has happened since the start, in numbers: for metrics, logs and tests."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvbm.plans import Tier

T = TypeVar("T", int, float)


class Counts(msgspec.Struct):
    """Blocks count once, not once a rank. Bytes are those of all ranks, seconds those of the slowest one, and both are
    of transfers that went well and whose time is known."""

    matched_blocks: dict[Tier, int] = msgspec.field(default_factory=dict)
    matched_tokens: int = 0
    offloaded_blocks: int = 0
    onboarded_blocks: dict[Tier, int] = msgspec.field(default_factory=dict)
    promoted_blocks: int = 0  # that came from a slower tier and stayed in host memory
    spilled_blocks: int = 0  # written on from host memory to disk
    failed_load_blocks: int = 0
    missed_load_blocks: int = 0  # of these: with nothing known against the block, there was no room or no time left
    failed_store_blocks: int = 0
    tainted_store_blocks: int = 0
    refused_store_blocks: int = 0
    failed_spill_blocks: int = 0
    refused_spill_blocks: int = 0  # passed over: too many were waiting, or they left host memory before their turn
    filtered_spill_blocks: int = 0  # held back by the filter when they came to host memory; they may pass later
    refused_load_blocks: dict[str, int] = msgspec.field(default_factory=dict)  # found and not loaded, by reason
    loaded_bytes: dict[Tier, int] = msgspec.field(default_factory=dict)
    loaded_seconds: dict[Tier, float] = msgspec.field(default_factory=dict)
    stored_bytes: dict[Tier, int] = msgspec.field(default_factory=dict)
    stored_seconds: dict[Tier, float] = msgspec.field(default_factory=dict)

    def add_loaded(self, tier: Tier, size: int, seconds: float) -> None:
        _add(self.loaded_bytes, tier, size)
        _add(self.loaded_seconds, tier, seconds)

    def add_stored(self, tier: Tier, size: int, seconds: float) -> None:
        _add(self.stored_bytes, tier, size)
        _add(self.stored_seconds, tier, seconds)

    def add_onboarded(self, tier: Tier, blocks: int) -> None:
        _add(self.onboarded_blocks, tier, blocks)


def _add(totals: dict[Tier, T], tier: Tier, value: T) -> None:
    totals[tier] = totals.get(tier, 0) + value
