"""`secondary_tiers` in kv_connector_extra_config: how an engine tells Dynamo's router where others read its blocks.

The key is vLLM's and Dynamo's, not a setting of KVBM: it turns nothing on here. Dynamo refuses to register an engine
whose entry is wrong, minutes after the start, so KVBM checks it first.
"""

import ipaddress
from collections.abc import Mapping
from typing import NamedTuple

from kvbm.config.kinds import ConfigError
from kvbm.config.table import Config

KEY = "secondary_tiers"
CAPABILITY = "router_hint"
_EXAMPLE = (
    '"secondary_tiers": [{"type": "kvbm", "router_capabilities": ["router_hint"], "control_ports": [23280], '
    '"control_advertise_host": "10.0.0.4"}]'
)


class Advertised(NamedTuple):
    """Where the router says that others can read: one port for each data-parallel rank of this engine."""

    host: str
    ports: tuple[int, ...]

    @property
    def addresses(self) -> list[str]:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return [f"{host}:{port}" for port in self.ports]


def advertised(extra: Mapping[str, object]) -> Advertised | None:
    """What the engine advertises; None where it advertises nothing. Raises ConfigError, with all problems."""
    tiers = extra.get(KEY)
    if tiers is None:
        return None
    if not isinstance(tiers, list):
        raise ConfigError(f"{KEY}={tiers!r}: expected a list, for example {_EXAMPLE}")
    able = [tier for tier in tiers if isinstance(tier, Mapping) and _is_able(tier)]
    if not able:
        return None  # another connector's
    if len(able) > 1:
        raise ConfigError(f'{KEY}: {len(able)} entries have the capability "{CAPABILITY}"; expected exactly one')
    (tier,) = able
    problems = []
    ports, host = tier.get("control_ports"), tier.get("control_advertise_host")
    if not isinstance(ports, list) or not ports or not all(_is_port(port) for port in ports):
        problems.append(
            f"{KEY}: control_ports={ports!r}: expected a list with one port from 1 to 65535 for each data-parallel "
            "rank of this engine, for example [23280]"
        )
    if not isinstance(host, str) or not host or _is_unspecified(host):
        problems.append(
            f"{KEY}: control_advertise_host={host!r}: expected the address at which other machines reach this engine, "
            "for example 10.0.0.4"
        )
    if problems:
        raise ConfigError(*problems)
    assert isinstance(ports, list)
    assert isinstance(host, str)
    return Advertised(host, tuple(ports))


def warnings_about(config: Config, found: Advertised | None) -> list[str]:
    """Sentences for settings that do not go with what is advertised, to the router or in etcd, or with peers at all."""
    if config.peers_enabled and not config.has_host_tier:
        return ["KVBM_PEERS_ENABLED has no effect without a host tier: engines read each other's host memory, and "
                "blocks on disk alone are not served; set DYN_KVBM_CPU_CACHE_GB"]  # fmt: skip
    if found is None:
        host, words = config.peer_listen.rpartition(":")[0].strip("[]"), config.peers.replace(",", " ").split()
        if "etcd" in words and host and _is_unspecified(host) and not config.peer_advertise:
            return [f"KVBM_PEERS names etcd, but KVBM_PEER_LISTEN={config.peer_listen} is no address that others can "
                    "use, so this engine does not enter itself; set KVBM_PEER_ADVERTISE"]  # fmt: skip
        return []
    if not config.peers_enabled:
        return [f"{KEY} asks the router for hints, but KVBM_PEERS_ENABLED is off, so KVBM ignores them; turn it on"]
    here = config.peer_advertise or config.peer_listen
    if not here:
        return [f"{KEY} advertises {', '.join(found.addresses)}, but KVBM_PEER_LISTEN is not set, so no other engine "
                "can read there; set it to that address"]  # fmt: skip
    if int(here.rpartition(":")[2]) not in (0, *found.ports):
        return [f"{KEY} advertises {', '.join(found.addresses)}, but this engine serves at {here}; use the same port"]
    return []


def _is_able(tier: Mapping[str, object]) -> bool:
    capabilities = tier.get("router_capabilities")
    return isinstance(capabilities, list) and CAPABILITY in capabilities


def _is_port(port: object) -> bool:
    return isinstance(port, int) and not isinstance(port, bool) and 0 < port <= 65535


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
