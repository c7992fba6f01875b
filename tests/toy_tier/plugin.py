"""Imported into an engine's process before the engine starts: adds the toy tier, and serves as its handle for tests."""

from __future__ import annotations

import toy_tier
from kvbm.core.pool import Pool
from kvbm.tiers import registry

registry.register(toy_tier.TIER)

REGISTERED = True


def configure(scenario, **values) -> None:
    """What the server does from now on."""
    for name, value in values.items():
        setattr(toy_tier.SERVER, name, value)


def forget(scenario) -> None:
    """Nothing is near the engine any more, and the leader no longer knows what the server has."""
    catalogs = scenario.adapter.leader.manager.catalogs
    for catalog in catalogs.values():
        Pool.clear(catalog)
    assert scenario.reset()


def state(scenario) -> dict:
    server, counts, name = toy_tier.SERVER, scenario.adapter.leader.counts, toy_tier.TIER.name
    return {
        "stored": len(server.blocks),
        "pending": server.pending_lookups,
        "loaded": counts.onboarded_blocks.get(name, 0),
        "moved": counts.moved_blocks.get(name, 0),
        "failed_loads": counts.failed_load_blocks,
        "failed_moves": counts.failed_move_blocks.get(name, 0),
    }
