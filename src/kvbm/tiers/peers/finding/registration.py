"""This engine's own entry among the members: one card in etcd under a lease, where KVBM_PEERS names etcd.

The server process keeps the entry, not the engine: it serves on after the engine has died.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvbm.config import Config
from kvbm.core.hints import parse_endpoint
from kvbm.tiers.peers.finder import Source
from kvbm.tiers.peers.finding.member_lists import ETCD, card_name

if TYPE_CHECKING:
    from kvbm.tiers.cards import Registration


class Registry(msgspec.Struct, frozen=True, array_like=True):
    """Where a server enters itself. No endpoints: nowhere."""

    endpoints: str = ""
    namespace: str = ""


def registry_of(config: Config) -> Registry:
    is_listed = ETCD in config.peers.replace(",", " ").split()
    return Registry(config.etcd_endpoints, config.dynamo_namespace) if is_listed else Registry()


def register(registry: Registry, own: Source) -> Registration | None:
    """Enter this engine until the registration is closed; None where members are listed elsewhere."""
    if not registry.endpoints or parse_endpoint(f"tcp://{own.address}") is None:  # 0.0.0.0 leads nowhere
        return None
    from kvbm.tiers import cards  # an HTTP client, which few servers need

    card = {card_name(registry.namespace, own): msgspec.json.encode(own)}
    return cards.Registration(cards.EtcdRegistry(registry.endpoints), card)
