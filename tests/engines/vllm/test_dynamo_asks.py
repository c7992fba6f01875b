"""What ``dynamo.vllm`` asks of KVBM before it subscribes to events."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

ON = {"kv_events_enable_consolidator": "on"}


def vllm_config(connector="DynamoConnector", extra=None, events=True, prefix_caching=True, ranks=1, rank=0):
    from vllm.config import KVEventsConfig

    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra or {}),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=events, endpoint="tcp://*:20081"),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        parallel_config=SimpleNamespace(data_parallel_size=ranks, data_parallel_index=rank),
    )


def ask(config):
    from kvbm.vllm_integration.consolidator_config import get_consolidator_endpoints, should_enable_consolidator

    found = get_consolidator_endpoints(config)
    assert should_enable_consolidator(config) is (found is not None)
    return found


def test_dynamo_is_sent_to_vllm_itself_unless_the_consolidator_is_asked_for(monkeypatch):
    monkeypatch.delenv("DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR", raising=False)
    assert ask(vllm_config()) is None
    there = ("tcp://127.0.0.1:20081", "tcp://127.0.0.1:57001", "tcp://127.0.0.1:57001")
    assert ask(vllm_config(extra=ON)) == there
    monkeypatch.setenv("DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR", "true")
    assert ask(vllm_config()) == there
    monkeypatch.setenv("DYN_KVBM_LEADER_ZMQ_PUB_PORT", "56003")
    assert ask(vllm_config())[1] == "tcp://127.0.0.1:57003"


def test_there_is_no_consolidator_without_events_without_us_or_with_several_ranks():
    assert ask(vllm_config(extra=ON, events=False)) is None
    assert ask(vllm_config(extra=ON, prefix_caching=False)) is None
    assert ask(vllm_config("NixlConnector", ON)) is None
    assert ask(vllm_config(extra=ON, ranks=2)) is None
    nothing = vllm_config(extra=ON)
    nothing.kv_transfer_config = None
    assert ask(nothing) is None


def test_our_connector_is_found_inside_another():
    child = {"kv_connector": "DynamoConnector", "kv_connector_extra_config": ON}
    assert ask(vllm_config("PdConnector", {"connectors": [child, {"kv_connector": "NixlConnector"}]})) is not None


def test_every_rank_listens_to_its_own_vllm():
    from kvbm import config as settings
    from kvbm.engines.vllm.feed import consolidator_endpoints

    config = settings.load({}, environ={}, files=())
    found = consolidator_endpoints(config, vllm_config(ranks=2, rank=1))
    assert found == ("tcp://127.0.0.1:20082", "tcp://127.0.0.1:57002")


def test_words_are_understood_as_upstream_does(monkeypatch):
    from kvbm.vllm_integration.consolidator_config import get_consolidator_mode, is_truthy

    assert [is_truthy(word) for word in ("1", "TRUE", " yes ", "0", "", "off", "y")] == [True] * 3 + [False] * 4
    monkeypatch.setenv("DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE", "passthrough")
    assert get_consolidator_mode() == "passthrough"
