"""This engine's own entry among the members: one card in etcd under a lease, where KVBM_PEERS names etcd.

The server process keeps the entry, not the engine: it serves on after the engine has died.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvbm.config import Config
from kvbm.tiers.cards import EtcdRegistry, Registration
from kvbm.tiers.peers.finder import Source
from kvbm.tiers.peers.finding.member_lists import ETCD, card_name


class Registered(Protocol):
    def close(self) -> None: ...


def register(config: Config, own: Source) -> Registered | None:
    """Enter this engine until :meth:`Registered.close`; None where members are listed elsewhere."""
    if ETCD not in config.peers.replace(",", " ").split() or own.address.startswith("unix:"):
        return None
    card = {card_name(config.dynamo_namespace, own): msgspec.json.encode(own)}
    return Registration(EtcdRegistry(config.etcd_endpoints), card)
