"""Block events beside TensorRT-LLM: the engine's and ours become one stream; and commands of the control socket."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec
import pytest
import test_trtllm_adapter as adapter
import zmq
from test_trtllm_adapter import BLOCKS, OTHERS, SIZE, request

from servers import free_port
from tiernames import DISK

pytestmark = pytest.mark.simulated
modules, engine = adapter.modules, adapter.engine


class Router:
    """A subscriber of the consolidator, and the part of Dynamo that publishes the engine's own events."""

    def __init__(self, port, output):
        self.context = zmq.Context()
        self.engine = self.context.socket(zmq.PUB)
        self.engine.bind(f"tcp://127.0.0.1:{port}")
        self.out = self.context.socket(zmq.SUB)
        self.out.subscribe(b"")
        self.out.connect(f"tcp://127.0.0.1:{output}")
        self.number = 0

    def publish(self, *events):
        frames = [b"", self.number.to_bytes(8, "big"), msgspec.msgpack.encode([time.time(), list(events), 0])]
        self.engine.send_multipart(frames)
        self.number += 1

    def meet(self):
        """Until both ways are open, and no event of this meeting is left in them."""
        deadline = time.monotonic() + 60
        while not self.out.poll(200):
            self.publish(stored([99], [7] * SIZE), {"type": "BlockRemoved", "block_hashes": [99]})
            assert time.monotonic() < deadline
        self.publish(stored([98], [6] * SIZE), {"type": "BlockRemoved", "block_hashes": [98]})
        while {"BlockRemoved": [98]} not in [{each["type"]: each["block_hashes"]} for each in self.hear()]:
            assert time.monotonic() < deadline

    def hear(self, seconds=60.0):
        if not self.out.poll(seconds * 1000):
            return []
        return msgspec.msgpack.decode(self.out.recv_multipart()[-1])[1]

    def close(self):
        self.context.destroy(linger=0)


def stored(names, tokens, parent=None):
    return {
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": SIZE,
    }  # fmt: skip


@pytest.fixture
def together(engine):
    made = []

    def make(mode, **settings):
        port = free_port()
        here = engine(
            ranks=1, DYN_KVBM_TRTLLM_ZMQ_PORT=port, DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE=mode, **settings
        ).register()  # fmt: skip
        router = Router(port, here.adapter._config.consolidator_port)
        made.append(router)
        router.meet()
        return here, router

    yield make
    for each in made:
        each.close()


def test_what_the_engine_drops_and_we_keep_stays_known(together):
    here, router = together("dedup")
    tokens = list(range(33))
    router.publish(stored([1, 2, 3, 4], tokens[:32]))
    assert [event["block_hashes"] for event in router.hear()] == [[1], [2], [3], [4]]
    here.keep(request(1), BLOCKS)
    # Ours are known under the engine's names, and before blocks that the engine has not told of.
    here.keep(request(2, list(range(100, 133))), OTHERS)
    here.poll()
    others = [event["block_hashes"][0] for event in router.hear()]
    assert len(others) == 4
    router.publish({"type": "BlockRemoved", "block_hashes": [1, 2, 3, 4]})
    assert router.hear(0.5) == []
    here.adapter.leader.reset()
    here.poll()
    gone = router.hear()
    assert sorted(event["block_hashes"][0] for event in gone if event["type"] == "BlockRemoved") == sorted(
        [1, 2, 3, 4, *others]
    )


def test_our_blocks_go_out_with_their_tier(together):
    here, router = together("passthrough")
    here.keep(request(1), BLOCKS)
    here.poll()
    (event,) = router.hear()
    assert event["medium"] == "CPU_TIER1"
    assert len(event["block_hashes"]) == 4
    assert event["token_ids"] == list(range(32))
    assert event["parent_block_hash"] is None


def test_what_an_engine_before_has_left_on_disk_is_told_when_somebody_asks_for_it(engine, together, tmp_path):
    disk = {
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": 32, "DYN_KVBM_DISK_CACHE_DIR": tmp_path,
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": 1,
    }  # fmt: skip
    before = engine(ranks=1, **disk).register()
    before.keep(request(1), BLOCKS)
    pool = before.adapter.leader.manager.catalogs[DISK]
    before.until(lambda: before.poll() and len(pool.findable) == 4)
    before.close()
    del before.model  # an engine's process has one model
    here, router = together("passthrough", **disk)
    assert here.leader.get_num_new_matched_tokens(request(2), 0)[0] == 32
    here.poll()
    (event,) = router.hear()
    assert event["medium"] == "CPU_TIER2"
    assert event["token_ids"] == list(range(32))


def test_commands_are_taken_between_two_iterations(engine):
    from kvbm.control.socket import ask

    here = engine().register()
    here.keep(request(1), BLOCKS)
    address = here.adapter._services._presence.control.address
    assert ask(address, {"do": "status"})["pools"]["host"]["inactive_blocks"] == 4
    assert ask(address, {"do": "announce"}) == {"announced": False}
    assert ask(address, {"do": "reset", "tier": "host"}) == {"reset_blocks": 4}
    assert here.leader.get_num_new_matched_tokens(request(2), 0) == (0, False)


def test_without_the_engines_port_there_are_no_events_and_it_is_said(engine, caplog):
    here = engine(DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR="on").register()
    assert here.adapter._services._feed is None
    assert "DYN_KVBM_TRTLLM_ZMQ_PORT is not set" in caplog.text


def test_a_fault_in_telling_ends_the_telling_and_nothing_else(together, monkeypatch, caplog):
    here, _ = together("dedup")

    def broken():
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(here.adapter._services._feed, "pump", broken)
    here.keep(request(1), BLOCKS)
    assert here.adapter._services._feed is None
    assert all(pool.on_change is None for pool in here.adapter.leader.manager.catalogs.values())
    assert "routers will not learn of new ones" in caplog.text
    assert here.leader.get_num_new_matched_tokens(request(2), 0)[0] == 32


def test_what_dynamo_asks(monkeypatch):
    from kvbm.trtllm_integration.consolidator_config import get_consolidator_endpoints, should_enable_consolidator

    ours = {"kv_connector_config": {"connector_module": "kvbm.trtllm_integration.connector"}}
    assert not should_enable_consolidator(ours)
    with pytest.raises(ValueError, match="DYN_KVBM_TRTLLM_ZMQ_PORT is not set"):
        get_consolidator_endpoints()
    monkeypatch.setenv("DYN_KVBM_TRTLLM_ZMQ_PORT", "20081")
    assert should_enable_consolidator(ours)
    objects = {"kv_connector_config": SimpleNamespace(connector_module="kvbm.trtllm_integration.connector")}
    assert should_enable_consolidator(objects)
    older = {"connector_module": "dynamo.llm.trtllm_integration.connector"}
    assert should_enable_consolidator({**ours, "kv_connector_config": older})
    assert not should_enable_consolidator({**ours, "kv_connector_config": {"connector_module": "others.connector"}})
    assert not should_enable_consolidator({})
    assert not should_enable_consolidator({**ours, "kv_cache_config": {"enable_block_reuse": False}})
    assert get_consolidator_endpoints() == ("tcp://127.0.0.1:20081", "tcp://127.0.0.1:57001", "tcp://127.0.0.1:57001")
    monkeypatch.setenv("DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR", "0")
    assert not should_enable_consolidator(ours)
