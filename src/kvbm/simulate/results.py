"""Results of a simulation, as they are written to JSON."""

from __future__ import annotations

from statistics import fmean, median

import msgspec

from kvbm.plans import TierName


class TierCounts(msgspec.Struct):
    """One tier, or the engine's own cache. ``prefix_blocks``: found without a gap from the front, so of use.
    ``blocks``: with those behind a gap. A block in two tiers counts for the faster one."""

    prefix_blocks: int = 0
    blocks: int = 0
    tokens: int = 0  # of the prefix blocks
    read_bytes: int = 0
    written_bytes: int = 0
    evicted_blocks: int = 0


class Totals(msgspec.Struct):
    """Of all requests of a trace. ``blocks`` and ``tokens`` are those of the prompts."""

    tiers: dict[TierName, TierCounts]
    lookups: int = 0
    blocks: int = 0
    tokens: int = 0
    loaded_tokens: int = 0  # found and, by the cost model, worth loading
    ttft_seconds: list[float] = []  # expected, without time in a queue
    recompute_seconds: list[float] = []  # the same without KVBM's tiers
    tenants: dict[str, list[int]] = {}  # by tenant: blocks of the prompts, and those found without a gap


class TierRates(msgspec.Struct):
    prefix_hit_rate: float  # of the prompts' blocks
    block_hit_rate: float
    token_hit_rate: float
    read_bytes: int
    written_bytes: int
    evicted_blocks: int


class Outcome(msgspec.Struct):
    """One replay."""

    variant: str
    slots: dict[TierName, int]
    bytes: dict[TierName, int]  # of the slots
    prefix_hit_rate: float  # of all tiers together
    block_hit_rate: float
    token_hit_rate: float
    loaded_token_rate: float
    mean_ttft_seconds: float
    median_ttft_seconds: float
    mean_recompute_seconds: float
    tiers: dict[TierName, TierRates]
    seconds: float  # that the simulation took
    tenants: dict[str, float] = {}  # prefix hit rate of each, where there are several

    @property
    def total_slots(self) -> int:
        return sum(self.slots.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())


def outcome(variant: str, slots: dict[TierName, int], block_bytes: int, totals: Totals, seconds: float) -> Outcome:
    def part(count: int, whole: int) -> float:
        return count / whole if whole else 0.0

    tiers = {
        name: TierRates(
            prefix_hit_rate=part(tier.prefix_blocks, totals.blocks),
            block_hit_rate=part(tier.blocks, totals.blocks),
            token_hit_rate=part(tier.tokens, totals.tokens),
            read_bytes=tier.read_bytes,
            written_bytes=tier.written_bytes,
            evicted_blocks=tier.evicted_blocks,
        )
        for name, tier in totals.tiers.items()
    }
    return Outcome(
        variant=variant,
        slots=slots,
        bytes={name: count * block_bytes for name, count in slots.items()},
        prefix_hit_rate=sum(tier.prefix_hit_rate for tier in tiers.values()),
        block_hit_rate=sum(tier.block_hit_rate for tier in tiers.values()),
        token_hit_rate=sum(tier.token_hit_rate for tier in tiers.values()),
        loaded_token_rate=part(totals.loaded_tokens, totals.tokens),
        mean_ttft_seconds=fmean(totals.ttft_seconds),
        median_ttft_seconds=median(totals.ttft_seconds),
        mean_recompute_seconds=fmean(totals.recompute_seconds),
        tiers=tiers,
        seconds=seconds,
        tenants={name: part(found, blocks) for name, (blocks, found) in totals.tenants.items() if name},
    )
