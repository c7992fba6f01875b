"""The leader's start: every tier that all ranks have opened, and the edges between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kvbm.config import Config
from kvbm.core.catalog import Catalog
from kvbm.core.clock import OperationClock
from kvbm.core.cost import CostModel
from kvbm.core.manager import BlockManager
from kvbm.core.rate import Rate
from kvbm.plans import Hello, TierName
from kvbm.runtime.leader import Leader
from kvbm.tiers import registry
from kvbm.tiers.base import Access, Fingerprint, LeaderContext, common_fingerprint
from kvbm.tiers.bounded import reason_of

logger = logging.getLogger("kvbm")


def agreed_weights(hellos: Sequence[Hello]) -> str:
    """The digest of the weights that all ranks have agreed on. Empty when the ranks disagree (logged) or have no
    digest (they logged why); persistence is then off."""
    found = {hello.weights for hello in hellos}
    if len(found) == 1:
        return found.pop()  # empty: the ranks have said why
    named = ", ".join(f"rank {hello.rank}: {hello.weights or 'none'}" for hello in hellos)
    logger.warning("Cannot fingerprint the weights; persistence is off: the ranks disagree (%s)", named)
    return ""


def operation_clock() -> OperationClock:
    """Counts whole microseconds from now on: a record has them without loss."""
    began = time.monotonic_ns()
    return OperationClock(lambda: (time.monotonic_ns() - began) // 1000 / 1e6)


def open_manager(
    config: Config, hellos: Sequence[Hello], cache: Fingerprint | None, access: Access = "own"
) -> BlockManager:
    """The bookkeeping over all tiers that every rank has. ``cache``: the fingerprint of this engine's KV, but
    for its layout; None: no block may outlive the engine. The caller closes the manager."""
    common = None
    if cache is not None and registry.outlives_engine(config):
        common = common_fingerprint(cache, (hello.layout for hello in hellos))
        if common is None:
            logger.warning("persistence is off: the ranks have layers of different kinds, and no cache in common")
    clock = operation_clock()
    context = LeaderContext(config, hellos, common, access, clock)
    catalogs: dict[TierName, Catalog] = {}
    for tier in (registry.NEAR, *registry.wanted(config)):
        try:
            catalog = tier.open_catalog(context)
        except Exception as error:
            if not tier.staged:
                raise
            logger.warning("there is no %s tier: %s. This engine runs without it", tier.name, reason_of(error))
            continue
        if catalog is not None:
            catalogs[tier.name] = catalog
    manager = BlockManager(catalogs, clock=clock)
    for catalog in catalogs.values():
        catalog.attach(manager.near)
    return manager


def connect(
    config: Config,
    hellos: Sequence[Hello],
    leader: Leader,
    cost: CostModel | None = None,
) -> None:
    """Let blocks move between the tiers, and the cost model start from the rates that the ranks have measured."""
    for name in leader.manager.catalogs:
        tier = registry.TIERS[name]
        for route in tier.connect(config, leader.clock) if tier.writable else ():
            if route.source is None or route.source in leader.manager.catalogs:
                leader.add_edge(route)
        if cost is not None and (rate := measured(hellos, name)) is not None:
            cost.start_from(name, rate)


def measured(hellos: Sequence[Hello], tier: TierName) -> Rate | None:
    """The rate on the slowest rank; None unless all ranks have measured it."""
    rates = [None if (known := hello.tier(tier)) is None else known.rate for hello in hellos]
    found = [rate for rate in rates if rate is not None]
    if not found or len(found) < len(rates):
        return None
    return Rate(min(rate for rate, _ in found), max(fixed for _, fixed in found))
