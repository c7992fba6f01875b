"""Random histories of one pool beside a model that is too simple to be wrong.

The model keeps a state for every slot and the exact order of eviction; after every step the pool must agree with it.
A keyed tier's catalog is such a pool over the keys that it knows of: answers of its server come in between.
"""

from collections import Counter
from copy import deepcopy

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbm.core.policy import NO_HINTS, POLICIES, Retention, Turn, make_policy
from kvbm.core.policy.shares import Shares
from kvbm.core.pool import Pool
from tiernames import Gone
from toy_tier.catalog import ToyCatalog

KEYS = [bytes([i]) for i in range(12)]
FREE, WRITING, PUBLISHED, DOOMED, LENT = "free", "writing", "published", "doomed", "lent"

some = st.integers(0, 11)
few = st.integers(0, 4)
numbers = st.one_of(st.integers(-(2**70), 2**70), st.floats())
turns = st.builds(
    Turn,
    output_tokens=st.integers(0, 2**40),
    session=st.integers(),
    is_final=st.booleans(),
    retention=st.lists(
        st.builds(Retention, st.integers(-5, 5), numbers, st.integers(-9, 99), st.integers(-9, 99)), max_size=3
    ).map(tuple),
)


class PoolMachine(RuleBasedStateMachine):
    make = Pool

    @initialize(size=st.integers(1, 8))
    def start(self, size):
        self.pool = self.make(size)
        self.state = [FREE] * size
        self.key = [None] * size  # of slots being written or published
        self.pins = [0] * size
        self.order = []  # evictable slots, the first to go first
        self.time = 0
        self.used_at = [0] * size
        self.used_by_others = set()  # pinned slots that were used since they were pinned
        self.evictions = 0
        self.writers = []  # lists of slots, each of one allocation
        self.readers = []  # lists of slots, each of one pin
        self.borrowers = []  # lists of slots, each lent at once
        self.gone, self.told = [], []  # keys that were evicted or dropped, and those we were told of
        self.pool.journal = Gone(self.told.extend)

    def slot_of(self, key, state):
        return next((slot for slot, k in enumerate(self.key) if k == key and self.state[slot] == state), None)

    def set_free(self, slot):
        self.state[slot], self.key[slot] = FREE, None
        self.used_by_others.discard(slot)

    def use(self, slots):
        """These slots have just been used, the last of them goes first."""
        for slot in reversed(slots):
            if slot in self.order:
                self.order.remove(slot)
            self.order.append(slot)
            self.time += 1
            self.used_at[slot] = self.time

    # -- rules --------------------------------------------------------------------------------------------------------

    @rule(at=some, count=few)
    def allocate(self, at, count):
        keys = (KEYS + KEYS)[at : at + count]
        if any(key in self.key for key in keys):
            with pytest.raises(ValueError, match="already holds"):
                self.pool.reserve(keys)
            return
        slots = self.pool.reserve(keys)
        free = self.state.count(FREE)
        if count > free + len(self.order):
            assert slots is None
            return
        self.evict(count - free)
        assert len(slots) == count == len(set(slots))
        for slot, key in zip(slots, keys, strict=True):
            assert self.state[slot] == FREE
            self.state[slot], self.key[slot] = WRITING, key
        self.writers.append(slots)

    def evict(self, count):
        for victim in self.order[: max(0, count)]:
            self.gone.append(self.key[victim])
            self.set_free(victim)
            self.order.remove(victim)
            self.evictions += 1

    @rule(count=few)
    def lend(self, count):
        free = self.state.count(FREE)
        slots = self.pool.lend(count)
        assert len(slots) == len(set(slots)) == min(count, free + len(self.order))
        self.evict(len(slots) - free)
        for slot in slots:
            assert self.state[slot] == FREE
            self.state[slot] = LENT
        self.borrowers.append(slots)

    @precondition(lambda self: self.borrowers)
    @rule(which=some)
    def take_back(self, which):
        slots = self.borrowers.pop(which % len(self.borrowers))
        self.pool.take_back(slots)
        for slot in slots:
            self.set_free(slot)

    @precondition(lambda self: self.writers)
    @rule(which=some, well=st.booleans())
    def finish_writing(self, which, well):
        slots = self.writers.pop(which % len(self.writers))
        if well:
            self.pool.commit(slots)
            for slot in slots:
                self.state[slot] = PUBLISHED
            self.use(slots)
        else:
            self.pool.abandon(slots)
            for slot in slots:
                self.set_free(slot)

    def expected_match(self, keys):
        slots = []
        for key in keys:
            slot = self.slot_of(key, PUBLISHED)
            if slot is None:
                break
            slots.append(slot)
        return slots

    @rule(at=some, skip=few)
    def match(self, at, skip):
        keys = KEYS[at:]
        assert self.pool.match(keys, skip) == self.expected_match(keys[skip:])

    @rule(at=some, count=few)
    def pin(self, at, count):
        slots = self.pool.match((KEYS + KEYS)[at : at + count])
        self.pool.pin(slots)
        for slot in slots:
            self.pins[slot] += 1
            if slot in self.order:
                self.order.remove(slot)
        self.readers.append(slots)

    @precondition(lambda self: self.readers)
    @rule(which=some, used=st.booleans())
    def unpin(self, which, used=True):
        slots = self.readers.pop(which % len(self.readers))
        self.pool.unpin(slots, used)
        idle = []
        for slot in slots:
            self.pins[slot] -= 1
            if not self.pins[slot]:
                if self.state[slot] == DOOMED:
                    self.set_free(slot)
                else:
                    idle.append(slot)
            elif used:
                self.use_pinned([slot])
        again = [slot for slot in idle if used or slot in self.used_by_others]
        self.use(again)
        self.order += [slot for slot in idle if slot not in again]
        self.order.sort(key=self.used_at.__getitem__)
        self.used_by_others.difference_update(idle)

    def use_pinned(self, slots):
        self.used_by_others.update(slot for slot in slots if self.state[slot] == PUBLISHED)

    @rule(which=some)
    def pin_what_cannot_be_found(self, which):
        slots = [slot for slot, state in enumerate(self.state) if state != PUBLISHED]
        if slots:
            with pytest.raises(KeyError):
                self.pool.pin([*self.order, slots[which % len(slots)]])

    @rule(at=some, count=few)
    def touch(self, at, count):
        keys = (KEYS + KEYS)[at : at + count]
        self.pool.touch(keys)
        slots = [slot for slot in (self.slot_of(key, PUBLISHED) for key in keys) if slot is not None]
        self.use([slot for slot in slots if not self.pins[slot]])
        self.use_pinned([slot for slot in slots if self.pins[slot]])

    def forget(self, slot):
        if self.pins[slot]:
            self.state[slot], self.key[slot] = DOOMED, None
            self.used_by_others.discard(slot)
        else:
            self.order.remove(slot)
            self.set_free(slot)

    @rule(which=some)
    def drop(self, which):
        slot = self.slot_of(KEYS[which], PUBLISHED)
        assert self.pool.drop([KEYS[which]]) == (slot is not None)
        if slot is not None:
            self.gone.append(KEYS[which])
            self.forget(slot)

    @rule(really=some)
    def clear(self, really):
        if really:  # one time in twelve: a pool that is always empty tests nothing
            return
        published = [slot for slot, state in enumerate(self.state) if state == PUBLISHED]
        assert self.pool.clear() == len(published)
        for slot in published:
            self.forget(slot)

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def every_slot_is_in_exactly_one_state(self):
        pool = self.pool
        held = [*pool._free, *pool._writing.values(), *pool._published.values(), *pool._doomed, *pool._lent]
        assert sorted(held) == list(range(pool.size))
        count = Counter(self.state)
        assert sorted(pool._free) == [slot for slot, state in enumerate(self.state) if state == FREE]
        assert pool._doomed == {slot for slot, state in enumerate(self.state) if state == DOOMED}
        assert (pool.free, pool.writing, pool.published) == (count[FREE], count[WRITING], count[PUBLISHED])
        assert pool.lent == count[LENT]
        assert self.told == self.gone

    @invariant()
    def exactly_the_published_blocks_are_found(self):
        pool = self.pool
        found = {key: slot for slot, key in enumerate(self.key) if self.state[slot] == PUBLISHED}
        assert pool._published == found
        assert pool._writing == {key: slot for slot, key in enumerate(self.key) if self.state[slot] == WRITING}
        assert [pool.key_of(slot) for slot in range(pool.size)] == self.key

    @invariant()
    def exactly_the_idle_published_slots_are_evictable_in_the_order_of_use(self):
        pool = self.pool
        assert list(pool._pins) == self.pins
        self.check_order(self.evictable())
        assert set(self.order) == {s for s, state in enumerate(self.state) if state == PUBLISHED and not self.pins[s]}
        assert pool.pinned == sum(pins > 0 for pins in self.pins)
        assert pool.available == pool.free + len(self.order)
        assert pool.evictions == self.evictions
        assert pool._hit_while_pinned == self.used_by_others

    def evictable(self):
        """The slots in the order in which the policy would evict them."""
        policy = deepcopy(self.pool._policy)
        slots = [policy.evict() for _ in range(len(policy))]
        assert not any(slot in policy for slot in slots)
        with pytest.raises(KeyError):
            policy.evict()
        return slots

    def check_order(self, slots):
        assert slots == self.order

    def teardown(self):
        """When every writer and reader is done, nothing is left pinned or half written."""
        if not hasattr(self, "pool"):
            return
        while self.writers:
            self.finish_writing(0, False)
        while self.readers:
            self.unpin(0)
        while self.borrowers:
            self.take_back(0)
        assert (self.pool.pinned, self.pool.writing, self.pool.lent) == (0, 0, 0)
        assert self.pool.free + self.pool.published == self.pool.available == self.pool.size


