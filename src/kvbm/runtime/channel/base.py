"""What leader and workers agree on before the first plan."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import msgspec

from kvbm.plans import Hello, TierName

logger = logging.getLogger(__name__)


class ChannelError(RuntimeError):
    """Leader and worker cannot work together; says why and what to change."""


class HandshakeTimeoutError(ChannelError):
    """Leader and workers did not all meet in time."""


class Timing(msgspec.Struct, frozen=True):
    """How often things happen, in seconds."""

    round: float = 0.5  # between two rounds of the handshake
    progress: float = 5.0  # between two log lines about a handshake that is still waiting
    beat: float = 1.0  # between two pings or beats
    # A rank that was silent for so long is lost. Long, because there is no way back from it, and a thread of a healthy
    # worker may go without the interpreter for many seconds while an engine compiles or loads kernels.
    silence: float = 60.0


TIMING = Timing()


class Agreement(msgspec.Struct, frozen=True, array_like=True):
    """What all ranks have in common: the outcome of the handshake."""

    slots: dict[TierName, int]  # of every tier that all ranks have: the smallest number among them; 0 if it is keyed
    layout: str
    block_bytes: list[int]  # of one block, by rank


def agree(hellos: Sequence[Hello]) -> Agreement:
    """What ranks with these hellos can do together. Raises :class:`ChannelError` when that is nothing."""
    hellos = sorted(hellos, key=lambda hello: hello.rank)
    layouts: dict[str, list[int]] = {}
    for hello in hellos:
        layouts.setdefault(hello.layout, []).append(hello.rank)
    if len(layouts) > 1:
        found = "; ".join(f"{name_ranks(ranks)}: {layout!r}" for layout, ranks in layouts.items())
        raise ChannelError(
            f"the workers disagree on the layout of a block: {found}. A block must mean the same on every rank: start "
            "all workers with the same engine, model and cache settings"
        )
    slots: dict[TierName, int] = {}
    for tier in dict.fromkeys(tier.name for hello in hellos for tier in hello.tiers):
        # A tier that is addressed by key has no slots, and has none on any rank.
        keyed = all(hello.slots.get(tier) == 0 for hello in hellos)
        without = [hello.rank for hello in hellos if hello.slots.get(tier, 0) < 1]
        if without and not keyed:
            logger.warning("the %s tier is not used: %s without a slot in it", tier, name_ranks(without))
        else:
            slots[tier] = min(hello.slots[tier] for hello in hellos)
    if not any(slots.values()):
        raise ChannelError(
            "no cache tier has a slot on every rank; give all workers the same DYN_KVBM_CPU_CACHE_GB or "
            "DYN_KVBM_DISK_CACHE_GB, large enough for at least one block a rank"
        )
    return Agreement(slots, hellos[0].layout, [hello.block_bytes for hello in hellos])


def name_ranks(ranks: Iterable[int]) -> str:
    named = sorted(ranks)
    return f"rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}"
