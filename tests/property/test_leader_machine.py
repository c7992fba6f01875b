"""Random histories of a leader, its two tiers and up to three ranks that answer in any order, well or badly.

The model beside it knows nothing of pools: it keeps what every rank has really written into every slot, which plans are
out and who has answered. What the leader lets be found must be what the model says is good, after every step.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from kvbm.plans import LoadResult, Report, StoreResult, Tier
from kvbm.runtime.leader import Leader

HOST, DISK = Tier.HOST, Tier.DISK
# Three prompts of six blocks that share their first two.
PROMPTS = [[b"a", b"b", *(f"{name}{i}".encode() for i in range(4))] for name in "xyz"]
KEYS = sorted({key for prompt in PROMPTS for key in prompt})
ENGINE_BLOCKS = 10

prompts = st.integers(0, 2)
places = st.integers(0, 5)
some = st.integers(0, 15)


class Load:
    def __init__(self, keys, slots, ranks, in_step):
        self.keys, self.slots, self.waiting, self.in_step = keys, slots, ranks, in_step  # slots: (tier, slot) pairs
        self.bad = set()


class Store:
    def __init__(self, keys, slots, blocks, ranks, beside):
        self.keys, self.slots, self.blocks, self.waiting, self.beside = keys, slots, blocks, ranks, beside
        self.spoiled = False  # failed on a rank, computed on a failed load, or older than a reset


class LeaderMachine(RuleBasedStateMachine):
    @initialize(
        ranks=st.integers(1, 3), host=st.integers(1, 8), disk=st.integers(1, 6), pending=st.sampled_from([3, 99])
    )
    def start(self, ranks, host, disk, pending):
        self.ranks = range(ranks)
        self.max_pending = pending
        self.manager = BlockManager({HOST: Pool(host), DISK: Pool(disk)})
        self.leader = Leader(self.manager, ranks, max_pending_blocks=pending)
        self.loads, self.stores = {}, {}
        self.found = {HOST: {}, DISK: {}}  # key -> slot
        self.written = {}  # (rank, tier, slot) -> the key whose bytes lie there, None while they are being replaced
        self.failed = {HOST: set(), DISK: set()}  # keys whose last load failed, until they are stored again
        self.reader = {}  # engine block -> the last store that reads it
        self.lost = set()
        self.old_match = None
        self.over = []  # plans that have ended
        self.strangers = 0

    # -- the model ----------------------------------------------------------------------------------------------------

    def pinned(self, tier):
        return Counter(slot for load in self.loads.values() for t, slot in load.slots if t is tier)

    def expected_match(self, keys):
        """(tier, slot) of every block of the longest prefix, each in the fastest tier that has it."""
        found = []
        for key in keys:
            tier = next((tier for tier in (HOST, DISK) if key in self.found[tier]), None)
            if tier is None:
                break
            found.append((tier, self.found[tier][key]))
        return found

    def adopt_evictions(self, tier, free, taken):
        """The tier has given ``taken`` slots; of those it evicted for that, none may have been in use."""
        now = self.manager.pools[tier]._published
        gone = [key for key in self.found[tier] if key not in now]
        assert len(gone) == max(0, taken - free)
        pinned = self.pinned(tier)
        for key in gone:
            assert not pinned[self.found[tier].pop(key)]
        return gone

    def fences(self, blocks):
        last = {self.reader[block] for block in blocks if block in self.reader}
        return sorted(plan for plan in last if plan in self.stores and self.stores[plan].waiting)

    def end_load(self, rank, plan, bad):
        load = self.loads[plan]
        load.bad.update(bad)
        load.waiting.discard(rank)
        if load.bad:
            self.spoil_stores()
        if load.waiting:
            return
        del self.loads[plan]
        self.over.append(LoadResult(plan, [0]))
        for position in load.bad:
            (tier, slot), key = load.slots[position], load.keys[position]
            if self.found[tier].get(key) == slot:
                del self.found[tier][key]
                self.failed[tier].add(key)
        for id in list(self.stores):
            self.settle(id)

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

    def publish(self, tier, keys, slots):
        self.found[tier].update(zip(keys, slots, strict=True))
        self.failed[tier].difference_update(keys)

    def spoil_stores(self):
        for store in self.stores.values():
            store.spoiled = True

    def assert_good(self, rank, load):
        for (tier, slot), key in zip(load.slots, load.keys, strict=True):
            assert self.written[rank, tier, slot] == key, "a rank was told to read what is not there"

    # -- plans --------------------------------------------------------------------------------------------------------

    @rule(prompt=prompts, at=places, base=some, whole=st.booleans())
    def offload(self, prompt, at, base, whole):
        # Some callers hand over the whole prompt so far, others only what is new.
        keys = PROMPTS[prompt][: at + 1] if whole else PROMPTS[prompt][at : at + 3]
        self.plan_store(keys, [(base + i) % ENGINE_BLOCKS for i in range(len(keys))])

    def plan_store(self, keys, blocks):
        pool = self.manager.pools[HOST]
        writing = {key for store in self.stores.values() for key in store.keys}
        fresh = [key for key in keys if key not in self.found[HOST] and key not in writing]
        free = pool.free
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
        assert plan.copy.tier is HOST
        assert taken == fresh[: len(taken)]
        assert len(taken) >= min(len(fresh), free)
        gone = self.adopt_evictions(HOST, free, len(taken))
        assert all(keys.index(key) > keys.index(taken[-1]) for key in gone if key in keys)
        assert not set(slots) & {slot for store in self.stores.values() for slot in store.slots}
        assert not set(slots) & (set(self.pinned(HOST)) | set(self.found[HOST].values()))
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

    @rule(prompt=prompts, at=places)
    def spill(self, prompt, at):
        """Up to three blocks of a prompt come to the slower tier."""
        pool = self.manager.pools[DISK]
        keys = [key for key in PROMPTS[prompt][at : at + 3] if key not in self.found[DISK]]
        free = pool.free
        slots = pool.allocate(keys)
        if slots is None:
            return
        self.adopt_evictions(DISK, free, len(keys))
        pool.publish(slots)
        self.publish(DISK, keys, slots)
        for rank in self.ranks:
            for slot, key in zip(slots, keys, strict=True):
                self.written[rank, DISK, slot] = key

    def lookup(self, which):
        """A match, what it must hold and where: where there is something to find, if there is anything at all."""
        starts = [(prompt, at) for prompt in PROMPTS for at in range(6)]
        hits = [(prompt, at) for prompt, at in starts if self.expected_match(prompt[at : at + 1])] or starts
        prompt, at = hits[which % len(hits)]
        match = self.manager.lookup(prompt, at)
        slots = self.expected_match(prompt[at:])
        end = at + len(slots)
        assert [(run.tier, slot) for run in match.runs for slot in run.slots] == slots
        assert match.pending == any(prompt[end : end + 1] == [key] for s in self.stores.values() for key in s.keys)
        return match, prompt[at:end], slots

    @rule(which=st.integers(0, 17), base=some, in_step=st.booleans())
    def onboard(self, which, base, in_step):
        self.plan_load(*self.lookup(which), base, in_step)

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
        plan = self.leader.onboard(match, "request", blocks, in_step)
        assert plan.blocks == blocks
        assert plan.after == self.fences(blocks)
        load = self.loads[plan.id] = Load(keys, slots, set(self.ranks), in_step)
        for rank in self.ranks:
            self.assert_good(rank, load)

    # -- reports ------------------------------------------------------------------------------------------------------

    def answer(self, results):
        """Deliver (rank, result) pairs in one call, then tell the model: loads first."""
        reports = []
        for rank, result in results:
            kind = "loads" if isinstance(result, LoadResult) else "stores"
            reports.append(Report(rank, **{kind: [result]}))
        self.leader.apply(reports)
        for rank, result in results:
            if isinstance(result, LoadResult) and result.id in self.loads:
                if not result.bad:
                    self.assert_good(rank, self.loads[result.id])
                self.end_load(rank, result.id, result.bad)
        for rank, result in results:
            if isinstance(result, StoreResult) and result.id in self.stores:
                self.end_store(rank, result.id, result.ok)

    def result(self, plan, fails, position=0):
        if plan in self.loads:
            blocks = len(self.loads[plan].keys)
            return LoadResult(plan, [position % blocks] if fails and blocks else [])
        return StoreResult(plan, ok=not fails)

    def open(self):
        return [
            (rank, plan)
            for plan, flight in (*self.loads.items(), *self.stores.items())
            for rank in sorted(flight.waiting)
        ]

    @precondition(lambda self: self.loads or self.stores)
    @rule(which=some)
    def one_rank_answers(self, which):
        waiting = self.open()
        if waiting:
            rank, plan = waiting[which % len(waiting)]
            self.answer([(rank, self.result(plan, fails=False))])

    @precondition(lambda self: self.loads or self.stores)
    @rule(which=some, position=places)
    def one_rank_fails(self, which, position):
        waiting = self.open()
        if waiting:
            rank, plan = waiting[which % len(waiting)]
            self.answer([(rank, self.result(plan, fails=True, position=position))])

    @precondition(lambda self: self.loads or self.stores)
    @rule(failing=some, backwards=st.booleans())
    def all_ranks_answer_at_once(self, failing, backwards):
        results = [(rank, self.result(plan, fails=i == failing)) for i, (rank, plan) in enumerate(self.open())]
        self.answer(results[::-1] if backwards else results)

    @rule(which=some, rank=st.integers(-1, 3))
    def somebody_repeats_himself(self, which, rank):
        """Answers that were given before, or by a rank nobody knows, confirm nothing."""
        open = set(self.open())
        known = [plan for plan in (*self.loads, *self.stores) if (rank, plan) not in open]
        stale = [result for result in self.over[-4:] if rank in self.ranks]
        results = [*stale, *(self.result(plan, fails=False) for plan in known)]
        if results:
            result = results[which % len(results)]
            kind = "loads" if isinstance(result, LoadResult) else "stores"
            self.leader.apply([Report(rank, **{kind: [result]})])
            if kind == "loads" and (result.bad or (result.id in self.loads and self.loads[result.id].bad)):
                self.spoil_stores()

    # -- the rest -----------------------------------------------------------------------------------------------------

    @rule(prompt=prompts)
    def touch(self, prompt):
        self.manager.touch(PROMPTS[prompt])

    @rule(really=some)
    def reset(self, really):
        if really > 1:  # one time in eight: tiers that are always empty test nothing
            return
        self.leader.reset()
        self.spoil_stores()
        self.found = {HOST: {}, DISK: {}}

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
                    self.end_load(rank, plan, range(len(load.keys)))
            self.spoil_stores()
            for plan, store in list(self.stores.items()):
                store.waiting.discard(rank)
                self.settle(plan)
            self.found = {HOST: {}, DISK: {}}

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def exactly_the_good_blocks_are_found(self):
        for tier, pool in self.manager.pools.items():
            assert pool._published == self.found[tier]
            assert not self.failed[tier] & pool._published.keys()
            assert len(set(pool._published.values())) == len(pool._published)
            for key, slot in self.found[tier].items():
                for rank in self.ranks:
                    assert self.written[rank, tier, slot] == key

    @invariant()
    def every_slot_is_in_exactly_one_state(self):
        writing = {
            key: slot for store in self.stores.values() for key, slot in zip(store.keys, store.slots, strict=True)
        }
        for tier, pool in self.manager.pools.items():
            pinned = self.pinned(tier)
            assert [pinned[slot] for slot in range(pool.size)] == list(pool._pins)
            assert pool._writing == (writing if tier is HOST else {})
            assert pool._doomed == pinned.keys() - set(self.found[tier].values())
            held = [*pool._free, *pool._writing.values(), *pool._published.values(), *pool._doomed]
            assert sorted(held) == list(range(pool.size))
            assert pool.pinned == len(pinned)
            assert pool.available == pool.size - len(pinned) - pool.writing

    @invariant()
    def the_leader_knows_what_is_under_way(self):
        assert self.leader.stores_under_way == bool(self.stores)
        assert self.leader.busy == self.manager.busy == bool(self.stores or self.loads)
        assert self.leader.fences(range(ENGINE_BLOCKS)) == self.fences(range(ENGINE_BLOCKS))

    def teardown(self):
        """When every rank has answered, nothing is pinned, half written or remembered."""
        if not hasattr(self, "leader"):
            return
        while waiting := self.open():
            self.answer([(rank, self.result(plan, fails=False)) for rank, plan in waiting])
        self.exactly_the_good_blocks_are_found()
        assert not self.leader.busy
        assert not self.leader._tainted
        assert not self.leader._reading
        assert self.leader._pending_blocks == 0
        for pool in self.manager.pools.values():
            assert (pool.pinned, pool.writing) == (0, 0)
            assert pool.free + pool.published == pool.available == pool.size


TestLeader = LeaderMachine.TestCase
TestLeader.settings = settings(
    max_examples=1000, stateful_step_count=200, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
