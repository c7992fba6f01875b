"""Random histories of a leader, its tiers and up to three ranks that answer in any order, well, badly or late.

The model beside it knows nothing of pools: it keeps what every rank has really written into every slot, which plans are
out and who has answered. What the leader lets be found must be what the model says is good, after every step, and so
must what it has written into the index for the engine that comes after it. One tier is keyed: it lies behind a server
that other engines write to as well, and learns what is there by asking.
"""

from collections import Counter
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbm.core.manager import BlockManager
from kvbm.core.policy import POLICIES, make_policy
from kvbm.core.pool import Pool
from kvbm.plans import LoadResult, MoveResult, Report, StoreResult
from kvbm.runtime.leader import Leader
from kvbm.tiers.base import Route
from tiernames import DISK, HOST
from toy_tier import TIER
from toy_tier.catalog import ToyCatalog

TOY = TIER.name

# Three prompts of six blocks that share their first two.
PROMPTS = [[b"a", b"b", *(f"{name}{i}".encode() for i in range(4))] for name in "xyz"]
KEYS = sorted({key for prompt in PROMPTS for key in prompt})
ENGINE_BLOCKS = 10

prompts = st.integers(0, 2)
places = st.integers(0, 5)
some = st.integers(0, 15)


@pytest.fixture(autouse=True, scope="module")
def breakers_stay_closed():
    """The histories are without time; tests/core/test_breaker.py and test_edges.py show what failures in a row do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbm.core.breaker.MAX_FAILURES", 1_000_000)
        patch.setattr("toy_tier.catalog.LOOKUP_SECONDS", 1e9)
        yield


class Load:
    def __init__(self, keys, slots, ranks, in_step):
        self.keys, self.slots, self.waiting, self.in_step = keys, slots, ranks, in_step  # slots: (tier, slot) pairs
        self.bad, self.absent = set(), set()
        self.missed = {}  # rank -> positions, as it said last
        self.late = {}  # rank -> tiers that still write to its host slots
        self.via = {}  # position -> host slot in which the block is to stay
        self.lent = []  # host slots that are only passed through
        self.tags = {}  # position -> what is asked of the disk
        self.keep = True


class Store:
    def __init__(self, keys, slots, blocks, ranks, beside):
        self.keys, self.slots, self.blocks, self.waiting, self.beside = keys, slots, blocks, ranks, beside
        self.spoiled = False  # failed on a rank, computed on a failed load, or older than a reset


class Spill:
    def __init__(self, plan, keys, ranks):
        self.source, self.target, self.via = plan.source, plan.target, plan.via
        self.keys, self.slots, self.targets, self.tags, self.waiting = keys, plan.slots, plan.targets, plan.tags, ranks
        self.bad = set()


class Server:
    """Answers when the history says so."""

    pending_lookups = 0

    def __init__(self):
        self.questions = []

    def ask(self, keys, ranks, answers):
        self.answers = answers
        self.questions += keys


class Book:
    """An index that is written at once."""

    def __init__(self):
        self.rows = {}

    def put(self, pairs):
        for key, slot in pairs:
            self.rows = {k: s for k, s in self.rows.items() if s != slot}
            self.rows[key] = slot

    def remove(self, keys):
        for key in keys:
            self.rows.pop(key, None)

    def touch(self, keys, is_prefix=False):
        assert keys

    def clear(self):
        self.rows = {}


class LeaderMachine(RuleBasedStateMachine):
    routes = ((HOST, DISK),)
    policy = "lru"

    @initialize(
        ranks=st.integers(1, 3),
        host=st.integers(1, 8),
        disk=st.integers(1, 6),
        pending=st.sampled_from([3, 99]),
        passage=st.integers(1, 3),
    )
    def start(self, ranks, host, disk, pending, passage):
        self.ranks = range(ranks)
        self.max_pending = pending
        self.far = [target for _, target in self.routes]
        self.server = Server()
        self.asked, self.absent = (
            set(),
            set(),
        )  # keys that the toy tier waits to hear of, and that it knows are not there
        time = count()

        def pool(size):
            return Pool(size, make_policy(self.policy, size, lambda: 0.3 * next(time)))

        made = {DISK: lambda: pool(disk), TOY: lambda: ToyCatalog(disk, self.server, ranks)}
        self.manager = BlockManager({HOST: pool(host), **{tier: made[tier]() for tier in self.far}}, passage)
        self.leader = Leader(self.manager, ranks, max_pending_blocks=pending)
        self.index = Book()
        if DISK in self.far:
            self.manager.catalogs[DISK].journal = self.index
        for source, target in self.routes:
            self.leader.add_edge(Route(target, source, max_pending_blocks=3))
        self.edges = self.leader.edges
        self.loads, self.stores, self.spills = {}, {}, {}
        self.late = {}  # loads that are over for the engine
        self.found = {tier: {} for tier in self.manager.catalogs}  # key -> slot
        # (rank, tier, slot, or tag where the tier is keyed) -> the key whose bytes lie there, None while they are being
        # replaced
        self.written = {}
        self.failed = {
            tier: set() for tier in self.manager.catalogs
        }  # keys whose last load failed, until they are stored again
        self.reader = {}  # engine block -> the last store that reads it
        self.lost = set()
        self.generation = b""
        self.was_reset = False
        self.old_match = None
        self.over = []  # plans that have ended
        self.strangers = 0

    # -- the model ----------------------------------------------------------------------------------------------------

    @property
    def all_loads(self):
        return [*self.loads.values(), *self.late.values()]

    @property
    def suspended(self):
        return {tier for load in self.all_loads for tiers in load.late.values() for tier in tiers}

    @property
    def may_ask(self):
        return TOY in self.far and not self.was_reset and not self.lost

    def pinned(self, tier):
        pins = Counter(slot for load in self.all_loads for t, slot in load.slots if t == tier)
        pins.update(slot for spill in self.spills.values() if spill.source == tier for slot in spill.slots)
        return pins

    def writing(self, tier):
        """key -> slot of what is being written."""
        if tier != HOST:
            spills = [spill for spill in self.spills.values() if spill.target == tier]
            return {k: s for spill in spills for k, s in zip(spill.keys, spill.targets, strict=True)}
        stored = {k: s for store in self.stores.values() for k, s in zip(store.keys, store.slots, strict=True)}
        return stored | {load.keys[i]: slot for load in self.all_loads for i, slot in load.via.items()}

    def lent(self):
        return [slot for load in self.all_loads for slot in load.lent] + [
            slot for spill in self.spills.values() for slot in spill.via
        ]

    def in_use(self, tier):
        """Slots that no plan may be given now."""
        return {*self.pinned(tier), *self.writing(tier).values(), *(self.lent() if tier == HOST else ())}

    def expected_match(self, keys, wait_for_writers=True):
        """(tier, slot) of every block of the longest prefix, each in the fastest tier that has it; whether asking again
        may find more; and the keys that the toy tier asks its server for."""
        found, asks = [], set()
        tiers = [tier for tier in self.far if tier not in self.suspended]
        for i, key in enumerate(keys):
            if key in self.found[HOST]:
                found.append((HOST, self.found[HOST][key]))
                continue
            if wait_for_writers and key in self.writing(HOST):
                break
            if TOY in tiers and self.may_ask and not asks:
                known = {*self.found[TOY], *self.writing(TOY), *self.absent, *self.asked}
                asks = {k for k in keys[i:] if k not in known}
            unknown = False
            for tier in tiers:
                if key in self.found[tier]:
                    found.append((tier, self.found[tier][key]))
                    break
                if tier == TOY and key in self.asked | asks:
                    unknown = True
            else:
                return found, unknown or self.is_being_written(key), asks
            if unknown and wait_for_writers:
                raise AssertionError("a tier below the keyed one")
        rest = keys[len(found) : len(found) + 1]
        return found, any(map(self.is_being_written, rest)), asks

    def is_being_written(self, key):
        return any(key in self.writing(tier) for tier in self.manager.catalogs)

    def adopt_evictions(self, tier, free, taken):
        """The tier has given ``taken`` slots; of those it evicted for that, none may have been in use."""
        now = self.manager.catalogs[tier]._published
        gone = [key for key in self.found[tier] if key not in now]
        assert len(gone) == max(0, taken - free)
        pinned = self.pinned(tier)
        for key in gone:
            assert not pinned[self.found[tier].pop(key)]
        return gone

    def fences(self, blocks):
        last = {self.reader[block] for block in blocks if block in self.reader}
        return sorted(plan for plan in last if plan in self.stores and self.stores[plan].waiting)

    def end_load(self, rank, plan, result):
        load = self.loads.get(plan) or self.late[plan]
        is_over = plan in self.late
        load.bad.update(result.bad)
        load.missed[rank] = set(result.missed)
        load.late.pop(rank, None)
        if result.late:
            load.late[rank] = result.late
        for i, slot in load.via.items():
            arrived = i not in result.bad and i not in result.missed
            self.written[rank, HOST, slot] = load.keys[i] if arrived else None
        if not is_over:
            load.absent.update(result.bad, result.missed)
            load.waiting.discard(rank)
            if load.absent:
                self.spoil_stores()
            if load.waiting:
                return
            self.late[plan] = self.loads.pop(plan)
            self.over.append(LoadResult(plan, [0]))
        if not load.late:
            self.finish_load(plan)
        if not is_over:
            for id in list(self.stores):
                self.settle(id)

    def finish_load(self, plan):
        load = self.late.pop(plan)
        for position in load.bad:
            (tier, slot), key = load.slots[position], load.keys[position]
            if self.found[tier].get(key) == slot:
                del self.found[tier][key]
                self.failed[tier].add(key)
                if tier == TOY:
                    self.absent.add(key)
        absent = load.bad.union(*load.missed.values())
        if load.keep:
            for i, slot in load.via.items():
                if i not in absent:
                    self.publish(HOST, [load.keys[i]], [slot])

    def end_store(self, rank, plan, ok):
        store = self.stores[plan]
        store.spoiled |= not ok
        store.waiting.discard(rank)
        for slot, key in zip(store.slots, store.keys, strict=True):
            self.written[rank, HOST, slot] = key if ok else None
        self.settle(plan)

    def settle(self, plan):
        store = self.stores[plan]
        if store.waiting or any(load in self.loads for load in store.beside):
            return
        del self.stores[plan]
        self.over.append(StoreResult(plan))
        if not store.spoiled:
            self.publish(HOST, store.keys, store.slots)

    def end_spill(self, rank, plan, bad):
        spill = self.spills[plan]
        spill.bad.update(bad)
        spill.waiting.discard(rank)
        for i, (slot, target, tag) in enumerate(zip(spill.slots, spill.targets, spill.tags, strict=True)):
            content = spill.keys[i] if spill.source == HOST else tag
            assert self.written[rank, spill.source, slot] == content, "the source of a spill has changed"
            if i not in bad or spill.target != TOY:  # a keyed store keeps what it had
                self.written[rank, spill.target, at(spill.target, target, tag)] = None if i in bad else tag
        if spill.waiting:
            return
        del self.spills[plan]
        self.over.append(MoveResult(plan))
        for i, (key, slot, target) in enumerate(zip(spill.keys, spill.slots, spill.targets, strict=True)):
            if i not in spill.bad and self.found[spill.source].get(key) == slot:
                self.publish(spill.target, [key], [target])

    def publish(self, tier, keys, slots):
        self.found[tier].update(zip(keys, slots, strict=True))
        self.failed[tier].difference_update(keys)
        if tier == TOY:
            self.absent.difference_update(keys)

    def spoil_stores(self):
        for store in self.stores.values():
            store.spoiled = True

    def assert_good(self, rank, load):
        for i, ((tier, slot), key) in enumerate(zip(load.slots, load.keys, strict=True)):
            wanted = key if tier == HOST else load.tags[i]
            assert self.written[rank, tier, at(tier, slot, wanted)] == wanted, (
                "a rank is told to read what is not there"
            )

    # -- plans --------------------------------------------------------------------------------------------------------

    @rule(prompt=prompts, at=places, base=some, whole=st.booleans())
    def offload(self, prompt, at, base, whole):
        # Some callers hand over the whole prompt so far, others only what is new.
        keys = PROMPTS[prompt][: at + 1] if whole else PROMPTS[prompt][at : at + 3]
        self.plan_store(keys, [(base + i) % ENGINE_BLOCKS for i in range(len(keys))])

    def plan_store(self, keys, blocks):
        pool = self.manager.catalogs[HOST]
        writing = self.writing(HOST)
        fresh = [key for key in keys if key not in self.found[HOST] and key not in writing]
        free = pool.free
        used = self.in_use(HOST)
        pending = sum(len(store.blocks) for store in self.stores.values() if store.waiting)
        plan = self.leader.offload(keys, blocks)
        if self.lost or pending >= self.max_pending:
            assert plan is None
        if plan is None:
            # Nothing new, too much under way, or no room but what is pinned, being written or in front of it.
            in_front = keys[: keys.index(fresh[0])] if fresh else []
            assert (
                not fresh
                or self.lost
                or pending >= self.max_pending
                or pool.available <= sum(pool.is_evictable(key) for key in in_front)
            )
            return None
        taken = [keys[blocks.index(block)] for block in plan.copy.blocks]
        slots = plan.copy.slots
        assert plan.copy.tier == HOST
        assert taken == fresh[: len(taken)]
        assert len(taken) >= min(len(fresh), free)
        gone = self.adopt_evictions(HOST, free, len(taken))
        assert all(keys.index(key) > keys.index(taken[-1]) for key in gone if key in keys)
        assert not set(slots) & (used | set(self.found[HOST].values()))
        beside = {id for id, load in self.loads.items() if load.in_step}
        self.stores[plan.id] = Store(taken, slots, plan.copy.blocks, set(self.ranks), beside)
        for block in plan.copy.blocks:
            self.reader[block] = plan.id
        for rank in self.ranks:
            for slot in slots:
                self.written[rank, HOST, slot] = None
        return plan

    @rule(count=st.integers(1, 3))
    def press(self, count):
        """Other requests fill the tier."""
        keys = [f"stranger {self.strangers + i}".encode() for i in range(count)]
        self.strangers += count
        plan = self.plan_store(keys, list(range(count)))
        if plan is not None:
            self.answer([(rank, StoreResult(plan.id)) for rank in self.ranks])

    @rule(prompt=prompts, count=places)
    def somebody_uses(self, prompt, count):
        self.leader.used(PROMPTS[prompt][:count])

    @rule(prompt=prompts, count=places)
    def somebody_uses_and_spills(self, prompt, count):
        self.leader.used(PROMPTS[prompt][:count])
        self.spill()

    @rule()
    def spill(self):
        catalogs = self.manager.catalogs
        waiting = {edge.target: list(edge._waiting) for edge in self.edges}
        free, used = ({tier: of(tier) for tier in catalogs} for of in (lambda tier: catalogs[tier].free, self.in_use))
        plans = {plan.target: plan for plan in self.leader.plan_moves()}
        for edge in self.edges:
            plan, target, source = plans.get(edge.target), edge.target, edge.source
            pending = sum(len(spill.slots) for spill in self.spills.values() if spill.target == target)
            most = edge._max_pending
            assert pending + (len(plan.slots) if plan else 0) <= most
            if plan is None:
                continue
            assert not self.lost
            assert not self.suspended & {source, target}
            here, there = self.found[source], {**self.found[target], **self.writing(target)}
            fresh = [key for key in waiting[target][: most - pending] if key in here and key not in there]
            keys = fresh[: len(plan.slots)]
            assert plan.source == source
            assert plan.slots == [here[key] for key in keys]
            assert plan.tags == [key + self.generation for key in keys]
            self.adopt_evictions(target, free[target], len(keys))
            assert not set(plan.targets) & (used[target] | set(self.found[target].values()))
            self.spills[plan.id] = Spill(plan, keys, set(self.ranks))
            assert len(plan.via) == (0 if source == HOST else len(keys))
            for rank in self.ranks:
                for slot in plan.via:
                    self.written[rank, HOST, slot] = None
                for slot, place, key, tag in zip(plan.slots, plan.targets, keys, plan.tags, strict=True):
                    assert self.written[rank, source, slot] == (key if source == HOST else tag)
                    if target != TOY:
                        self.written[rank, target, place] = None
        lent = [slot for plan in plans.values() for slot in plan.via]
        self.adopt_evictions(HOST, free[HOST], len(lent))
        assert not set(lent) & (used[HOST] | set(self.found[HOST].values()))

    @precondition(lambda self: DISK in self.far and not self.lost and DISK not in self.suspended)
    @rule(prompt=prompts, at=places)
    def disk_fills(self, prompt, at):
        """Up to three blocks of a prompt come to the slower tier by themselves, as after a restart."""
        pool = self.manager.catalogs[DISK]
        writing = self.writing(DISK)
        keys = [key for key in PROMPTS[prompt][at : at + 3] if key not in self.found[DISK] and key not in writing]
        free = pool.free
        slots = pool.reserve(keys)
        if slots is None:
            return
        self.adopt_evictions(DISK, free, len(keys))
        pool.commit(slots)
        self.publish(DISK, keys, slots)
        for rank in self.ranks:
            for slot, key in zip(slots, keys, strict=True):
                self.written[rank, DISK, slot] = key + self.generation

    @precondition(lambda self: TOY in self.far)
    @rule(prompt=prompts, at=places)
    def another_engine_writes(self, prompt, at):
        for key in PROMPTS[prompt][at : at + 3]:
            for rank in self.ranks:
                self.written[rank, TOY, key] = key

    @precondition(lambda self: self.server.questions)
    @rule(which=some)
    def the_server_answers(self, which):
        """Some of the questions, in its own order."""
        pool = self.manager.catalogs[TOY]
        first = which % len(self.server.questions)
        asked, self.server.questions = self.server.questions[first:], self.server.questions[:first]
        present = []
        for key in asked:
            there = all(self.written.get((rank, TOY, key)) == key for rank in self.ranks)
            self.server.answers.put((key, there))
            known = key in self.found[TOY] or key in self.writing(TOY) or key in self.absent
            if self.may_ask and not known:
                (present.append if there else self.absent.add)(key)
        self.asked.difference_update(asked)
        free, room = pool.free, pool.available
        pool.expect(())
        self.adopt_evictions(TOY, free, len(present[:room]))
        self.publish(TOY, present[:room], [pool._published[key] for key in present[:room]])

    def lookup(self, which, wait_for_writers=True):
        """A match, what it must hold and where: where there is something to find, if there is anything at all."""
        starts = [(prompt, at) for prompt in PROMPTS for at in range(6)]
        hits = [(prompt, at) for prompt, at in starts if self.expected_match(prompt[at : at + 1])[0]] or starts
        prompt, at = hits[which % len(hits)]
        slots, pending, asks = self.expected_match(prompt[at:], wait_for_writers)
        match = self.manager.lookup(prompt, at, wait_for_writers=wait_for_writers)
        self.asked |= asks
        end = at + len(slots)
        assert [(run.tier, slot) for run in match.runs for slot in run.slots] == slots
        assert match.pending == pending
        return match, prompt[at:end], slots

    @precondition(lambda self: TOY in self.far)
    @rule(prompt=prompts, wait_for_writers=st.booleans())
    def ask(self, prompt, wait_for_writers):
        """A request looks for a prompt of which nothing needs to be known yet."""
        slots, pending, asks = self.expected_match(PROMPTS[prompt], wait_for_writers)
        match = self.manager.lookup(PROMPTS[prompt], wait_for_writers=wait_for_writers)
        self.asked |= asks
        assert (match.blocks, match.pending) == (len(slots), pending)

    @rule(which=st.integers(0, 17), base=some, in_step=st.booleans(), wait_for_writers=st.booleans())
    def onboard(self, which, base, in_step, wait_for_writers):
        match, keys, slots = self.lookup(which, wait_for_writers)
        in_step &= all(tier == HOST for tier, _ in slots)
        self.plan_load(match, keys, slots, base, in_step)

    @rule(which=st.integers(0, 17), cut=st.integers(1, 6))
    def look(self, which, cut):
        match, keys, slots = self.lookup(which)
        self.old_match = (match.cut(cut), keys[:cut], slots[:cut])

    @precondition(lambda self: self.old_match)
    @rule(base=some)
    def onboard_what_was_found_earlier(self, base):
        match, keys, slots = self.old_match
        good = all(self.found[tier].get(key) == slot for key, (tier, slot) in zip(keys, slots, strict=True))
        if good:
            self.plan_load(match, keys, slots, base, in_step=True)
        else:
            with pytest.raises(ValueError, match="out of date"):
                self.leader.onboard(match, "late", range(len(keys)), in_step=True)

    def plan_load(self, match, keys, slots, base, in_step):
        blocks = [(base + i) % ENGINE_BLOCKS for i in range(len(keys))]
        pool = self.manager.catalogs[HOST]
        free, used = pool.free, self.in_use(HOST) | {slot for tier, slot in slots if tier == HOST}
        plan = self.leader.onboard(match, "request", blocks, in_step)
        assert plan.blocks == blocks
        assert plan.after == self.fences(blocks)
        load = Load(keys, slots, set(self.ranks), in_step)
        at = 0
        taken = []
        for copy in plan.copies:
            positions = range(at, at + len(copy.slots))
            at += len(copy.slots)
            if copy.tier == HOST:
                assert not copy.via
                assert not copy.tags
                continue
            assert copy.tags == [keys[i] + self.generation for i in positions]
            load.tags.update(zip(positions, copy.tags, strict=True))
            taken += copy.via
            if copy.via and pool._writing.get(keys[positions[0]]) == copy.via[0]:
                load.via.update(zip(positions, copy.via, strict=True))
            else:
                assert bool(copy.via) or not pool.available
                load.lent += copy.via
        self.loads[plan.id] = load
        self.adopt_evictions(HOST, free, len(taken))
        assert len(set(taken)) == len(taken)
        assert not set(taken) & (used | set(self.found[HOST].values()))
        for rank in self.ranks:
            self.assert_good(rank, load)
            for slot in taken:
                self.written[rank, HOST, slot] = None

    # -- reports ------------------------------------------------------------------------------------------------------

    def answer(self, results):
        """Deliver (rank, result) pairs in one call, then tell the model: loads first."""
        reports = []
        for rank, result in results:
            reports.append(Report(rank, **{kind_of(result): [result]}))
        self.leader.apply(reports)
        for rank, result in results:
            if isinstance(result, LoadResult) and (result.id in self.loads or result.id in self.late):
                if not result.bad and not result.missed:
                    self.assert_good(rank, self.loads.get(result.id) or self.late[result.id])
                self.end_load(rank, result.id, result)
        for rank, result in results:
            if isinstance(result, StoreResult) and result.id in self.stores:
                self.end_store(rank, result.id, result.ok)
            if isinstance(result, MoveResult) and result.id in self.spills:
                self.end_spill(rank, result.id, result.bad)

    def result(self, plan, fails, position=0):
        """``fails``: "", "bad", "missed" or "late"."""
        if plan in self.loads:
            load = self.loads[plan]
            staged = [i for i, (tier, _) in enumerate(load.slots) if tier != HOST]
            if fails in ("missed", "late") and staged:
                missed = staged[position % len(staged) :]
                late = fails == "late" and (load.via or load.lent)
                tiers = sorted({load.slots[i][0] for i in missed})
                return LoadResult(plan, missed=missed, late=tiers if late else [])
            return LoadResult(plan, [position % len(load.keys)] if fails and load.keys else [])
        if plan in self.spills:
            return MoveResult(plan, [position % len(self.spills[plan].keys)] if fails else [])
        return StoreResult(plan, ok=not fails)

    def open(self):
        return [
            (rank, plan)
            for plan, flight in (*self.loads.items(), *self.stores.items(), *self.spills.items())
            for rank in sorted(flight.waiting)
        ]

    @precondition(lambda self: self.loads or self.stores or self.spills)
    @rule(which=some)
    def one_rank_answers(self, which):
        waiting = self.open()
        if waiting:
            rank, plan = waiting[which % len(waiting)]
            self.answer([(rank, self.result(plan, fails=""))])

    @precondition(lambda self: self.loads or self.stores or self.spills)
    @rule(which=some, position=places, fails=st.sampled_from(["bad", "missed", "late"]))
    def one_rank_fails(self, which, position, fails):
        waiting = self.open()
        if waiting:
            rank, plan = waiting[which % len(waiting)]
            self.answer([(rank, self.result(plan, fails, position))])

    @precondition(lambda self: self.loads or self.stores or self.spills)
    @rule(failing=some, backwards=st.booleans(), fails=st.sampled_from(["bad", "missed", "late"]))
    def all_ranks_answer_at_once(self, failing, backwards, fails):
        results = [
            (rank, self.result(plan, fails if i == failing else "")) for i, (rank, plan) in enumerate(self.open())
        ]
        self.answer(results[::-1] if backwards else results)

    @precondition(lambda self: self.suspended)
    @rule(which=some, how=st.sampled_from(["all", "none", "bad"]))
    def a_late_read_ends(self, which, how):
        late = [(rank, plan) for plan, load in (*self.loads.items(), *self.late.items()) for rank in sorted(load.late)]
        rank, plan = late[which % len(late)]
        load = self.loads.get(plan) or self.late[plan]
        missed = sorted(load.missed[rank])
        bad = missed[:1] if how == "bad" else []
        left = [] if how == "all" else missed[len(bad) :]
        self.answer([(rank, LoadResult(plan, bad, missed=left))])

    @rule(which=some, rank=st.integers(-1, 3))
    def somebody_repeats_himself(self, which, rank):
        """Answers that were given before, or by a rank nobody knows, confirm nothing."""
        open = set(self.open())
        known = [plan for plan in (*self.loads, *self.stores, *self.spills) if (rank, plan) not in open]
        known = [plan for plan in known if plan not in self.loads or not self.loads[plan].missed.get(rank)]
        stale = [result for result in self.over[-4:] if rank in self.ranks and result.id not in self.late]
        results = [*stale, *(self.result(plan, fails="") for plan in known)]
        if results:
            result = results[which % len(results)]
            self.leader.apply([Report(rank, **{kind_of(result): [result]})])
            if isinstance(result, LoadResult) and (
                result.bad or (result.id in self.loads and self.loads[result.id].absent)
            ):
                self.spoil_stores()

    # -- the rest -----------------------------------------------------------------------------------------------------

    @rule(prompt=prompts)
    def touch(self, prompt):
        self.leader.touch(PROMPTS[prompt])

    @rule(really=some)
    def reset(self, really):
        if really > 1:  # one time in eight: tiers that are always empty test nothing
            return
        self.leader.reset()
        self.spoil_stores()
        for load in self.all_loads:
            load.keep = False
        self.found = {tier: {} for tier in self.found}
        self.asked.clear()
        assert self.manager.generation not in (b"", self.generation)
        self.generation = self.manager.generation
        self.was_reset = True

    @rule(which=st.integers(0, 99))
    def lose_a_rank(self, which):
        """Rarely: nothing much happens in the rest of the history."""
        rank = which - 50
        if rank not in self.ranks:
            return
        self.leader.fail_rank(rank)
        if rank not in self.lost:
            self.lost.add(rank)
            for plan, load in list(self.loads.items()):
                if rank in load.waiting:
                    self.end_load(rank, plan, LoadResult(plan, list(range(len(load.keys)))))
            for load in self.all_loads:
                load.late.pop(rank, None)
                load.keep = False
            for plan, load in list(self.late.items()):
                if not load.late:
                    self.finish_load(plan)
            self.spoil_stores()
            for plan, store in list(self.stores.items()):
                store.waiting.discard(rank)
                self.settle(plan)
            for plan, spill in list(self.spills.items()):
                if rank in spill.waiting:
                    self.end_spill(rank, plan, range(len(spill.keys)))
            self.found = {tier: {} for tier in self.found}
            self.asked.clear()

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def exactly_the_good_blocks_are_found(self):
        for tier, pool in self.manager.catalogs.items():
            assert pool._published == self.found[tier]
            assert not self.failed[tier] & pool._published.keys()
            assert len(set(pool._published.values())) == len(pool._published)
            for key, slot in self.found[tier].items():
                tag = key if tier == HOST else key + self.generation
                for rank in self.ranks:
                    assert self.written[rank, tier, at(tier, slot, tag)] == tag

    @invariant()
    def the_next_engine_would_find_what_this_one_finds(self):
        if self.was_reset:
            assert not self.index.rows
        elif not self.lost and DISK in self.far:
            assert self.index.rows == self.found[DISK]

    @invariant()
    def every_slot_is_in_exactly_one_state(self):
        for tier, pool in self.manager.catalogs.items():
            pinned = self.pinned(tier)
            assert [pinned[slot] for slot in range(pool.size)] == list(pool._pins)
            assert pool._writing == self.writing(tier)
            assert pool._doomed == pinned.keys() - set(self.found[tier].values())
            assert pool._lent == set(self.lent() if tier == HOST else ())
            held = [*pool._free, *pool._writing.values(), *pool._published.values(), *pool._doomed, *pool._lent]
            assert sorted(held) == list(range(pool.size))
            assert pool.pinned == len(pinned)
            assert pool.available == pool.size - len(pinned) - pool.writing - pool.lent

    @invariant()
    def the_leader_knows_what_is_under_way(self):
        assert bool(self.leader.unconfirmed_store_blocks) == bool(self.stores)
        assert self.manager.busy == bool(self.stores or self.all_loads or self.spills)
        assert self.leader.busy == (self.manager.busy or any(edge._waiting for edge in self.edges))
        assert self.leader.fences(range(ENGINE_BLOCKS)) == self.fences(range(ENGINE_BLOCKS))
        assert self.manager.suspended == self.suspended

    def teardown(self):
        """When every rank has answered, nothing is pinned, half written or remembered."""
        if not hasattr(self, "leader"):
            return
        while waiting := self.open():
            self.answer([(rank, self.result(plan, fails="")) for rank, plan in waiting])
        while self.suspended:
            self.a_late_read_ends(0, "all")
        self.exactly_the_good_blocks_are_found()
        assert not self.manager.busy
        assert not self.leader._tainted
        assert not self.leader._reading
        assert not self.leader._late
        assert self.leader._pending_blocks == sum(edge.pending_blocks for edge in self.edges) == 0
        for pool in self.manager.catalogs.values():
            assert (pool.pinned, pool.writing, pool.lent) == (0, 0, 0)
            assert pool.free + pool.published == pool.available == pool.size


def at(tier, slot, tag):
    """Where the bytes of a block lie."""
    return tag if tier == TOY else slot


class KeyedMachine(LeaderMachine):
    routes = ((HOST, TOY),)


class ThreeTierMachine(LeaderMachine):
    """Blocks go on from the second tier to the third, through slots of the first."""

    routes = ((HOST, DISK), (DISK, TOY))


def kind_of(result):
    return {LoadResult: "loads", StoreResult: "stores", MoveResult: "moves"}[type(result)]


def examples(count):
    return settings(
        max_examples=count, stateful_step_count=200, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


class TestLeader(LeaderMachine.TestCase):
    settings = examples(50)


@pytest.mark.long
class TestLeaderAtLength(LeaderMachine.TestCase):
    settings = examples(1000)


class TestKeyed(KeyedMachine.TestCase):
    settings = examples(25)


for name in sorted(POLICIES.keys() - {LeaderMachine.policy}):
    machine = type(f"{name.title()}Machine", (LeaderMachine,), {"policy": name})
    for title, number, marks in (("", 20, []), ("AtLength", 300, [pytest.mark.long])):
        case = type(f"Test{name.title()}{title}", (machine.TestCase,), {"settings": examples(number)})
        case.pytestmark = marks
        globals()[case.__name__] = case
del case, machine


class TestThreeTiers(ThreeTierMachine.TestCase):
    settings = examples(25)


@pytest.mark.long
class TestKeyedAtLength(KeyedMachine.TestCase):
    settings = examples(500)


@pytest.mark.long
class TestThreeTiersAtLength(ThreeTierMachine.TestCase):
    settings = examples(500)
