"""Each fault of a store costs hits and nothing else: no wrong block, no hanging operation, no call while it is down."""

import socket
import threading
import time

import pytest
from object_blocks import WAIT_SECONDS, Blocks, ended, new_names, open_store, random_keys, single_places
from object_servers import ACCESS_KEY, SECRET_KEY

from kvbm.core.breaker import MAX_FAILURES
from kvbm.tiers.objects.client import Client, ObjectStoreError, SuspendedError


@pytest.fixture
def stored(weed):
    """Eight blocks in the store."""
    names, keys, memory = new_names(), random_keys(8), Blocks(8)
    store = open_store(weed.settings(), names)
    assert not ended(store.write(single_places(keys), memory.addresses, keys)).bad
    store.close()
    return names, keys, memory


def wait_until(condition):
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("500", "500"),
        ("stall", "timed out"),
        ("reset", ""),
        ("truncate", "truncated"),
        ("flip", "checksum"),
    ],
)
def test_a_fault_on_the_way_fails_the_read_and_the_next_one_succeeds(weed, proxy, stored, fault, reason):
    names, keys, memory = stored
    timeout = 0.5 if fault == "stall" else 30.0
    store = open_store(weed.settings(endpoint=proxy.endpoint, timeout_seconds=timeout, max_retries=0), names)
    target = Blocks(8)
    places = single_places(keys)
    proxy.set_fault(fault, "GET")
    read = ended(store.read(places, target.addresses, keys))
    assert read.bad == list(range(8))
    assert reason in read.reason
    proxy.set_fault("")
    wait_until(lambda: not store._client.suspended)
    if fault in (
        "truncate",
        "flip",
    ):  # both copies were damaged, so the store took it for damage at rest and deleted it
        assert not ended(store.write(places, memory.addresses, keys)).bad
    store.close()
    again = open_store(weed.settings(), names)
    assert not ended(again.read(places, target.addresses, keys)).bad
    assert [target[i] for i in range(8)] == [memory[i] for i in range(8)]
    again.close()


def test_damage_on_the_way_once_costs_nothing(weed, proxy, stored):
    names, keys, memory = stored
    store = open_store(weed.settings(endpoint=proxy.endpoint), names)
    target = Blocks(1)
    get, damaged = store._client.get, []

    def damages_the_first(name):
        if not damaged:
            damaged.append(name)
            proxy.set_fault("flip", "GET")
        else:
            proxy.set_fault("")
        return get(name)

    store._client.get = damages_the_first
    assert not ended(store.read(single_places(keys[:1]), target.addresses, keys[:1])).bad
    assert target[0] == memory[0]
    assert not [method for method, _ in proxy.requests if method == "DELETE"]
    store.close()


@pytest.mark.parametrize("fault", ["500", "stall", "reset"])
def test_a_fault_of_a_write_is_reported(weed, proxy, fault):
    names, keys, memory = new_names(), random_keys(4), Blocks(4)
    timeout = 0.5 if fault == "stall" else 30.0
    store = open_store(weed.settings(endpoint=proxy.endpoint, timeout_seconds=timeout, max_retries=0), names)
    proxy.set_fault(fault, "PUT")
    written = ended(store.write(single_places(keys), memory.addresses, keys))
    if fault != "reset":  # the store has the object by then, and a second attempt finds it there
        assert written.bad == list(range(4))
        assert written.reason
    proxy.set_fault("")
    proxy.released.set()
    store.close()
    again = open_store(weed.settings(), names)
    assert not ended(again.write(single_places(keys), memory.addresses, keys)).bad
    again.close()


@pytest.mark.parametrize("lands", [False, True])
def test_a_write_is_acknowledged_only_when_the_object_is_there(weed, proxy, lands):
    """A store answers "conflict" while another engine writes the same object. That engine may die before it is done."""
    names, keys, memory = new_names(), random_keys(2), Blocks(2)
    if lands:
        other = open_store(weed.settings(), names)
        assert not ended(other.write(single_places(keys), memory.addresses, keys)).bad
        other.close()
    store = open_store(weed.settings(endpoint=proxy.endpoint, max_retries=0), names)
    proxy.set_fault("conflict", "PUT")
    written = ended(store.write(single_places(keys), memory.addresses, keys))
    assert written.bad == ([] if lands else [0, 1])
    store.close()