class AnyPolicyMachine(PoolMachine):
    """A policy decides the order, and the model follows: nothing else may depend on it. Time passes, turns end."""

    name = ""

    def make(self, size):
        self.now = 0.0
        return Pool(size, make_policy(self.name, size, lambda: self.now))

    def evict(self, count):
        gone = self.told[len(self.gone) :]
        assert len(gone) == max(0, count)
        for key in gone:
            victim = self.slot_of(key, PUBLISHED)
            assert victim in self.order
            self.gone.append(key)
            self.set_free(victim)
            self.order.remove(victim)
            self.evictions += 1

    def check_order(self, slots):
        assert sorted(slots) == sorted(self.order)
        assert all(slot in self.pool._policy for slot in self.order)

    @rule(seconds=st.sampled_from([0.0, 0.01, 3.0, 100.0, 1e4, 1e6]))
    def pass_time(self, seconds):
        self.now += seconds

    @rule(at=some, count=few, found=few, hints=turns)
    def end_turn(self, at, count, found, hints):
        keys = (KEYS + KEYS)[at : at + count]
        self.pool.end_turn(keys, hints._replace(found=found))
        slots = [slot for slot in (self.slot_of(key, PUBLISHED) for key in keys) if slot is not None]
        self.use_pinned([slot for slot in slots if self.pins[slot]])

    @rule(at=some, count=few)
    def serve(self, at, count):
        """A whole request: what is there is read, the rest is written, the turn ends."""
        keys = (KEYS + KEYS)[at : at + count]
        slots = self.pool.match(keys)
        self.pin(at, len(slots))
        self.unpin(len(self.readers) - 1)
        left = keys[len(slots) :]
        if not any(key in self.key for key in left):
            before = len(self.writers)
            self.allocate(at + len(slots), len(left))
            if len(self.writers) > before:
                self.finish_writing(len(self.writers) - 1, True)
        self.end_turn(at, count, len(slots), NO_HINTS)


