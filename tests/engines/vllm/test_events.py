"""Our tiers in vLLM's stream of KV cache events."""

from __future__ import annotations

import time

import pytest
from engines import BLOCK, do, generate, prompt

PROMPT, OTHER, THIRD = prompt(1, 400), prompt(2, 300), prompt(3, 300)


def published(folder) -> dict:
    return {
        "kv_events_config": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{folder}/events",
            "replay_endpoint": f"ipc://{folder}/replay",
        }
    }


def replay(batches: list, upto: int | None = None) -> dict[str, dict[int, tuple]]:
    """Medium -> block -> (parent, tokens), for a strict subscriber: nothing twice, nothing unknown."""
    views: dict[str, dict[int, tuple]] = {"GPU": {}, "CPU": {}, "STORAGE": {}}
    for batch in batches[:upto]:
        for event in batch:
            if event["type"] == "AllBlocksCleared":
                for view in views.values():
                    view.clear()
                continue
            view = views[event["medium"]]
            strict = event["medium"] != "GPU"  # vLLM itself stores a block of its own twice now and then
            if event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    assert not strict or name in view
                    view.pop(name, None)
                continue
            assert event["block_size"] == BLOCK
            parent = event["parent_block_hash"]
            for i, name in enumerate(event["block_hashes"]):
                assert not strict or name not in view
                view[name] = (parent, tuple(event["token_ids"][i * BLOCK : (i + 1) * BLOCK]), event["group_idx"])
                parent = name
    return views


@pytest.mark.engine
@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_a_subscriber_of_vllm_knows_what_host_memory_holds(algorithm, run_scenario, tmp_path):
    follow(algorithm, run_scenario, tmp_path)


@pytest.mark.matrix
def test_a_subscriber_of_every_release_knows_it(run_scenario, tmp_path):
    follow("sha256", run_scenario, tmp_path)


def follow(algorithm, run_scenario, tmp_path):
    steps = [
        generate(PROMPT[:200]),
        do("drain"),
        generate(PROMPT),  # its first blocks are known, so that the others follow on one of those
        do("drain"),
        do("names", "first names"),
        do("events", "first"),
        do("reset"),  # vLLM's own cache only: subscribers are told that all blocks are gone
        generate(OTHER, THIRD),  # pushes out some of the first prompt's blocks
        do("drain"),
        do("names", "second names"),
        do("events", "second"),
        do("reset", connector=True),
        generate(OTHER[:40], max_tokens=1),
        do("drain"),
        do("names", "third names"),
        do("events", "third"),
        do("state", "end"),
    ]
    engine = {**published(tmp_path), "prefix_caching_hash_algo": algorithm}
    story = run_scenario(steps, {"cpu_cache_override_num_blocks": 24}, engine)
    first = replay(story["first"])
    assert len(first["CPU"]) == 400 // BLOCK
    assert set(first["CPU"]) == set(story["first names"]) or algorithm == "xxhash"
    # The same blocks, by the same names, as those vLLM told of when it had computed them.
    assert first["CPU"].items() <= first["GPU"].items()
    second = replay(story["second"])
    assert len(second["CPU"]) == len(story["second names"]) == 24
    assert second["CPU"].keys() & first["CPU"].keys(), "what has stayed was not told again after the reset"
    third = replay(story["third"])
    assert len(third["CPU"]) == len(story["third names"]) == 1
    assert third["CPU"].items() <= third["GPU"].items()
    assert story["end"]["faults"] == {}
    assert story["end"]["engine_hashes"] is (algorithm == "sha256")


