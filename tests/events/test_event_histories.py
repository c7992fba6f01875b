"""Random histories of two tiers and two subscribers: whoever replays the events agrees with the pools.

One subscriber hears everything and is strict: nothing may be stored twice, nothing removed that it does not know. The
other goes away for a while now and then. It notices a gap in the numbers and asks for the batches it has missed; when
they are gone it forgets all it knows and has everything told again.
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from kvbm.core.pool import Pool
from kvbm.events import ledger as ledger_module
from kvbm.events.ledger import Ledger, Run, Stored
from tiernames import DISK, HOST

HISTORIES = 1000
SIZE = 2  # tokens in a block
REPLAY = 4  # batches that a publisher keeps


def prefix(chain, end):
    return tuple(chain[:end])


class World:
    """The blocks there are: a few chains of tokens that begin alike."""

    def __init__(self, rng):
        self.renamed = rng.random() < 0.3
        trunk = [rng.randrange(3) for _ in range(8)]
        self.chains = []
        for _ in range(4):
            cut = rng.randrange(9)
            self.chains.append(trunk[:cut] + [rng.randrange(3) + 10 * (len(self.chains) + 1) for _ in range(8 - cut)])
        self.described = {}  # name -> (parent, tokens)
        for chain in self.chains:
            for i in range(len(chain) // SIZE):
                parent = self.name(chain, i - 1) if i else None
                self.described[self.name(chain, i)] = (parent, chain[i * SIZE : (i + 1) * SIZE])

    def key(self, chain, i):
        return repr(prefix(chain, (i + 1) * SIZE)).encode()

    def name(self, chain, i):
        return b"name of " + self.key(chain, i) if self.renamed else self.key(chain, i)

    def name_of(self, key):
        return b"name of " + key if self.renamed else key

    def keys(self, chain):
        return [self.key(chain, i) for i in range(len(chain) // SIZE)]


class Subscriber:
    def __init__(self, world, strict):
        self.world, self.strict = world, strict
        self.views = {HOST: set(), DISK: set()}
        self.expected = 0

    def forget(self):
        for view in self.views.values():
            view.clear()

    def hear(self, number, events):
        assert number == self.expected
        self.expected += 1
        for event in events:
            if event == "cleared":
                self.forget()
                continue
            view = self.views[event.tier]
            if isinstance(event, Stored):
                parent = event.parent
                for i, name in enumerate(event.names):
                    assert self.world.described[name] == (parent, event.tokens[i * SIZE : (i + 1) * SIZE])
                    assert event.each is None or event.each[i] == name
                    assert name not in view or not self.strict
                    view.add(name)
                    parent = name
            else:
                assert event.names
                assert view.issuperset(event.names) or not self.strict
                view.difference_update(event.names)


class History:
    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.world = World(rng)
        self.pools = {HOST: Pool(rng.randint(1, 7)), DISK: Pool(rng.randint(1, 9))}
        self.undescribed = set()  # found again on disk after a restart, and not seen in a request since
        if rng.random() < 0.5:
            self.restart()
        self.ledger = Ledger(self.pools, SIZE)
        for book in self.ledger._books:
            book.max_pending = rng.choice([2, 8, 100])  # how much may pile up before the journal is cut
        self.writers = []  # (tier, slots)
        self.pins = []
        self.kept = deque(maxlen=REPLAY)
        self.number = 0
        self.loyal = Subscriber(self.world, strict=True)
        self.unsteady = Subscriber(self.world, strict=False)
        self.away = False

    def restart(self):
        disk = self.pools[DISK]
        keys = list(dict.fromkeys(self.rng.choices(self.world.keys(self.rng.choice(self.world.chains)), k=3)))
        self.undescribed = set(keys[: disk.adopt([(key, slot) for slot, key in enumerate(keys)])])

    # -- what may happen ----------------------------------------------------------------------------------------------

    def store(self):
        """A request computes blocks: those that host memory lacks are on their way, and all of them described."""
        chain = self.rng.choice(self.world.chains)
        keys = self.world.keys(chain)[: self.rng.randint(1, 4)]
        pool = self.pools[HOST]
        fresh = [key for key in keys if not pool.holds(key)][: pool.available]
        if fresh and (slots := pool.reserve(fresh)) is not None:
            self.writers.append((HOST, slots))
        self.describe(chain, keys)

    def describe(self, chain, keys):
        world = self.world
        for first, end in self.ledger.undescribed(keys, 0, len(keys)):
            assert 0 < end - first <= ledger_module.MAX_IN_RUN
            run_keys = tuple(keys[first:end])
            names = tuple(world.name(chain, i) for i in range(first, end)) if world.renamed else run_keys
            parent = world.name(chain, first - 1) if first else None
            tokens = chain[first * SIZE : end * SIZE]
            each = names if self.rng.random() < 0.5 else None
            self.ledger.describe(Run(run_keys, names, parent, tokens, each=each))
        self.undescribed.difference_update(keys)

    def finish(self):
        if self.writers:
            tier, slots = self.writers.pop(self.rng.randrange(len(self.writers)))
            kept = slots if self.rng.random() < 0.8 else []
            self.pools[tier].commit(kept)
            if not kept:
                self.pools[tier].abandon(slots)

    def spill(self):
        host, disk = self.pools[HOST], self.pools[DISK]
        keys = [key for key in host.findable if not disk.holds(key)][: min(3, disk.available)]
        if keys and (slots := disk.reserve(keys)) is not None:
            self.writers.append((DISK, slots))

    def drop(self):
        pool = self.pools[self.rng.choice(list(self.pools))]
        if pool.findable:
            pool.drop([self.rng.choice(sorted(pool.findable))])

    def pin(self):
        pool = self.pools[self.rng.choice(list(self.pools))]
        if pool.findable and len(self.pins) < 3:
            slot = pool.find(self.rng.choice(sorted(pool.findable)))
            pool.pin([slot])
            self.pins.append((pool, slot))

    def unpin(self):
        if self.pins:
            pool, slot = self.pins.pop()
            pool.unpin([slot])

    def lend(self):
        """Slots that pass for a moment to something nobody shall find."""
        pool = self.pools[HOST]
        pool.take_back(pool.lend(2))

    def clear(self):
        self.pools[self.rng.choice(list(self.pools))].clear()

    def publish(self, events):
        if not events:
            return
        batch = (self.number, events)
        self.number += 1
        self.kept.append(batch)
        self.loyal.hear(*batch)
        if not self.away:
            self.unsteady.hear(*batch)

    def take(self):
        self.publish(self.ledger.take())

    def engine_reset(self):
        """The engine tells all subscribers to forget everything, of whatever tier."""
        self.ledger.subscribers_forgot()
        self.publish(["cleared", *self.ledger.take()])

    def go_away(self):
        self.away = True

    def come_back(self):
        if not self.away:
            return
        self.away = False
        missed = [batch for batch in self.kept if batch[0] >= self.unsteady.expected]
        if not missed and self.unsteady.expected == self.number:
            return
        if missed and missed[0][0] == self.unsteady.expected:
            for batch in missed:
                self.unsteady.hear(*batch)
        else:
            self.unsteady.forget()
            self.unsteady.expected = self.number
            self.ledger.tell_again()

    # -- what must hold -----------------------------------------------------------------------------------------------

    def settle(self):
        while self.ledger.owed:
            self.take()

    def check(self):
        for tier, pool in self.pools.items():
            held = {self.world.name_of(key) for key in pool.findable}
            unknown = {self.world.name_of(key) for key in self.undescribed}
            assert self.loyal.views[tier] <= held, "a subscriber believes in a block that is gone"
            assert held - self.loyal.views[tier] <= unknown, "a subscriber does not know of a block"
            if not self.away:
                assert self.unsteady.views[tier] == self.loyal.views[tier]
        there = {key for pool in self.pools.values() for key in (*pool.findable, *pool.arriving)}
        assert there.issuperset(self.ledger._runs), "a description was left behind"
        assert there.issuperset(self.ledger._names)

    def run(self):
        usual = [self.store, self.finish, self.store, self.finish, self.spill, self.take]
        seldom = [
            self.drop,
            self.pin,
            self.unpin,
            self.lend,
            self.clear,
            self.engine_reset,
            self.go_away,
            self.come_back,
        ]
        for _ in range(self.rng.randint(20, 80)):
            self.rng.choice(usual if self.rng.random() < 0.8 else seldom)()
            if self.rng.random() < 0.1:
                self.settle()
                self.check()
        while self.writers:
            self.finish()
        self.come_back()
        self.settle()
        self.check()
        for chain in self.world.chains:
            self.describe(chain, self.world.keys(chain))
        self.settle()
        self.check()
        for tier, pool in self.pools.items():
            assert self.loyal.views[tier] == {self.world.name_of(key) for key in pool.findable}
        self.withdraw()

    def withdraw(self):
        self.ledger.withdraw()
        self.settle()
        assert not any(self.loyal.views.values())
        assert not any(self.unsteady.views.values())


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch):
    monkeypatch.setattr(ledger_module, "MAX_AT_ONCE", 5)
    monkeypatch.setattr(ledger_module, "MAX_IN_RUN", 3)


@pytest.mark.parametrize("part", range(10))
def test_whoever_replays_the_events_agrees_with_the_pools(part):
    for seed in range(part, HISTORIES, 10):
        history = History(seed)
        try:
            history.run()
        except AssertionError as error:
            raise AssertionError(f"history {seed}: {error}") from error


def test_what_is_not_taken_does_not_pile_up():
    """Nobody takes anything for a long time: what is kept stays within what the pools can hold."""
    pool = Pool(8)
    ledger = Ledger({HOST: pool}, SIZE)
    for i in range(5000):
        keys = (b"%d" % i,)
        slots = pool.reserve(keys)
        ledger.describe(Run(keys, keys, None, [0] * SIZE))
        pool.commit(slots)
    (book,) = ledger._books
    assert book.pending <= book.max_pending
    assert sum(len(keys) for _, keys in book.journal) == book.pending
    assert len(ledger._runs) <= book.max_pending
    view = set()
    while ledger.owed:
        for event in ledger.take():
            if isinstance(event, Stored):
                assert view.isdisjoint(event.names)
                view.update(event.names)
            else:
                assert view.issuperset(event.names)
                view.difference_update(event.names)
    assert view == set(pool.findable)
    assert len(ledger._runs) == 8


def test_descriptions_go_with_the_blocks():
    """Nothing is kept of a block that no tier has, stored or not."""
    pool = Pool(4)
    ledger = Ledger({HOST: pool}, SIZE)
    slots = pool.reserve([b"a", b"b"])
    ledger.describe(Run((b"a", b"b"), (b"A", b"B"), None, [0] * 2 * SIZE))
    pool.abandon(slots)
    assert ledger.take() == []
    assert not ledger._runs
    assert not ledger._names
    keys = (b"c",)
    slots = pool.reserve(keys)
    ledger.describe(Run(keys, keys, None, [0] * SIZE))
    pool.commit(slots)
    assert len(ledger.take()) == 1
    pool.clear()
    assert [event.names for event in ledger.take()] == [[b"c"]]
    assert not ledger._runs