class SharesMachine(AnyPolicyMachine):
    """Two tenants have shares. None loses a block within its share to another."""

    def make(self, size):
        self.now = 0.0
        self.owner = {}
        parts = {1: 0.4, 2: 0.3}
        self.quota = {tenant: int(part * size) for tenant, part in {0: 1 - sum(parts.values()), **parts}.items()}
        return Pool(size, Shares(size, parts, lambda slots: make_policy(self.name, slots, lambda: self.now)))

    def held(self, tenant):
        return [key for key in self.key if key is not None and self.owner.get(key, 0) == tenant]

    @rule(at=some, count=few, tenant=st.integers(0, 3))
    def allocate_for(self, at, count, tenant):
        keys = (KEYS + KEYS)[at : at + count]
        if any(key in self.key for key in keys):
            return
        tenant_of_all = tenant if tenant in self.quota else 0
        before = {other: self.held(other) for other in self.quota}
        slots = self.pool.reserve(keys, [tenant] * count)
        free = self.state.count(FREE)
        if slots is None:
            return
        gone = self.told[len(self.gone) :]
        for other in self.quota.keys() - {tenant_of_all}:
            lost = len(before[other]) - len([key for key in before[other] if key not in gone])
            assert lost <= max(0, len(before[other]) - self.quota[other]), "within its share"
        self.evict(count - free)
        for slot, key in zip(slots, keys, strict=True):
            self.state[slot], self.key[slot] = WRITING, key
            self.owner[key] = tenant_of_all
        self.writers.append(slots)

    @rule(at=some, count=few)
    def allocate(self, at, count):
        before = len(self.writers)
        super().allocate(at, count)
        for slots in self.writers[before:]:
            self.owner.update({self.key[slot]: 0 for slot in slots})

    @invariant()
    def every_slot_counts_for_its_tenant(self):
        policy = self.pool._policy
        for slot, key in enumerate(self.key):
            if key is not None:
                assert policy.tenants_of([slot]) == [self.owner.get(key, 0)]


