"""The SGLang stores obey the settings of the tiers, the cost model and the circuit breakers, as other engines do."""

from __future__ import annotations

import errno
import io
import logging
import math
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
from engine_pages import CACHE, PAGE, Pages, figures, get, keys, open_reader, put, settings_for, wait_until
from rich.console import Console

import toy_tier
from kvbm.cli.screen import draw
from kvbm.config import SETTINGS
from kvbm.core import breaker
from kvbm.core.rate import Rate
from kvbm.engines.sglang import store as stores_module
from kvbm.engines.sglang.settings import UNUSED, Prefetch, read_hidden_size, read_prefetch, warn_of_unused
from kvbm.observe.findings import explain
from kvbm.observe.metrics import render
from kvbm.observe.requests import RequestLog
from kvbm.tiers import disk as disk_tier
from kvbm.tiers import registry
from kvbm.tiers.disk.file import FileIO
from tiernames import DISK, HOST
from toy_tier.server import Server

TOKENS = {"page_tokens": 64}


def on_disk(store, *numbers):
    wait_until(lambda: not store.leader.moves_under_way)
    disk = store.leader.manager.catalogs[DISK]
    return [number for number, key in zip(numbers, keys(*numbers), strict=True) if key in disk]


class SwitchedIO(FileIO):
    """A disk whose calls fail while ``broken`` is set."""

    def __init__(self):
        self.broken = True

    def _check(self):
        if self.broken:
            raise OSError(errno.EIO, "broken on purpose")

    def read(self, fd, buffers, offset):
        self._check()
        return super().read(fd, buffers, offset)

    def write(self, fd, buffers, offset):
        self._check()
        return super().write(fd, buffers, offset)


# -- the edge to the disk ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threshold", "hits"), [(2, 1), (3, 2)])
def test_a_page_goes_to_disk_when_it_was_used_often_enough(stores, threshold, hits):
    log = RequestLog()
    store = stores(host=16, disk=64, disk_filter_threshold=threshold, options={"log": log})
    assert all(put(store, range(4)))
    assert on_disk(store, *range(4)) == []
    for _ in range(hits):
        assert on_disk(store, *range(4)) == []
        assert get(store, [0, 1]) == [0, 1]
    assert on_disk(store, *range(4)) == [0, 1]
    snapshot, _ = figures(store, log)
    assert snapshot.refused_blocks["disk filter"] == 4
    assert 'kvbm_refused_blocks_total{reason="disk filter"} 4' in render(snapshot).decode()


def test_without_the_filter_every_page_goes_to_disk(stores):
    store = stores(host=16, disk=64, disable_disk_offload_filter=True)
    put(store, range(4))
    assert on_disk(store, *range(4)) == [0, 1, 2, 3]
    # Nor is there one without a host tier: a page is kept on disk, or nowhere.
    direct = stores(disk=64, cache={**CACHE, "model": "direct"})
    put(direct, range(4))
    assert on_disk(direct, *range(4)) == [0, 1, 2, 3]


def test_a_slow_disk_keeps_no_more_pages_waiting_than_the_setting_says(stores, stall):
    log = RequestLog()
    store = stores(
        host=32, disk=64, max_pending_spills=2, disable_disk_offload_filter=True, inject_faults="disk-slow-write",
        options={"log": log},
    )  # fmt: skip
    assert all(put(store, range(16)))  # does not wait for the disk
    (edge,) = store.leader.edges
    assert (edge.pending_blocks, edge.queued_blocks) == (2, 2)
    snapshot, _ = figures(store, log)
    assert snapshot.refused_blocks["disk queue full"] == 12
    stall.over.set()
    assert on_disk(store, *range(16)) == [0, 1, 8, 9]
    get(store, range(4, 8))  # a page that was passed over gets another chance when it is used
    assert on_disk(store, *range(8)) == [0, 1, 4, 5]


def test_without_a_host_tier_a_put_keeps_to_the_limit_and_loses_nothing(stores):
    store = stores(disk=64, max_pending_spills=2)
    (edge,) = store.leader.edges
    waiting = []
    write = store._stores[DISK].write
    store._stores[DISK].write = lambda *what: waiting.append(edge.pending_blocks + edge.queued_blocks) or write(*what)
    assert put(store, range(16)) == [True] * 16
    assert max(waiting) <= 2
    assert not store.counts.refused_move_blocks.get(DISK)


# -- the cost model ---------------------------------------------------------------------------------------------------


