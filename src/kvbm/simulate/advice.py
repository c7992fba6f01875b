"""Sentences that a sweep supports: which sizes are enough, and what a policy or a filter is worth."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm.observe.format import size
from kvbm.plans import DEVICE, TierName
from kvbm.simulate.results import Outcome

# A size is enough when it finds this part of what the largest one of the sweep finds.
ENOUGH = 0.9
DAY = 86_400.0


def choose(outcomes: Sequence[Outcome]) -> Outcome:
    """The smallest sizes that are enough, under the settings that find most."""
    best = max(outcomes, key=lambda one: one.prefix_hit_rate)
    alike = [one for one in outcomes if one.variant == best.variant]
    enough = [one for one in alike if one.prefix_hit_rate >= ENOUGH * best.prefix_hit_rate]
    return min(enough, key=_price)


def _price(one: Outcome) -> tuple[float, float]:
    """Memory costs about ten times what flash does: by capacity, weighed by the order of the tiers."""
    weighed = sum(count / 10**level for level, count in enumerate(one.bytes.values()))
    return weighed, one.total_bytes


def doubled(one: Outcome) -> dict[TierName, int]:
    return {tier: 2 * slots for tier, slots in one.slots.items()}


def find(outcomes: Sequence[Outcome], variant: str, slots: dict[TierName, int]) -> Outcome | None:
    return next((one for one in outcomes if one.variant == variant and one.slots == slots), None)


def sentences(outcomes: Sequence[Outcome], possible: float, seconds: float) -> list[str]:
    """``possible``: the prefix hit rate without evictions. ``seconds``: that the trace covers."""
    if not possible:
        return ["No prompt of this trace begins as an earlier one does: no cache can help it."]
    chosen = choose(outcomes)
    twice = find(outcomes, chosen.variant, doubled(chosen))
    verb = "give" if len(chosen.bytes) > 1 else "gives"
    text = f"{sizes(chosen)} {verb} {chosen.prefix_hit_rate / possible:.0%} of what is possible"
    if twice is not None:
        gain = (twice.prefix_hit_rate - chosen.prefix_hit_rate) / possible
        text += f"; double gives {max(gain, 0.0):.0%} more"
    found = [f"{text}. ({chosen.prefix_hit_rate:.3f} of all blocks are found; {possible:.3f} are without evictions.)"]
    if chosen.mean_recompute_seconds:
        saved = 1 - chosen.mean_ttft_seconds / chosen.mean_recompute_seconds
        found.append(
            f"The mean time to first token is expected to fall by {saved:.0%}, from "
            f"{chosen.mean_recompute_seconds:.2f} s to {chosen.mean_ttft_seconds:.2f} s, queueing not counted."
        )
    unused = chosen.token_hit_rate - chosen.tiers[DEVICE].token_hit_rate - chosen.loaded_token_rate
    if unused > 0.01:
        found.append(f"{unused:.1%} of all tokens are found and not loaded: computing them is faster.")
    for tier in list(chosen.slots)[1:]:
        written = chosen.tiers[tier].written_bytes
        if written and seconds:
            found.append(
                f"{size(written)} are written to {tier}, {size(written / seconds * DAY)} a day at this load: compare "
                "that with the endurance of the drive."
            )
    found += _variants(outcomes, chosen)
    return found


def _variants(outcomes: Sequence[Outcome], chosen: Outcome) -> list[str]:
    """The chosen settings beside the others, at the same sizes."""
    others = [one for one in outcomes if one.slots == chosen.slots and one.variant != chosen.variant]
    return [
        f"At these sizes {chosen.variant} finds {chosen.prefix_hit_rate - one.prefix_hit_rate:+.3f} of all blocks "
        f"compared with {one.variant}."
        for one in others
    ]


def sizes(one: Outcome) -> str:
    parts = [f"{size(count)} of {tier}" for tier, count in one.bytes.items()]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