@pytest.mark.engine
def test_commands_reach_a_running_engine_and_its_subscribers(run_scenario, baseline, tmp_path):
    """Told again, a strict subscriber that has missed nothing still agrees; emptied, the engine computes again."""
    steps = [
        generate(PROMPT, name="cold"),
        do("drain"),
        do("command", "status", command={"do": "status"}),
        do("command", "announced", command={"do": "announce"}),
        do("drain"),
        do("events", "told again"),
        do("command", "emptied", command={"do": "reset", "tier": "host"}),
        do("drain"),
        do("events", "told of the end"),
        do("reset"),
        generate(PROMPT, name="computed again"),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, {"cpu_cache_override_num_blocks": 24}, published(tmp_path))
    blocks = 400 // BLOCK
    assert story["status"]["pools"]["host"] == {
        "active_blocks": 0,
        "inactive_blocks": blocks,
        "empty_blocks": 24 - blocks,
    }
    assert story["status"]["pools"]["device"]["empty_blocks"] > 0
    assert story["announced"] == {"announced": True}
    again = replay(story["told again"])
    assert len(again["CPU"]) == blocks
    stored = [event for batch in story["told again"] for event in batch if event["type"] == "BlockStored"]
    assert sum(len(event["block_hashes"]) for event in stored if event["medium"] == "CPU") == 2 * blocks
    assert story["emptied"] == {"reset_blocks": blocks}
    assert replay(story["told of the end"])["CPU"] == {}
    assert story.tokens("cold") == story.tokens("computed again") == baseline([PROMPT])
    assert story["end"]["onboarded"] == 0
    assert story["end"]["faults"] == {}


@pytest.mark.engine
def test_no_events_no_account_of_them(run_scenario):
    """Where vLLM publishes nothing, nothing is kept for subscribers, and take_events still times the steps."""
    story = run_scenario(
        [generate(PROMPT), do("drain"), do("fed", "fed"), do("state", "end")], {"cpu_cache_override_num_blocks": 24}
    )
    assert story["fed"] is False
    assert story["end"]["faults"] == {}


@pytest.mark.engine
def test_a_fault_in_telling_ends_the_telling_and_nothing_else(run_scenario, baseline, tmp_path):
    steps = [
        do("break", target="kvbm.engines.vllm.feed:EventFeed.take", times=1),
        generate(PROMPT, name="tokens"),
        do("drain"),
        do("reset"),
        generate(PROMPT, name="again"),
        do("drain"),
        do("fed", "fed"),
        do("state", "end"),
    ]
    story = run_scenario(steps, {"cpu_cache_override_num_blocks": 24}, published(tmp_path))
    assert story.tokens("tokens") == story.tokens("again") == baseline([PROMPT])
    assert story["fed"] is False
    assert sum(story["end"]["faults"].values()) == 1
    assert story["end"]["onboarded"] == 12
    assert story.said("routers will not learn of new ones")


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["slow", "dead"])
def test_neither_a_slow_nor_a_dead_subscriber_holds_up_the_engine(kind, tmp_path):
    """vLLM's own publisher, as the scheduler uses it, with our events and a subscriber that does not read them."""
    zmq = pytest.importorskip("zmq")
    events = pytest.importorskip("vllm.distributed.kv_events")
    publisher = events.ZmqEventPublisher(0, f"ipc://{tmp_path}/events", hwm=10, buffer_steps=10)
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.set_hwm(1)
    subscriber.subscribe(b"")
    subscriber.connect(f"ipc://{tmp_path}/events")
    time.sleep(0.2)
    if kind == "dead":
        subscriber.close(linger=0)
    event = events.BlockStored(
        block_hashes=list(range(512)), parent_block_hash=None, token_ids=list(range(8192)), block_size=16,
        lora_id=None, medium="CPU", lora_name=None,
    )  # fmt: skip
    slowest = 0.0
    try:
        for _ in range(2000):  # 1,000,000 blocks
            start = time.monotonic()
            publisher.publish(events.KVEventBatch(ts=0.0, events=[event]))
            slowest = max(slowest, time.monotonic() - start)
        deadline = time.monotonic() + 60
        while not publisher._event_queue.empty():
            assert time.monotonic() < deadline, "the publisher waits for its subscriber"
            time.sleep(0.02)
    finally:
        publisher.shutdown()
        subscriber.close(linger=0)
        context.term()
    assert slowest < 30  # an engine that is held up waits for ever
