"""The tiers of one rank: its slab, and both halves of every staged tier that the settings ask for.

A rank under SGLang has a leader of its own, so it opens its stores as a rank and its catalogs as a leader with a single
hello.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from msgspec.structs import replace

from kvbm.core.manager import BlockManager
from kvbm.plans import Hello, TierHello, TierName
from kvbm.runtime.tiers import open_manager
from kvbm.tiers import registry
from kvbm.tiers.base import RankContext, Store
from kvbm.tiers.bounded import Call, DiskHangs, reason_of
from kvbm.tiers.registry import NEAR
from kvbm.transfer.base import Slab

logger = logging.getLogger("kvbm")


class Opened(NamedTuple):
    context: RankContext  # of a reader without a near tier: only the writer hears when its pages are cleared
    slab: Slab
    stores: dict[TierName, Store]
    manager: BlockManager
    hello: Hello


def open_tiers(context: RankContext) -> Opened:
    """A staged tier that cannot be used now is left out, with the reason in the log. Raises for a setting that can
    never be met."""
    if context.access == "reader":
        config = replace(context.config, cpu_cache_gb=0.0, cpu_cache_override_num_blocks=0)
        context = context._replace(config=config)
    config, cache = context.config, context.cache
    opening: dict[TierName, Call[Store | None]] = {}
    stores: dict[TierName, Store] = {}
    slab = None
    try:
        for tier in registry.wanted(config):
            if (call := tier.open_store(context)) is not None:
                opening[tier.name] = call
        slots = _near_slots(context, opening)
        slab = NEAR.carve(context, NEAR.open_slab(context, slots, may_persist=False))
        hellos = [TierHello(NEAR.name, slots)]
        for name, call in opening.items():
            try:
                store = call.result()
            except DiskHangs as error:
                logger.warning(
                    "there is no %s tier: %s. This engine runs without it; pages there are kept for the next start",
                    name, reason_of(error),
                )  # fmt: skip
                continue
            if store is not None:
                stores[name] = store
                # Injected faults count the calls of a store, and must hit those of a test.
                rate = None if config.inject_faults else store.measure()
                hellos.append(TierHello(name, store.slots, rate, store.identity))
        layout = "" if cache is None else str(cache["layout"])
        hello = Hello(0, context.block_bytes, layout, hellos)
        manager = open_manager(config, [hello], cache, context.access)
        for name in set(stores).difference(manager.catalogs):
            stores.pop(name).close()
        return Opened(context, slab, stores, manager, hello)
    except BaseException:
        for call in opening.values():
            call.abandon()
        if slab is not None:
            slab.close()
        raise


def _near_slots(context: RankContext, opening: dict[TierName, Call[Store | None]]) -> int:
    """Slots of the near tier, or of the staging buffer where there is no near tier."""
    if NEAR.is_wanted(context.config):
        return NEAR.slots(context, 0)
    tiers = (registry.TIERS[name] for name in opening)
    return max((tier.staging_slots(context.config, context.slot_bytes) for tier in tiers), default=0) or 1
