"""A record of a small engine, replayed: what policies and admission rules have learned is the same to the last bit."""

from __future__ import annotations

import random

import pytest

from kvbm.config import load
from kvbm.core.clock import OperationClock
from kvbm.core.manager import BlockManager
from kvbm.core.policy import COMMON
from kvbm.engines.guard import Faults
from kvbm.engines.session import Completed, RequestState, Session
from kvbm.plans import Hello, LoadResult, MoveResult, Report, StoreResult, TierHello
from kvbm.simulate.engine import SimulatedEngine
from kvbm.simulate.sweep import machine_of, settings_of
from kvbm.simulate.trace import key_of, read
from kvbm.tiers import registry
from tiernames import DISK, HOST

BLOCK = 16
SIZES = {HOST: 40, DISK: 60}


class JumpingClock:
    """Never tells the same time twice, and jumps over many ages of a block: whole microseconds."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._microseconds = 0

    def __call__(self):
        self._microseconds += self._random.randrange(1, 2_000_000)
        return self._microseconds / 1e6


class Engine:
    """Serves conversations side by side: requests, ends of transfers and plans of moves come in any order."""

    def __init__(self, folder, policy, shares, seed):
        self.random = random.Random(seed)
        config = load(
            {
                "enable_record": True, "record_dir": str(folder), "metrics": False, "load": "always",
                "host_policy": policy, "disk_policy": policy, "disk_filter_decay_secs": 20,
                "cpu_cache_override_num_blocks": SIZES[HOST], "disk_cache_override_num_blocks": SIZES[DISK],
                **({"tenant_shares": shares} if shares else {}),
            },
            environ={}, files=(),
        )  # fmt: skip
        clock = OperationClock(JumpingClock(seed))
        catalogs = {name: registry.TIERS[name].make_pool(config, slots, clock) for name, slots in SIZES.items()}
        self.faults = Faults()
        self.session = Session("test", config, self.faults, BLOCK, 8192, None)
        hello = Hello(0, 4096, "", [TierHello(name, slots) for name, slots in SIZES.items()])
        self.leader = self.session.begin([hello], None, BlockManager(catalogs, clock=clock))
        self.session.show("test", "1", "model", 100, "test", "test")
        self.talks = [self.blocks(2) + self.blocks(1) for _ in range(10)]
        head = self.blocks(2)
        self.talks += [head + self.blocks(1) for _ in range(6)]
        self.running, self.under_way, self.found, self.loaded = [], [], [], []
        self.engine_blocks = self.requests = 0

    def blocks(self, count):
        return [key_of("", self.random.randrange(1 << 40)) for _ in range(count)]

    def allocate(self, count):
        self.engine_blocks += count
        return range(self.engine_blocks - count, self.engine_blocks)

    def arrive(self):
        number = self.random.randrange(len(self.talks))
        talk = self.talks[number]
        talk += self.blocks(self.random.randrange(3))
        keys, session = list(talk), self.session
        del talk[self.random.randrange(4, 12) :]
        self.requests += 1
        state, tokens, plan, loaded = RequestState(f"request-{self.requests}"), len(keys) * BLOCK + 3, None, 0
        state.tenant = session.tenant_of(["acme", "beta", ""][number % 3]) if number < 10 else COMMON
        computed = self.random.choice([0, 0, 0, 1, len(keys)]) * BLOCK
        wanted = session.wanted(state, tokens, computed)
        found = {}
        if wanted is not None:
            match = self.leader.manager.lookup(keys, *wanted, wait_for_writers=False)
            for tier, slots, _ in match.runs:
                found[tier] = found.get(tier, 0) + len(slots)
            decision = session.decide(match, tokens, bool(self.running))
            if session.consider(state, match, decision, tokens, wanted[1]):
                loaded = decision.blocks
                session.offer(state, match, decision, decision.in_step)
                plan = session.load(state, state.match, self.allocate(loaded), loaded)
                self.under_way.append(plan)
        session.admit(state, plan, loaded)
        self.found.append(found)
        self.loaded.append(loaded)
        state.found = computed // BLOCK + loaded
        self.running.append((state, keys))

    def step(self):
        chosen = [each for each in self.running if self.random.random() < 0.7]
        parts = []
        for state, keys in chosen:
            end = min(len(keys), max(state.stored, state.found) + self.random.randrange(5))
            if state.keep and end > state.stored:
                parts.append(Completed(state, keys, state.stored, end, max(state.stored, state.found) * BLOCK))
        keys = [key for part in parts for key in part.keys[part.first : part.end]]
        if parts and (plan := self.session.store(parts, keys, self.allocate(len(keys)))) is not None:
            self.under_way.append(plan)
        self.under_way += self.leader.plan_moves()

    def report(self):
        ended = [plan for plan in self.under_way if self.random.random() < 0.5]
        self.under_way = [plan for plan in self.under_way if plan not in ended]
        report = Report(0)
        for plan in ended:
            match type(plan).__name__:
                case "LoadPlan":
                    report.loads.append(LoadResult(plan.id, seconds=0.01))
                case "StorePlan":
                    report.stores.append(StoreResult(plan.id, self.random.random() < 0.95))
                case "MovePlan":
                    report.moves.append(MoveResult(plan.id))
        self.leader.apply([report])

    def finish(self):
        some = self.random.sample(self.running, self.random.randrange(len(self.running) + 1))
        for state, keys in some:
            self.running.remove((state, keys))
            self.session.finish(state, self.random.randrange(100), keys, later=self.random.random() < 0.5)

    def run(self, steps):
        for number in range(steps):
            for _ in range(self.random.randrange(3)):
                self.arrive()
            self.session.finalize()
            self.step()
            self.report()
            self.finish()
            if number == steps // 3:
                self.session.reset(state for state, _ in self.running)
        for state, keys in self.running:
            self.session.finish(state, 1, keys)
        self.session.finalize()
        while self.under_way:
            self.report()
        assert not self.faults.counts
        self.session.close()


def learned(leader):
    """All that depends on the time, to the bit."""
    for catalog in leader.manager.catalogs.values():
        yield catalog.evictions
        for policy in getattr(catalog._policy, "_policies", {COMMON: catalog._policy}).values():
            if hasattr(policy, "_returns"):
                yield [(group.time, group.kind, group.bucket, group.live) for group in policy._groups]
                yield [when for when, _, _ in policy._open._batches]
                yield from (policy._returns.exposed.tobytes(), policy._returns.returned.tobytes())
    for edge in leader.edges:
        rule = edge._admission
        yield rule._next_step, rule._step, sorted(rule._ends.values())
        yield edge.queued_blocks


@pytest.mark.parametrize(("policy", "shares"), [("lru", ""), ("session", ""), ("session", "acme=0.3,beta=0.3")])
@pytest.mark.parametrize("seed", range(5))
def test_a_replay_sees_the_times_that_the_engine_saw(tmp_path, policy, shares, seed):
    engine = Engine(tmp_path, policy, shares, seed)
    engine.run(300)
    (path,) = tmp_path.glob("*.jsonl")
    trace = read([path])
    assert trace.is_exact
    replay = SimulatedEngine(trace, settings_of(trace, {}, trace.slots), trace.slots, machine_of(trace))
    replay.run(exact=True)
    assert replay.found == engine.found
    assert replay.loaded == engine.loaded
    assert list(learned(replay._leader)) == list(learned(engine.leader))
    counts = engine.leader.counts
    assert min(counts.moved_blocks[DISK], counts.onboarded_blocks[HOST], counts.onboarded_blocks[DISK]) > 20
    assert all(catalog.evictions > 50 for catalog in engine.leader.manager.catalogs.values())