def test_a_truncated_object_in_the_way_is_replaced(weed):
    names, keys, memory, target = new_names(), random_keys(1), Blocks(1), Blocks(1)
    store = open_store(weed.settings(), names)
    places = single_places(keys)
    assert not ended(store.write(places, memory.addresses, keys)).bad
    (listed,) = Client(weed.settings()).list(names.prefix(0))
    weed.overwrite(listed.name, weed.stored_bytes(listed.name)[:1000])
    assert not ended(store.write(places, memory.addresses, keys)).bad
    assert not ended(store.read(places, target.addresses, keys)).bad
    assert target[0] == memory[0]
    store.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"secret_key": "wrong"}, "the secret key is wrong"),
        ({"access_key": "unknown"}, "the access key is unknown"),
        ({"bucket": "kvbm-no-such-bucket"}, "bucket does not exist|access denied"),
        ({"endpoint": "http://127.0.0.1:1"}, "127.0.0.1:1/"),
    ],
)
def test_wrong_settings_are_refused_with_a_reason_and_soon_cost_no_calls(weed, change, reason):
    client = Client(weed.settings(**change))
    with pytest.raises(ObjectStoreError, match=reason) as first:
        client.check()
    shown = str(first.value)
    assert SECRET_KEY not in shown
    assert ACCESS_KEY not in shown
    client.suspend(shown)
    with pytest.raises(SuspendedError):
        client.get("x")
    client.close()


def test_a_wrong_secret_fails_every_operation_and_none_hangs(weed, stored):
    names, keys, memory = stored
    store = open_store(weed.settings(secret_key="wrong"), names)
    places = single_places(keys)
    assert ended(store.read(places, memory.addresses, keys)).bad == list(range(8))
    assert ended(store.write(places, memory.addresses, keys)).bad == list(range(8))
    assert store.measure() is None
    store.close()


def test_clocks_that_differ_are_named_as_the_reason(weed, proxy):
    proxy.set_fault("skew")
    client = Client(weed.settings(endpoint=proxy.endpoint))
    with pytest.raises(ObjectStoreError, match="clock of this machine"):
        client.check()
    client.close()


def test_a_store_that_is_down_costs_no_calls_until_a_probe_succeeds(weed, proxy, monkeypatch):
    monkeypatch.setattr("kvbm.core.breaker.FIRST_PAUSE_SECONDS", 0.2)
    monkeypatch.setattr("kvbm.core.breaker.MAX_PAUSE_SECONDS", 0.2)
    client = Client(weed.settings(endpoint=proxy.endpoint, max_retries=0))
    proxy.set_fault("500")
    for _ in range(MAX_FAILURES):
        with pytest.raises(ObjectStoreError, match="500"):
            client.get("x")
    assert client.suspended
    for call in (lambda: client.get("x"), lambda: client.put("x", [b""]), lambda: client.exists("x")):
        with pytest.raises(SuspendedError):
            call()
    wait_until(lambda: len([path for _, path in proxy.requests if "list-type" in path]) >= 2)
    objects = [path for _, path in proxy.requests if "list-type" not in path]
    assert len(objects) == MAX_FAILURES, "only probes are made while the store is suspended"
    proxy.set_fault("")
    wait_until(lambda: not client.suspended)
    assert not client.exists("x")
    client.close()


def test_a_missing_object_is_no_reason_to_suspend(weed):
    client = Client(weed.settings())
    for _ in range(2 * MAX_FAILURES):
        assert not client.exists("nothing")
    assert not client.suspended
    client.close()


def test_no_call_of_the_engine_waits_for_the_store(weed, proxy):
    """The listener accepts and never answers; every call of a store returns at once."""
    silent = socket.create_server(("127.0.0.1", 0))
    endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
    store = open_store(weed.settings(endpoint=endpoint, timeout_seconds=3.0, max_retries=0), new_names())
    keys, memory = random_keys(64), Blocks(64)
    operations = []
    done = threading.Event()

    def engine():
        for _ in range(10):
            operations.append(store.write(single_places(keys), memory.addresses, keys))
            operations.append(store.read(single_places(keys), memory.addresses, keys))
        done.set()

    began = time.monotonic()
    engine()
    took = time.monotonic() - began
    assert done.is_set()
    assert took < 3.0, "twenty calls took as long as one request"
    for operation in operations:
        assert ended(operation).bad == list(range(64))
    store.close()
    silent.close()


def test_a_store_that_is_killed_and_restarted_is_used_again(weed, stored, monkeypatch):
    monkeypatch.setattr("kvbm.core.breaker.MAX_PAUSE_SECONDS", 0.5)
    names, keys, memory = stored
    store = open_store(weed.settings(max_retries=0, timeout_seconds=5.0), names)
    target = Blocks(8)
    places = single_places(keys)
    weed.kill()
    try:
        assert ended(store.read(places, target.addresses, keys)).bad == list(range(8))
        assert store._client.suspended
    finally:
        weed.start()
    wait_until(lambda: not store._client.suspended)
    wait_until(lambda: not ended(store.read(places, target.addresses, keys)).bad)
    assert [target[i] for i in range(8)] == [memory[i] for i in range(8)]
    store.close()
