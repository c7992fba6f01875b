"""A third tier that lives in this folder alone: keyed, with lookups that are answered later.

It stands for an object store or a peer: bytes lie under their keys in a :class:`~toy_tier.server.Server`, here a
dictionary of this process, and the leader learns which keys there are by asking. ``registry.register(TIER)`` is all
that makes it a tier of KVBM.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbm.config import Config
from kvbm.core.clock import Clock
from kvbm.core.rate import Rate
from kvbm.tiers.base import LeaderContext, RankContext, Route, Store, Tier
from kvbm.tiers.bounded import Call
from toy_tier.catalog import ToyCatalog
from toy_tier.server import Server
from toy_tier.store import ToyStore

SERVER = Server()
SIZE = 16  # blocks whose keys the leader remembers; the server holds any number


class ToyTier(Tier, frozen=True, kw_only=True):
    def is_wanted(self, config: Config) -> bool:
        return True

    def open_store(self, context: RankContext) -> Call[Store | None]:
        return Call(lambda: ToyStore(SERVER, context.rank, context.slot_bytes), "toy server", ToyStore.close)

    def open_catalog(self, context: LeaderContext) -> ToyCatalog | None:
        return ToyCatalog(SIZE, SERVER, len(context.hellos)) if context.opened(self.name) else None

    def connect(self, config: Config, clock: Clock) -> Sequence[Route]:
        return [Route(self.name)]


TIER = ToyTier(
    name="toy",
    level="g9",
    medium="TOY",
    prior=Rate(1e12, 0.0),
    size_setting="the toy's SIZE",
    keyed=True,
    shared=True,
)
