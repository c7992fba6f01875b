"""The process that makes a rank's requests: it moves blocks in the rank's own memory, and ends with the rank."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from object_blocks import BLOCK, WAIT_SECONDS, ended, group_places, new_names, random_keys, single_places

from kvbm.tiers.host.shared import MappableSlab
from kvbm.tiers.host.slab import HostSlab
from kvbm.tiers.objects.client import ObjectStoreError
from kvbm.tiers.objects.process import Attach, Setup
from kvbm.tiers.objects.process_store import ProcessStore

BLOCKS = 64


@pytest.fixture
def slab():
    memory = MappableSlab(BLOCKS * BLOCK).carve(BLOCKS, BLOCK)
    yield memory
    memory.close()


def setup_for(settings, **changes):
    values = {"cache": {"test": os.urandom(8).hex()}, "rank": 0, "ranks": 1, "block_bytes": BLOCK, "log_level": 20}
    return Setup(settings, **{**values, **changes})


@pytest.fixture
def opened(slab):
    stores = []

    def open_store(settings):
        store = ProcessStore(setup_for(settings))
        stores.append(store)
        store.attach(slab)
        return store

    yield open_store
    for store in stores:
        assert store.close(5.0)
        assert not is_alive(store.pid)


def addresses(slab, slots):
    return [slab.address + slot * BLOCK for slot in slots]


def fill(slab, data):
    slab._map.seek(0)
    slab._map.write(data)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition):
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


@pytest.mark.parametrize("secret", ["", "a secret"], ids=["plain", "encrypted"])
def test_blocks_go_from_slots_to_objects_and_back(weed, slab, opened, secret):
    store = opened(weed.settings(encryption_secret=secret))
    keys, data = random_keys(BLOCKS), os.urandom(BLOCKS * BLOCK)
    fill(slab, data)
    places, all_slots = group_places(keys[:32]) + single_places(keys[32:]), list(range(BLOCKS))
    written = ended(store.write(places, addresses(slab, all_slots), keys))
    assert (written.bad, written.reason) == ([], "")
    assert written.seconds > 0
    fill(slab, bytes(len(data)))
    turned = all_slots[::-1]
    missing = single_places(random_keys(1))
    read = ended(store.read([*places[:-1], *missing], addresses(slab, turned), keys))
    assert read.bad == [BLOCKS - 1]
    assert "is not in bucket" in read.reason
    for i in range(BLOCKS - 1):
        slot = turned[i]
        assert slab._map[slot * BLOCK : (slot + 1) * BLOCK] == data[i * BLOCK : (i + 1) * BLOCK]
    assert store.measure().bytes_per_second > 0


def test_a_process_that_dies_fails_its_transfers_and_is_started_again(weed, proxy, slab, opened, caplog):
    store = opened(weed.settings(endpoint=proxy.endpoint))
    keys, first = random_keys(4), store.pid
    places, targets = single_places(keys), addresses(slab, range(4))
    assert not ended(store.write(places, targets, keys)).bad
    proxy.set_fault("stall", "GET")
    read = store.read(places, targets, keys)
    os.kill(first, signal.SIGKILL)
    assert ended(read).bad == [0, 1, 2, 3]
    assert "has ended (status -9)" in read.reason
    proxy.released.set()
    proxy.set_fault("")
    until(lambda: store.pid != first)
    assert "has ended (status -9, start 1)" in caplog.text
    assert not ended(store.read(places, targets, keys)).bad


def test_a_process_that_is_stopped_holds_up_no_caller_and_is_killed_at_the_end(weed, slab, opened):
    store = opened(weed.settings())
    os.kill(store.pid, signal.SIGSTOP)
    keys = random_keys(BLOCKS)
    orders = [store.read(single_places(keys), addresses(slab, range(BLOCKS)), keys) for _ in range(200)]  # > a socket
    orders[0].cancel()
    assert not any(order.done() for order in orders)
    assert store.close(0.1)
    assert not is_alive(store.pid)
    assert all(order.done() and len(order.bad) == BLOCKS for order in orders)
    assert store.write([], [], []).done()


def test_cancelled_transfers_do_not_begin(weed, proxy, slab, opened):
    store = opened(weed.settings(endpoint=proxy.endpoint, concurrency=1))
    keys = random_keys(3)
    targets = addresses(slab, range(3))
    proxy.set_fault("stall", "GET")
    read = store.read(single_places(keys), targets, keys)
    until(lambda: any(method == "GET" and "/0/" in path for method, path in proxy.requests))
    read.cancel()
    store.read([], [], [])  # orders arrive in their order
    proxy.released.set()
    assert "given up" in ended(read).reason or len(read.bad) == 3
    assert sum(method == "GET" and "/0/" in path for method, path in proxy.requests) < 3


def test_the_process_ends_with_the_rank(weed, tmp_path):
    """Also with one that is killed."""
    code = """