class Everything:
    """A server that has every block, and says so at once."""

    def ask(self, keys, ranks, answers):
        for key in keys:
            answers.put((key, True))


class KeyedMachine(PoolMachine):
    @staticmethod
    def make(size):
        return ToyCatalog(size, Everything())

    @rule(at=some, count=few)
    def hear_of(self, at, count):
        """The blocks that the server has can be found as far as there are handles, but for those that were bad."""
        if not self.pool._may_ask:
            return
        keys = list(dict.fromkeys((KEYS + KEYS)[at : at + count]))
        found = [key for key in keys if key not in self.key and key not in self.pool._absent]
        found = found[: self.pool.available]
        self.pool.expect(keys)
        self.pool.expect(())  # takes in the answers
        self.evict(len(found) - self.state.count(FREE))
        slots = [self.pool.find(key) for key in found]
        for slot, key in zip(slots, found, strict=True):
            assert self.state[slot] == FREE
            self.state[slot], self.key[slot] = PUBLISHED, key
        self.use(slots)

    @invariant()
    def a_block_that_was_dropped_is_not_found_because_the_server_has_it(self):
        assert not self.pool._published.keys() & self.pool._absent


def examples(count):
    return settings(
        max_examples=count, stateful_step_count=200, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


class TestPool(PoolMachine.TestCase):
    settings = examples(100)


CASES = [(name, name.title(), AnyPolicyMachine) for name in POLICIES]
CASES += [(name, f"{name.title()}Shares", SharesMachine) for name in ("lru", "session")]
for name, title_of_case, base in CASES:
    machine = type(f"{title_of_case}Machine", (base,), {"name": name})
    for title, count, marks in (("", 30, []), ("AtLength", 500, [pytest.mark.long])):
        case = type(
            f"Test{title_of_case}{title}",
            (machine.TestCase,),
            {"settings": settings(examples(count), stateful_step_count=60)},
        )
        case.pytestmark = marks
        globals()[case.__name__] = case
del case, machine


@pytest.mark.long
class TestPoolAtLength(PoolMachine.TestCase):
    settings = examples(1000)


class TestKeyed(KeyedMachine.TestCase):
    settings = examples(50)


@pytest.mark.long
class TestKeyedAtLength(KeyedMachine.TestCase):
    settings = examples(500)
