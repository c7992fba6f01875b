"""A tier that one folder adds: its blocks go out, come back, and are seen from outside. No engine."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from msgspec import structs

import toy_tier
from kvbm import config as settings
from kvbm.control.socket import Controller
from kvbm.core.cost import CostModel
from kvbm.observe.findings import explain
from kvbm.observe.metrics import render
from kvbm.observe.requests import RequestLog
from kvbm.observe.source import LeaderSource
from kvbm.plans import StepPlan
from kvbm.runtime.leader import Leader
from kvbm.runtime.rank import Rank
from kvbm.runtime.tiers import connect, open_manager
from kvbm.tiers import registry
from kvbm.tiers.base import Route
from observed import IDENTITY
from tiernames import DISK, HOST
from toy_tier.server import Server

TOY = toy_tier.TIER.name
BLOCKS = 32
KEYS = [bytes([i]) * 32 for i in range(16)]


@pytest.fixture
def server(monkeypatch):
    """The toy tier is registered, over a server of its own."""
    server = Server()
    monkeypatch.setattr(toy_tier, "SERVER", server)
    monkeypatch.setattr("toy_tier.catalog.LOOKUP_SECONDS", 60.0)
    registry.register(toy_tier.TIER)
    yield server
    del registry.TIERS[TOY]


class Engine:
    def __init__(self, ranks=1, **values):
        config = settings.load(extra={"cpu_cache_override_num_blocks": 16, **values}, environ={}, files=[])
        self.caches = [
            torch.arange(BLOCKS * 2 * 640, dtype=torch.int32).view(BLOCKS, 2, 640) + rank for rank in range(ranks)
        ]
        self.ranks = [Rank(config, rank, ranks, cache={"model": "m"}) for rank in range(ranks)]
        for rank, cache in zip(self.ranks, self.caches, strict=True):
            rank.register({"layer": cache}, BLOCKS)
        self.hellos = [rank.open() for rank in self.ranks]
        self.leader = Leader(open_manager(config, self.hellos, {"model": "m"}), ranks, block_bytes=[5120] * ranks)
        connect(config, self.hellos, self.leader)

    @property
    def toy(self):
        return self.leader.manager.catalogs[TOY]

    def step(self, **plans):
        plan = StepPlan(**plans, moves=self.leader.plan_moves())
        for rank in self.ranks:
            rank.worker.begin(plan)
            rank.worker.start_loads(plan)
            rank.worker.start_stores(plan)
        outcomes = [rank.worker.poll() for rank in self.ranks]
        self.leader.apply([outcome.report for outcome in outcomes])
        return outcomes

    def run(self):
        """Until nothing is under way."""
        deadline = time.monotonic() + 60
        while self.leader.busy:
            assert time.monotonic() < deadline
            self.step()

    def store(self, keys):
        self.step(stores=[self.leader.offload(keys, range(len(keys)))])
        self.run()

    def lookup(self, keys):
        """As an engine that comes again while the answer is pending."""
        deadline = time.monotonic() + 60
        while (match := self.leader.manager.lookup(keys)).pending:
            assert time.monotonic() < deadline
        return match

    def load(self, match, blocks):
        """Returns the engine blocks that hold nothing usable."""
        plan = self.leader.onboard(match, "r", blocks, in_step=False)
        bad = set().union(*(outcome.bad_blocks for outcome in self.step(loads=[plan])))
        while self.leader.busy:
            bad.update(*(outcome.bad_blocks for outcome in self.step()))
        return bad

    def close(self):
        for rank in self.ranks:
            rank.close()
        self.leader.manager.close()


@pytest.fixture
def make(server, tmp_path):
    made = []

    def engine(**options):
        made.append(Engine(**options))
        return made[-1]

    yield engine
    for each in made:
        each.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_are_found_again_by_key_after_the_leader_has_asked(make, server, ranks):
    first = make(ranks=ranks)
    first.store(KEYS[:4])
    assert {tag for _, tag in server.blocks} == set(KEYS[:4])
    assert set(first.toy.findable) == set(KEYS[:4])
    second = make(ranks=ranks)  # knows nothing, and finds what the first has written
    asked = second.leader.manager.lookup(KEYS[:5])
    assert (asked.blocks, asked.pending) == (0, True)
    match = second.lookup(KEYS[:5])
    assert [(run.tier, len(run.slots)) for run in match.runs] == [(TOY, 4)]
    for cache in second.caches:
        cache[8:12] = -1
    assert second.load(match, [8, 9, 10, 11]) == set()
    for one, other in zip(first.caches, second.caches, strict=True):
        assert torch.equal(one[:4], other[8:12])
    assert set(second.leader.manager.near.findable) == set(KEYS[:4])  # they have stayed near


def test_a_corrupt_block_is_refused_and_not_found_again(make, server):
    make().store(KEYS[:3])
    engine = make()
    match = engine.lookup(KEYS[:3])
    server.corrupts = True
    assert engine.load(match, [8, 9, 10]) == {8, 9, 10}
    server.corrupts = False
    assert engine.lookup(KEYS[:3]).blocks == 0
    assert engine.leader.counts.failed_load_blocks == 3


def test_a_server_that_refuses_to_write_costs_hits_there_and_nothing_else(make, server):
    engine = make()
    server.fails = ("write",)
    engine.store(KEYS[:4])
    assert engine.leader.counts.failed_move_blocks == {TOY: 4}
    assert not server.blocks
    assert [run.tier for run in engine.lookup(KEYS[:4]).runs] == [HOST]


def test_a_server_that_never_answers_is_waited_for_within_a_deadline(make, server, monkeypatch):
    monkeypatch.setattr("toy_tier.catalog.LOOKUP_SECONDS", 0.1)
    make().store(KEYS[:4])
    engine = make()
    server.silent = True
    for at in range(4):
        assert engine.lookup(KEYS[at : at + 1]).blocks == 0  # ends
    waits = server.pending_lookups
    assert engine.leader.manager.lookup(KEYS[4:5]).blocks == 0  # after MAX_UNANSWERED no lookup waits
    assert server.pending_lookups == waits


def test_after_a_reset_blocks_of_other_engines_are_not_asked_for(make, server):
    first = make()
    first.store(KEYS[:4])
    engine = make()
    engine.leader.reset()
    assert not engine.lookup(KEYS[:4]).pending
    assert engine.lookup(KEYS[:4]).blocks == 0
    engine.store(KEYS[:4])
    near = engine.leader.manager.near
    near.drop(KEYS[:4])
    match = engine.lookup(KEYS[:4])
    assert [run.tier for run in match.runs] == [TOY]
    assert engine.load(match, [8, 9, 10, 11]) == set()


def test_blocks_move_on_from_disk_through_near_slots(make, server, tmp_path):
    """A tier below another staged tier: the worker reads from one, writes to the other, and gives the slots back."""

    class BelowDisk(type(toy_tier.TIER), frozen=True, kw_only=True):
        def connect(self, config, clock):
            return [route._replace(source=DISK) for route in super().connect(config, clock)]

    registry.TIERS[TOY] = BelowDisk(**structs.asdict(toy_tier.TIER))
    values = {"disk_cache_override_num_blocks": 32, "disable_disk_offload_filter": True}
    engine = make(**values, disk_cache_dir=str(tmp_path / "disk"))
    assert [(edge.source, edge.target) for edge in engine.leader.edges] == [(HOST, DISK), (DISK, TOY)]
    engine.store(KEYS[:4])
    near = engine.leader.manager.near
    assert engine.leader.counts.moved_blocks == {DISK: 4, TOY: 4}
    assert (near.lent, near.pinned) == (0, 0)
    near.drop(KEYS[:4])
    engine.leader.manager.catalogs[DISK].drop(KEYS[:4])
    kept = engine.caches[0][:4].clone()
    match = engine.lookup(KEYS[:4])
    assert [run.tier for run in match.runs] == [TOY]
    assert engine.load(match, [8, 9, 10, 11]) == set()
    assert torch.equal(engine.caches[0][8:12], kept)


def test_no_blocks_move_to_a_tier_that_is_not_writable(make, server):
    registry.TIERS[TOY] = structs.replace(toy_tier.TIER, writable=False)
    engine = make()
    engine.store(KEYS[:4])
    assert engine.leader.edges == []
    assert not engine.leader.counts.moved_blocks


def test_a_block_that_is_bad_at_the_source_of_a_staged_move_is_not_written_to_the_target(make, server, tmp_path):
    values = {"disk_cache_override_num_blocks": 32, "disable_disk_offload_filter": True}
    engine = make(**values, disk_cache_dir=str(tmp_path / "disk"))
    (toy_edge,) = [edge for edge in engine.leader.edges if edge.target == TOY]
    engine.leader.edges.remove(toy_edge)
    engine.store(KEYS[:4])
    disk = engine.leader.manager.catalogs[DISK]
    (slab,) = (tmp_path / "disk").rglob("rank-0.slab")
    slot_bytes = engine.ranks[0].layout.slot_bytes
    with open(slab, "r+b") as file:
        file.seek(disk.find(KEYS[2]) * slot_bytes)
        file.write(b"broken")
    engine.leader.add_edge(Route(TOY, DISK, None, 16))
    engine.leader.used(KEYS[:4])
    engine.run()
    assert {tag for _, tag in server.blocks} == {KEYS[0], KEYS[1], KEYS[3]}
    assert engine.leader.counts.failed_move_blocks == {TOY: 1, DISK: 0}
    near = engine.leader.manager.near
    assert (near.lent, near.pinned, disk.pinned) == (0, 0, 0)


def test_a_tier_whose_catalog_cannot_be_opened_costs_its_hits_and_not_the_engine(make, server, monkeypatch, caplog):
    monkeypatch.setattr(type(toy_tier.TIER), "open_catalog", lambda self, context: 1 // 0)
    engine = make()
    assert list(engine.leader.manager.catalogs) == [HOST]
    assert "there is no toy tier: ZeroDivisionError" in caplog.text
    engine.store(KEYS[:2])
    assert not server.blocks


def test_metrics_control_and_findings_show_the_tier(make, server):
    make().store(KEYS[:4])
    engine = make(cpu_cache_override_num_blocks=2 * toy_tier.SIZE)
    match = engine.lookup(KEYS[:4])
    engine.load(match, [8, 9, 10, 11])
    engine.store(KEYS[4:6])
    source = LeaderSource(IDENTITY, lambda: engine.leader, RequestLog(), CostModel(registry.priors()), {})
    snapshot = source.snapshot()
    tier = next(tier for tier in snapshot.tiers if tier.tier == TOY)
    assert (tier.slots, tier.idle) == (toy_tier.SIZE, 6)
    assert {
        (flow.source, flow.target): flow.blocks for flow in snapshot.flows if TOY in (flow.source, flow.target)
    } == {
        (HOST, TOY): 2,
        (TOY, "device"): 4,
    }
    assert f'target="{TOY}"'.encode() in render(snapshot)
    assert f"{TOY}-smaller-than-{HOST}" in [finding.name for finding in explain(snapshot)]
    controller = Controller(threading.RLock(), lambda: engine.leader, {}, lambda: True, lambda: (0, 0))
    assert controller.carry_out({"do": "status"})["pools"][TOY]["inactive_blocks"] == 6
    assert controller.carry_out({"do": "reset", "tier": "g9"})
    assert not engine.toy.findable
