"""Whether KVBM helps and, if not, why: findings from a snapshot, each with a cure.

The page, `kvbm top` and `kvbm doctor` show the same findings, because they all come from here. Each rule is a small
function of a snapshot. The first rule that explains a missing gain is enough, because one cause usually hides others.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from kvbm.core.counts import do_not_suit_packing
from kvbm.observe.format import seconds
from kvbm.observe.snapshot import (
    DEVICE,
    EVICTED,
    LOADED,
    NEW,
    NOT_FOUND,
    ON_DEVICE,
    REFUSED,
    TOO_SHORT,
    Finding,
    Snapshot,
    TierState,
)  # fmt: skip
from kvbm.tiers.registry import NEAR, TIERS

FEW_REQUESTS = 10  # too few for a judgement
LITTLE = 0.02  # a hit rate below this is no gain
MANY_MISSED = 0.1  # fraction of the misses that were evictions


def good(name: str, text: str) -> Finding:
    return Finding(name=name, level="good", text=text)


def note(name: str, text: str, cure: str = "") -> Finding:
    return Finding(name=name, level="note", text=text, cure=cure)


def bad(name: str, text: str, cure: str) -> Finding:
    return Finding(name=name, level="bad", text=text, cure=cure)


def explain(snapshot: Snapshot) -> list[Finding]:
    """The findings, the most important first."""
    gain = _gain(snapshot)
    found = [finding for rule in _TROUBLES if (finding := rule(snapshot)) is not None]
    if gain is not None:
        return [gain, *found]
    why = next((finding for rule in _NO_GAIN if (finding := rule(snapshot)) is not None), None)
    return [*([why] if why else []), *found]


def _gain(s: Snapshot) -> Finding | None:
    hits = sum(s.hit_rates.hits.values())
    if not s.matched_tokens or not s.hit_rates.blocks or hits / s.hit_rates.blocks < LITTLE:
        return None
    found = f"It helps: {hits / s.hit_rates.blocks:.0%} of the blocks that the engine did not have were found"
    if not s.saved.loads:  # the speed of some engines is unknown
        return good("gain", f"{found}; {s.matched_tokens:,} tokens were loaded and not computed.")
    net = s.saved.saved_seconds - s.saved.lost_seconds
    if net <= 0:
        return None
    how = "" if s.saved.measured else " (the speed of prefill is a guess and not measured yet)"
    text = f"{found}, and loading them saved about {seconds(net)} of waiting in {s.saved.loads} loads{how}."
    return good("gain", text)


# -- reasons for a missing gain ---------------------------------------------------------------------------------------


def _too_early(s: Snapshot) -> Finding | None:
    seen = sum(s.outcomes.values())
    if seen >= FEW_REQUESTS or s.outcomes.get(REFUSED):
        return None
    return note(
        "too-early",
        "The engine has admitted no request yet." if not seen else f"Only {seen} requests: too few to judge.",
        cure="Send traffic in which prompts come back, for example with `kvbm bench`.",
    )


def _short(s: Snapshot) -> Finding | None:
    seen = sum(s.outcomes.values())
    if s.outcomes.get(TOO_SHORT, 0) < 0.8 * seen:
        return None
    return note(
        "short-prompts",
        f"Most prompts ({s.outcomes[TOO_SHORT]} of {seen}) are no longer than a block, which is "
        f"{s.identity.block_tokens} tokens, and only whole blocks are kept.",
        cure="Nothing is wrong; there is nothing to gain. A smaller --block-size of the engine keeps shorter prompts.",
    )


def _on_device(s: Snapshot) -> Finding | None:
    seen = sum(s.outcomes.values())
    if s.outcomes.get(ON_DEVICE, 0) < 0.8 * seen:
        return None
    return note(
        "on-device",
        f"The engine's own cache has all blocks of most requests ({s.outcomes[ON_DEVICE]} of {seen}).",
        cure="Nothing is wrong: KVBM takes over when the load outgrows it.",
    )


def _not_loaded(s: Snapshot) -> Finding | None:
    refused = sum(s.refused_loads.values())
    if not refused or refused < sum(s.matched_blocks.values()):
        return None
    reason = max(s.refused_loads, key=lambda name: s.refused_loads[name])
    if reason == "configured never to load":
        return bad(
            "never-load",
            f"{refused} blocks were found but not loaded, because KVBM_LOAD is never.",
            cure="Remove KVBM_LOAD, or set it to auto.",
        )
    speeds = ", ".join(f"{tier.tier} {tier.bytes_per_second / 1e9:.2g} GB/s" for tier in s.tiers)
    slow = next((tier for tier in s.tiers if tier.tier != NEAR.name and tier.measured), None)
    advice = TIERS[slow.tier].advice if slow is not None and slow.tier in TIERS else ""
    text = (
        f"{refused} blocks were found but not loaded: {reason}. Loads were measured at {speeds} a rank, prefill at "
        f"{s.saved.prefill_tokens_per_second:,.0f} tokens/s."
    )
    cure = (
        f"Make the slow tier faster{f' ({advice})' if advice else ''}, or give the {NEAR.name} tier more memory "
        f"({NEAR.size_setting}). `kvbm doctor` measures both."
    )
    return bad("slow-tier", text, cure) if slow else note("slow-tier", text, cure)


def _evicted(s: Snapshot) -> Finding | None:
    """Lookups miss blocks that were evicted: the tiers are too small."""
    evicted = s.missed.get(EVICTED, 0)
    if not evicted or evicted < MANY_MISSED * sum(s.missed.values()):
        return None
    last = s.tiers[-1]
    larger = next((tier for tier in TIERS.values() if tier.staged), None) if last.tier == NEAR.name else None
    more = f" Or add a {larger.name} tier: {larger.size_setting}." if larger is not None else ""
    return bad(
        "tier-too-small",
        f"{evicted} of {sum(s.missed.values())} lookups missed a block that was kept and then evicted: the "
        f"{last.tier} tier ({_size(last)}) is too small for this traffic.",
        cure=f"Raise {_size_setting(last)}.{more}",
    )


def _no_repeats(s: Snapshot) -> Finding | None:
    if s.outcomes.get(NOT_FOUND, 0) < 0.5 * sum(s.outcomes.values()):
        return None
    return note(
        "no-repeats",
        f"Prompts have not repeated so far: {s.missed.get(NEW, 0)} of {sum(s.missed.values())} lookups ended at a "
        "block that was never computed before.",
        cure="There was nothing to reuse. If prompts should share a beginning, look for an early difference between "
        "them: a date or an id at the front, another cache salt, another LoRA adapter.",
    )


def _little(s: Snapshot) -> Finding | None:
    found = s.outcomes.get(LOADED, 0)
    return note(
        "little",
        f"The gain is small so far: {found} of {sum(s.outcomes.values())} requests loaded blocks.",
    )


# -- faults, with or without a gain -----------------------------------------------------------------------------------


def _failures(s: Snapshot) -> Finding | None:
    if not s.failures:
        return None
    worst = sorted(s.failures, key=lambda name: -s.failures[name])[:3]
    return bad(
        "failures",
        f"{sum(s.failures.values())} faults, each of which cost a hit or events: "
        + "; ".join(f"{reason} ({s.failures[reason]} times)" for reason in worst),
        cure="The engine's log has the first of each kind with its traceback.",
    )


def _slower(s: Snapshot) -> Finding | None:
    if s.saved.lost_seconds <= max(s.saved.saved_seconds, 0.1):
        return None
    return bad(
        "loads-too-slow",
        f"Loads took {seconds(s.saved.lost_seconds - s.saved.saved_seconds)} longer than computing would have.",
        cure="Set KVBM_LOAD=auto, which loads only what is faster."
        if s.identity.settings.get("KVBM_LOAD", "auto") != "auto"
        else "KVBM_LOAD is auto and follows the measured speeds. If this goes on, the machine has become slower: "
        "`kvbm doctor` measures it.",
    )


def _smaller_than_device(s: Snapshot) -> Finding | None:
    first = s.tiers[0] if s.tiers else None
    if first is None or first.slots >= s.identity.engine_blocks:
        return None
    needed = s.identity.engine_blocks * s.identity.block_bytes / 1e9
    own = needed / s.identity.packed
    return bad(
        f"{first.tier}-smaller-than-device",
        f"The {first.tier} tier ({_size(first)}) is smaller than the engine's own cache ({own:.2f} GB): it "
        "evicts blocks before the engine does.",
        cure=f"Set {_size_setting(first)} to at least {needed:.2f}, better several times that.",
    )


def _smaller_than_the_one_above(s: Snapshot) -> Finding | None:
    for above, tier in pairwise(s.tiers):
        if tier.bounded and 0 < tier.slots < above.slots:
            return bad(
                f"{tier.tier}-smaller-than-{above.tier}",
                f"The {tier.tier} tier ({_size(tier)}) is smaller than the {above.tier} tier ({_size(above)}): it "
                f"holds nothing that the {above.tier} tier does not.",
                cure=f"Set {_size_setting(tier)} to at least {above.slots * above.block_bytes / 1e9:.2f}.",
            )
    return None


def _filtered(s: Snapshot) -> Finding | None:
    """A tier is empty because its admission filter admits nothing."""
    for tier in s.tiers:
        filtered = s.refused_blocks.get(f"{tier.tier} filter", 0)
        if filtered and tier.slots - tier.free <= 0.1 * filtered:
            return note(
                f"{tier.tier}-filter",
                f"The {tier.tier} tier is nearly empty: its filter has held back {filtered} blocks that were used "
                "only once.",
                cure="This reduces wear of the SSD. If prompts come back only after the tier above has evicted them, "
                "set DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER=1.",
            )
    return None


def _overrun(s: Snapshot) -> Finding | None:
    refused = s.refused_blocks.get("queue full", 0)
    stored = sum(flow.blocks for flow in s.flows if flow.target != DEVICE)
    if refused < 0.05 * (stored + refused) or not refused:
        return None
    return note(
        "queue-full",
        f"{refused} blocks were not kept because the offload queue was full; {stored} were kept.",
        cure="The engine computes blocks faster than they are offloaded. Raise KVBM_MAX_PENDING_OFFLOADS.",
    )


def _packed(s: Snapshot) -> Finding | None:
    left_out, packed = s.unpackable_blocks, s.identity.packed
    if packed == 1:
        return None
    stored = sum(flow.blocks for flow in s.flows if flow.source == DEVICE)
    if not do_not_suit_packing(left_out, stored + left_out):
        text = f"Blocks are packed to {packed:.0%} of their size, so the tiers hold {1 / packed:.2f} times as many."
        escapes = f"{s.escapes:.2%} of their values need an escape"
        return good("packed", f"{text} {escapes}; {left_out:,} blocks did not fit and were not kept.")
    return bad(
        "unpackable",
        f"{left_out} blocks do not fit a packed slot and were not kept; {stored} were kept. A lookup ends at the first "
        "block that is not there.",
        cure="This model's KV does not suit packing. Restart with KVBM_PACK=off. With auto the next start does not "
        "pack either, if it finds the note of this one.",
    )


_NO_GAIN: tuple[Callable[[Snapshot], Finding | None], ...] = (
    _too_early, _not_loaded, _short, _on_device, _evicted, _no_repeats, _little,
)  # fmt: skip
_TROUBLES: tuple[Callable[[Snapshot], Finding | None], ...] = (
    _failures, _slower, _smaller_than_device, _smaller_than_the_one_above, _filtered, _overrun,
    _packed,
)  # fmt: skip


def _size_setting(tier: TierState) -> str:
    return TIERS[tier.tier].size_setting if tier.tier in TIERS else "its size"


def _size(tier: TierState) -> str:
    return f"{tier.slots * tier.block_bytes / 1e9:.2f} GB, {tier.slots} blocks"
