"""`secondary_tiers`: KVBM checks what Dynamo will read, and says what does not go with its own settings."""

from __future__ import annotations

import pytest

from kvbm.config import ConfigError, load

GOOD = {
    "type": "kvbm", "router_capabilities": ["router_hint"], "control_ports": [23280],
    "control_advertise_host": "10.0.0.4",
}  # fmt: skip
PEERS = {"peers_enabled": True, "peer_listen": "10.0.0.4:23280"}


def settings(*tiers, **more):
    return load({"secondary_tiers": list(tiers), "cpu_cache_gb": 1, **more}, environ={}, files=())


def test_peers_without_a_host_tier_are_refused_with_a_sentence():
    (warning,) = load({"peers_enabled": True, "disk_cache_gb": 1}, environ={}, files=()).warnings
    assert "KVBM_PEERS_ENABLED has no effect without a host tier" in warning


def test_a_good_entry_is_accepted_and_others_are_not_ours():
    assert settings(GOOD, **PEERS).warnings == ()
    assert settings({"type": "fs", "root_dir": "/x"}, 7, {"router_capabilities": "router_hint"}).warnings == ()
    assert settings(GOOD, peers_enabled=True, peer_listen="0.0.0.0:1", peer_advertise="h:23280").warnings == ()
    assert load({}, environ={}, files=()).warnings == ()


@pytest.mark.parametrize(
    ("tiers", "text"),
    [
        ([GOOD, GOOD], "expected exactly one"),
        ([{**GOOD, "control_ports": 23280}], "control_ports=23280: expected a list"),
        ([{**GOOD, "control_ports": []}], "for each data-parallel"),
        ([{**GOOD, "control_ports": ["23280"]}], "control_ports="),
        ([{**GOOD, "control_ports": [True]}], "control_ports="),
        ([{**GOOD, "control_ports": [0]}], "from 1 to 65535"),
        ([{**GOOD, "control_advertise_host": "0.0.0.0"}], "control_advertise_host='0.0.0.0': expected the address"),
        ([{**GOOD, "control_advertise_host": "::"}], "control_advertise_host"),
        ([{**GOOD, "control_advertise_host": None}], "control_advertise_host=None"),
    ],
)
def test_a_wrong_entry_is_refused_with_what_to_do(tiers, text):
    with pytest.raises(ConfigError) as refused:
        settings(*tiers)
    assert text in str(refused.value)


def test_a_list_is_expected():
    with pytest.raises(ConfigError, match=r"secondary_tiers='x': expected a list, for example"):
        load({"secondary_tiers": "x"}, environ={}, files=())


def test_an_address_that_leads_nowhere_is_not_entered_in_etcd():
    everywhere = {"cpu_cache_gb": 1, "peers_enabled": True, "peers": "etcd", "peer_listen": "0.0.0.0:23280"}
    (warning,) = load(everywhere, environ={}, files=()).warnings
    assert "set KVBM_PEER_ADVERTISE" in warning
    assert load({**everywhere, "peer_advertise": "h:1"}, environ={}, files=()).warnings == ()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "KVBM_PEERS_ENABLED is off"),
        ({"peers_enabled": True}, "KVBM_PEER_LISTEN is not set"),
        (
            {"peers_enabled": True, "peer_listen": "10.0.0.4:1"},
            "but this engine serves at 10.0.0.4:1; use the same port",
        ),
    ],
)
def test_what_does_not_go_together_is_said(more, text):
    (warning,) = settings(GOOD, **more).warnings
    assert text in warning