import sys, time, msgspec
from kvbm.tiers.objects.process import Attach, Setup
from kvbm.tiers.objects.process_store import ProcessStore
store = ProcessStore(msgspec.json.decode(sys.stdin.readline(), type=Setup))
print(store.pid, flush=True)
time.sleep(600)
"""
    import msgspec

    rank = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rank.stdin.write(msgspec.json.encode(setup_for(weed.settings())).decode() + "\n")
    rank.stdin.flush()
    pid = int(rank.stdout.readline())
    assert is_alive(pid)
    rank.kill()
    rank.wait()
    until(lambda: not is_alive(pid))


def test_signals_for_the_engine_do_not_end_the_process(weed, slab, opened):
    store = opened(weed.settings())
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(store.pid, number)
    keys = random_keys(1)
    assert not ended(store.write(single_places(keys), addresses(slab, [0]), keys)).bad


def test_nothing_secret_is_visible_from_outside(weed, opened):
    store = opened(weed.settings(encryption_secret="a-hidden-secret"))
    seen = Path(f"/proc/{store.pid}/cmdline").read_bytes() + Path(f"/proc/{store.pid}/environ").read_bytes()
    assert b"a-hidden-secret" not in seen
    assert weed.settings().secret_key.encode() not in seen


def test_a_store_that_does_not_answer_is_opened_and_suspended(weed, slab, opened, caplog):
    caplog.set_level(logging.WARNING)
    store = opened(weed.settings(endpoint="http://127.0.0.1:1", timeout_seconds=1.0))
    assert "suspended until it answers again" in caplog.text
    keys = random_keys(1)
    assert "suspended" in ended(store.read(single_places(keys), addresses(slab, [0]), keys)).reason


def test_settings_that_obstore_panics_at(weed):
    with pytest.raises(ObjectStoreError, match="InvalidUri"):
        ProcessStore(setup_for(weed.settings(endpoint="no url at all", bucket="")))


def test_memory_that_cannot_be_mapped_is_not_used(weed, opened, caplog):
    store = opened(weed.settings())
    store._near = None
    private = HostSlab(BLOCK).carve(1, BLOCK)
    store.attach(private)
    assert "cannot map" in caplog.text
    keys = random_keys(1)
    assert ended(store.write(single_places(keys), [private.address], keys)).bad == [0]
    private.close()


def test_a_process_without_the_memory_ends(weed, slab, opened):
    """It must not take memory of its own for the rank's: blocks would count as read that nobody has."""
    store = opened(weed.settings())
    first, keys = store.pid, random_keys(1)
    store._connection.send(Attach(slab.size))
    until(lambda: store.pid != first)
    assert not ended(store.write(single_places(keys), addresses(slab, [0]), keys)).bad


def test_names_are_those_of_the_leader(weed, opened):
    store = opened(weed.settings())
    assert store.identity.startswith("kvbm-1/")
    assert store.identity != new_names().root


def test_the_engines_threads_go_first_on_a_core_that_both_want(weed, opened):
    store = opened(weed.settings())
    assert os.getpriority(os.PRIO_PROCESS, store.pid) > os.getpriority(os.PRIO_PROCESS, 0)