def test_pages_that_are_computed_sooner_are_not_reported(stores):
    log = RequestLog()
    store = stores(prefill_tokens_per_second=10**9, options={**TOKENS, "log": log})
    put(store, range(8))
    for _ in range(3):
        assert store.count(keys(*range(8))) == 0
    snapshot, found = figures(store, log)
    assert snapshot.refused_loads == {"recomputing is faster": 24}
    assert 'kvbm_refused_load_blocks_total{reason="recomputing is faster"} 24' in render(snapshot).decode()
    assert found["kvbm_matched_tokens"] == 0
    assert snapshot.outcomes["found, not loaded"] == 3
    assert explain(snapshot)[0].name == "slow-tier"
    assert get(store, range(8)) == list(range(8))  # what SGLang asks for all the same, it gets


def test_pages_that_are_loaded_sooner_are_reported(stores):
    store = stores(prefill_tokens_per_second=100, options=TOKENS)
    put(store, range(8))
    assert store.count(keys(*range(10))) == 8
    assert store.counts.refused_load_blocks == {}
    assert store.counts.matched_tokens == 8 * 64


@pytest.mark.parametrize(("load", "speed", "found"), [("always", 10**9, 8), ("never", 100, 0)])
def test_a_forced_load_does_not_ask_what_it_costs(stores, load, speed, found):
    store = stores(load=load, prefill_tokens_per_second=speed, options=TOKENS)
    put(store, range(8))
    assert store.count(keys(*range(8))) == found
    assert store.counts.refused_load_blocks == ({} if found else {"configured never to load": 8})


def test_a_prefetch_that_delays_no_request_is_never_refused(stores):
    store = stores(prefill_tokens_per_second=10**9, options={**TOKENS, "prefetch": Prefetch(is_awaited=False)})
    put(store, range(8))
    assert store.count(keys(*range(8))) == 8


@pytest.mark.parametrize(("rate", "found"), [(Rate(1e4, 0.0), 0), (Rate(1e12, 0.0), 8)])
def test_the_speed_of_the_disk_is_measured_at_start(stores, monkeypatch, rate, found):
    """8 pages of 64 tokens: 51 ms of prefill, and 92 KB of disk."""
    store = stores(options=TOKENS)
    assert store.cost.rate(DISK) != disk_tier.TIER.prior
    put(store, range(8))
    store.close()
    monkeypatch.setattr("kvbm.tiers.disk.file.measure", lambda file: rate)
    store = stores(options=TOKENS)
    assert store.cost.rate(DISK).bytes_per_second == pytest.approx(rate.bytes_per_second)
    assert store.count(keys(*range(8))) == found


def test_loads_teach_the_cost_model(stores):
    store = stores(inject_faults="disk-slow-read:seconds=0.2")  # and so nothing is measured at start
    put(store, range(4))
    assert not store.cost.is_measured(DISK)
    store.leader.forget("host")
    assert get(store, range(4)) == [0, 1, 2, 3]
    assert store.cost.is_measured(DISK)
    assert store.cost.load_seconds(DISK, 4 * PAGE) > disk_tier.TIER.prior.fixed_seconds


# -- a disk that hangs or fails ---------------------------------------------------------------------------------------


def test_a_load_that_takes_longer_than_computing_is_given_up(stores, stall, monkeypatch):
    monkeypatch.setattr(stores_module, "SHORTEST_LOAD_SECONDS", 0.05)
    reasons = []
    store = stores()
    put(store, range(4))
    store.close()
    options = {**TOKENS, "note": lambda reason, times: reasons.append(reason)}
    again = stores(inject_faults="disk-slow-read", options=options)
    began = time.monotonic()
    assert get(again, range(4), patience=600.0) == [None] * 4
    assert time.monotonic() - began < 300
    assert reasons == ["disk load: gave up waiting for the disk tier: slower than computing"]
    assert again.count(keys(*range(4))) == 0  # no further load joins the one that hangs
    stall.over.set()
    wait_until(lambda: again.has(keys(*range(4))) == [True] * 4)


def test_a_forced_load_waits_while_anything_comes(stores, monkeypatch):
    monkeypatch.setattr(stores_module, "SHORTEST_LOAD_SECONDS", 0.05)
    store = stores(load="always", prefill_tokens_per_second=10**9, inject_faults="disk-slow-read:seconds=0.3",
                   options=TOKENS)  # fmt: skip
    put(store, range(4))
    store.leader.forget("host")
    assert get(store, range(4), patience=60.0) == [0, 1, 2, 3]


def test_a_disk_that_fails_to_read_gets_a_pause(stores, monkeypatch):
    monkeypatch.setattr(breaker, "FIRST_PAUSE_SECONDS", 60.0)
    store = stores()
    put(store, range(8))
    store.leader.forget("host")
    store._stores[DISK]._io = io = SwitchedIO()
    # A page that could not be read is forgotten, so each of these is another one.
    for number in range(breaker.MAX_FAILURES):
        assert store.count(keys(7)) == 1
        assert get(store, [number]) == [None]
    assert store.count(keys(7)) == 0
    assert store.has(keys(7)) == [False]
    io.broken = False
    assert get(store, [7]) == [None]
    store.leader.breakers[DISK]._closed_at = time.monotonic()  # the pause is over
    assert store.count(keys(7)) == 1
    assert get(store, [7]) == [7]


