"""Numbers since the start, for metrics, logs and tests."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvbm.plans import TierName

T = TypeVar("T", int, float)

_MAX_UNPACKABLE_SHARE = 0.0002
_FEW_BLOCKS = 10


class Counts(msgspec.Struct):
    """Blocks count once, not once a rank. Bytes are those of all ranks, seconds those of the slowest one; both count
    transfers that went well and whose time is known."""

    matched_blocks: dict[TierName, int] = {}
    matched_tokens: int = 0
    offloaded_blocks: int = 0
    onboarded_blocks: dict[TierName, int] = {}
    promoted_blocks: int = 0  # came from a staged tier and stayed in the near one
    # Came from a remote tier to the near one while their request waited in the engine's queue, by that tier.
    fetched_blocks: dict[TierName, int] = {}
    failed_fetch_blocks: dict[TierName, int] = {}
    failed_load_blocks: int = 0
    missed_load_blocks: int = 0  # of these: with nothing known against the block, no slot was free or it came too late
    failed_store_blocks: int = 0
    tainted_store_blocks: int = 0
    refused_store_blocks: int = 0
    unpackable_blocks: int = 0  # do not fit a packed slot, and were not kept
    sampled_blocks: int = 0  # packed blocks whose escapes a rank has counted
    sampled_escapes: float = 0.0  # the sum of their shares of escapes
    # Moves to a tier, by that tier.
    moved_blocks: dict[TierName, int] = {}
    failed_move_blocks: dict[TierName, int] = {}
    refused_move_blocks: dict[TierName, int] = {}  # passed over: queue full, or evicted first
    filtered_move_blocks: dict[TierName, int] = {}  # not admitted; may be later
    hints: dict[str, int] = {}  # that came with requests, by what became of them
    refused_load_blocks: dict[str, int] = {}  # found and not loaded, by reason
    loaded_bytes: dict[TierName, int] = {}
    loaded_seconds: dict[TierName, float] = {}
    stored_bytes: dict[TierName, int] = {}
    stored_seconds: dict[TierName, float] = {}

    def add_loaded(self, tier: TierName, size: int, seconds: float) -> None:
        add(self.loaded_bytes, tier, size)
        add(self.loaded_seconds, tier, seconds)

    def add_stored(self, tier: TierName, size: int, seconds: float) -> None:
        add(self.stored_bytes, tier, size)
        add(self.stored_seconds, tier, seconds)

    @property
    def escapes(self) -> float:
        """The share of the values of packed blocks that have an escape, as far as it is known."""
        return self.sampled_escapes / max(1, self.sampled_blocks)


def do_not_suit_packing(unpackable: int, blocks: int) -> bool:
    """Whether too many of these blocks do not fit packed slots.

    A lookup ends at the first block that is not there, so a block that does not fit hides all blocks of its prompt
    after it. With one in 5,000, at random places, prompts of 256 blocks lose 2.5 % of their hits and prompts of 2,048
    blocks 18 %.
    """
    return unpackable > max(_FEW_BLOCKS, _MAX_UNPACKABLE_SHARE * blocks)


def add(totals: dict[str, T], name: str, value: T) -> None:
    totals[name] = totals.get(name, 0) + value