def test_a_disk_that_fails_to_write_gets_a_pause(stores, monkeypatch):
    monkeypatch.setattr(breaker, "FIRST_PAUSE_SECONDS", 600.0)
    store = stores()
    store._stores[DISK]._io = io = SwitchedIO()
    for number in range(breaker.MAX_FAILURES):
        assert put(store, [number]) == [False]
    (edge,) = store.leader.edges
    assert edge.is_suspended
    io.broken = False
    began = time.monotonic()
    assert store.put(keys(7), Pages(1).all(), began + 600) == [False]
    assert time.monotonic() - began < 300  # it does not wait for the end of the pause
    edge._breaker._closed_at = 0.0
    assert put(store, [7, 0]) == [True, True]
    assert not edge.is_suspended


def test_pages_that_wait_out_a_pause_go_to_disk_after_it(stores):
    store = stores(host=16, disk=64, disable_disk_offload_filter=True)
    (edge,) = store.leader.edges
    edge._breaker._closed_at = time.monotonic() + 600
    assert all(put(store, range(4)))
    assert edge.queued_blocks == 4
    time.sleep(0.3)  # the thread has seen the pause
    edge._breaker._closed_at = 0.0
    assert on_disk(store, *range(4)) == [0, 1, 2, 3]  # without another call


def test_a_failed_load_costs_no_page_that_is_being_put(stores, monkeypatch):
    """The leader does not publish stores beside a failed load. SGLang writes pages that no load has touched."""
    store = stores(disk=64)
    put(store, range(4))
    store.leader.forget("host")
    store._stores[DISK]._io = io = SwitchedIO()
    once, gather = threading.Event(), stores_module.gather

    def fail_a_load(page, target):
        if not once.is_set():
            once.set()
            assert get(store, [0]) == [None]
            io.broken = False
        gather(page, target)

    monkeypatch.setattr(stores_module, "gather", fail_a_load)
    assert put(store, [10, 11]) == [True, True]
    assert get(store, [10, 11]) == [10, 11]


def test_a_write_that_ends_while_the_store_looks_is_not_forgotten(stores):
    store = stores()
    write = store._stores[DISK].write

    def late(*what):
        operation = write(*what)
        done, looks = operation.done, []
        operation.done = lambda: done() and (looks.append(1) or len(looks) > 1)  # not over, and over a moment later
        return operation

    store._stores[DISK].write = late
    assert put(store, range(4)) == [True] * 4
    assert not store.leader.moves_under_way


def test_a_hit_in_host_memory_waits_for_no_room(stores):
    store = stores(host=8, disk=0)
    put(store, range(8))
    near = store.leader.manager.near
    with store.lock:
        near.pin(near.match(keys(*range(8))))
    began = time.monotonic()
    assert get(store, range(8), patience=600.0) == list(range(8))
    assert time.monotonic() - began < 300
    with store.lock:
        near.unpin(near.match(keys(*range(8))))


# -- ranks that only read ---------------------------------------------------------------------------------------------


def test_a_rank_that_only_reads_has_the_same_cost_model_and_breaker(stores, tmp_path, monkeypatch):
    monkeypatch.setattr(breaker, "FIRST_PAUSE_SECONDS", 60.0)
    put(stores(access="writer"), range(8))
    log = RequestLog()
    options = {**TOKENS, "log": log}
    reader = open_reader(tmp_path, options, prefill_tokens_per_second=10**9)
    assert reader.count(keys(*range(8))) == 0
    snapshot, _ = figures(reader, log)
    assert snapshot.refused_loads == {"recomputing is faster": 8}
    reader.close()
    reader = open_reader(tmp_path, options, prefill_tokens_per_second=100)
    assert reader.count(keys(*range(8))) == 8
    assert get(reader, range(8)) == list(range(8))
    snapshot, found = figures(reader, log)
    assert [tier.tier for tier in snapshot.tiers] == [DISK]
    assert found["kvbm_onboard_blocks_d2d"] == 8
    console = Console(width=100, file=io.StringIO())
    console.print(draw(None, snapshot))
    (drawn,) = (line for line in console.file.getvalue().splitlines() if line.startswith(DISK))
    assert drawn.rstrip().endswith("size not known")  # the slots are the writer's
    monkeypatch.setattr("kvbm.tiers.disk.shared.checksum", lambda payload, tag: 0)
    for _ in range(breaker.MAX_FAILURES):
        assert get(reader, range(8)) == [None] * 8
    assert reader.count(keys(*range(8))) == 0
    reader.close()


def test_a_rank_that_only_reads_keeps_no_page_that_the_writer_may_clear(stores, tmp_path):
    store = stores(access="writer")
    put(store, range(4))
    reader = open_reader(tmp_path)
    assert get(reader, range(4)) == list(range(4))
    store.clear()
    assert reader.count(keys(0)) == 0
    assert get(reader, range(4)) == [None] * 4
    reader.clear()
    assert reader.has(keys(0)) == [False]
    reader.close()


def test_reads_that_a_rank_has_given_up_leave_no_page_behind(stores, tmp_path, monkeypatch):
    put(stores(access="writer"), range(4))
    reader = open_reader(tmp_path)
    over, read = threading.Event(), reader._stores[DISK]._read_slot
    monkeypatch.setattr(reader._stores[DISK], "_read_slot", lambda *what: over.wait() and read(*what))
    assert get(reader, range(4), patience=0.05) == [None] * 4
    assert reader.count(keys(0)) == 0  # the circuit breaker is open
    over.set()
    wait_until(lambda: reader.count(keys(0)) == 1)
    assert not reader.leader.manager.near.findable
    assert get(reader, range(4)) == list(range(4))
    reader.close()


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_without_effect_are_named_in_one_warning(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    warn_of_unused(settings_for(tmp_path, load="always", disk_cache_gb=1, max_pending_spills=2))
    assert caplog.text == ""
    warn_of_unused(settings_for(tmp_path, host_persist=True, staging_mb=1, nccl_mla_mode=True))
    (record,) = caplog.records
    assert record.getMessage() == (
        "Settings without effect under SGLang: KVBM_HOST_PERSIST, KVBM_STAGING_MB, DYN_KVBM_NCCL_MLA_MODE. Remove them."
    )
    assert {row.key for row in SETTINGS} >= UNUSED


@pytest.fixture
def arguments(monkeypatch):
    """The server's arguments, where there is no SGLang."""
    arguments = SimpleNamespace(hicache_storage_backend_extra_config=None)
    context = ModuleType("sglang.srt.runtime_context")
    context.get_server_args = lambda: arguments
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, context.__name__, context)
    return arguments


def test_sglangs_prefetch_policy_says_whether_requests_wait(arguments):
    assert read_prefetch().is_awaited
    for policy in ("best_effort", "wait_complete"):
        arguments.hicache_storage_prefetch_policy = policy
        assert read_prefetch() == Prefetch(policy != "best_effort")
    assert Prefetch().limit_seconds(10**9) == math.inf


def test_the_hidden_size_comes_from_the_models_folder(arguments, tmp_path):
    assert read_hidden_size() is None
    (tmp_path / "config.json").write_text('{"hidden_size": 4096}')
    arguments.model_path = str(tmp_path)
    assert read_hidden_size() == 4096


# -- any tier of the registry -----------------------------------------------------------------------------------------


@pytest.fixture
def toy(monkeypatch):
    """A keyed tier that the SGLang store has never heard of."""
    server = Server()
    monkeypatch.setattr(toy_tier, "SERVER", server)
    registry.register(toy_tier.TIER)
    yield server
    del registry.TIERS[toy_tier.TIER.name]


def test_pages_go_to_every_registered_tier_and_come_back(stores, toy):
    store = stores(host=32, disk=64, disable_disk_offload_filter=True)
    assert put(store, range(8)) == [True] * 8
    assert on_disk(store, *range(8)) == list(range(8))
    assert len(toy.blocks) == 8
    manager = store.leader.manager
    assert list(manager.catalogs) == [HOST, DISK, toy_tier.TIER.name]
    # One load reads from two staged tiers.
    store.leader.forget(HOST)
    store.leader.forget(DISK, keys(2, 3, 6, 7))
    assert store.count(keys(*range(8))) == 8
    assert get(store, range(8)) == list(range(8))
    onboarded = store.counts.onboarded_blocks
    assert (onboarded[DISK], onboarded[toy_tier.TIER.name]) == (4, 4)


def test_a_registered_tier_that_fails_costs_its_pages_only(stores, toy):
    reasons = []
    store = stores(host=32, disk=64, disable_disk_offload_filter=True,
                   options={"note": lambda reason, times: reasons.append(reason)})  # fmt: skip
    put(store, range(4))
    assert on_disk(store, *range(4)) == list(range(4))
    store.leader.forget(HOST)
    store.leader.forget(DISK, keys(2, 3))
    toy.fails = {"read"}
    assert get(store, range(4)) == [0, 1, None, None]
    assert reasons == ["toy load: the toy server refuses to read"]
    toy.fails = {"write"}
    assert put(store, [8]) == [True]
    wait_until(lambda: "spill: the toy server refuses to write" in reasons)
    assert on_disk(store, 8) == [8]
