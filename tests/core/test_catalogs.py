"""What a catalog tells its journal, and how a lookup treats a tier that does not know yet."""

import pytest

from kvbm.core.catalog import PENDING
from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from tiernames import DISK, HOST, OBJECT


def keys(text):
    return [letter.encode() for letter in text]


# -- the journal ------------------------------------------------------------------------------------------------------


class Calls:
    """A journal that writes down what it is told."""

    def __init__(self):
        self.calls = []

    def put(self, pairs):
        self.calls.append(("put", dict(pairs)))

    def remove(self, gone):
        self.calls.append(("remove", list(gone)))

    def touch(self, used, is_prefix=False):
        self.calls.append(("touch", list(used), is_prefix))

    def clear(self):
        self.calls.append(("clear",))


@pytest.fixture
def journal():
    return Calls()


@pytest.fixture
def pool(journal):
    """Holds a, b and c in three slots; the journal has been told so and has forgotten it."""
    pool = Pool(3, journal=journal)
    pool.commit(pool.reserve(keys("abc")))
    journal.calls.clear()
    return pool


def test_blocks_are_journaled_with_their_slots_when_they_are_committed(journal):
    pool = Pool(3, journal=journal)
    slots = pool.reserve(keys("ab"))
    assert journal.calls == []
    pool.commit(slots)
    assert journal.calls == [("put", dict(zip(keys("ab"), slots, strict=True)))]


def test_blocks_that_were_not_written_are_not_journaled(pool, journal):
    pool.drop(keys("a"))
    journal.calls.clear()
    pool.abandon(pool.reserve(keys("x")))
    pool.commit([])
    assert journal.calls == []


def test_evicted_and_dropped_blocks_are_removed_from_the_journal(pool, journal):
    pool.reserve(keys("xy"))
    pool.drop(keys("an"))
    pool.drop(keys("n"))
    assert journal.calls == [("remove", keys("cb")), ("remove", keys("a"))]


def test_the_journal_keeps_the_blocks_of_a_catalog_that_is_cleared(pool, journal):
    assert pool.clear() == 3
    assert journal.calls == []


def test_a_discarded_journal_is_emptied_and_hears_no_more(pool, journal):
    pool.discard()
    assert journal.calls == [("clear",)]
    assert pool.journal is None
    pool.drop(keys("a"))
    pool.commit(pool.reserve(keys("x")))
    pool.discard()
    assert journal.calls == [("clear",)]


@pytest.mark.parametrize("discarded", [False, True])
def test_a_journal_is_closed_once_at_the_end_even_if_it_holds_nothing(discarded):
    closed = []

    class Empty(Calls):
        def __len__(self):
            return 0

        def close(self, timeout=None):
            closed.append(timeout)

    manager = BlockManager({HOST: Pool(3), DISK: Pool(3, journal=Empty())})
    assert manager.outlives_engine
    if discarded:
        manager.catalogs[DISK].discard()
    manager.close(7.0)
    manager.close(7.0)
    assert closed == [7.0]
    assert not manager.outlives_engine


def test_adopted_blocks_are_not_journaled_again(journal):
    pool = Pool(3, journal=journal)
    assert pool.adopt([(b"a", 1)]) == 1
    assert journal.calls == []


def test_blocks_that_were_staged_up_from_a_slower_tier_are_not_journaled_as_near_blocks(journal):
    """The next engine would find no checksum of them there."""
    manager = BlockManager({HOST: Pool(4, journal=journal), DISK: Pool(4)})
    disk = manager.catalogs[DISK]
    disk.commit(disk.reserve(keys("ab")))
    load = manager.load(manager.lookup(keys("ab")), "r", [0, 1], in_step=False, after=[])
    assert manager.finish_load(load.id) == 2
    assert set(manager.near.findable) == set(keys("ab"))
    assert journal.calls == []
    store = manager.store(keys("c"), [2])
    manager.finish_store(store.id, ok=True)
    assert [call[0] for call in journal.calls] == ["put"]


def test_a_journal_hears_of_uses_also_of_blocks_that_may_come(pool, journal):
    manager = BlockManager({HOST: pool})
    manager.touch(keys("xcb"), is_prefix=True)
    manager.touch(keys("x"))
    assert journal.calls == [("touch", keys("xcb"), True), ("touch", keys("x"), False)]


# -- a tier that does not know yet ------------------------------------------------------------------------------------


class Remote(Pool):
    """A tier that has to ask somewhere else before it knows of a block."""

    def __init__(self, size):
        super().__init__(size)
        self.unknown = set()
        self.expected = []

    def expect(self, keys, start=0, hint=None):
        self.expected.append(list(keys[start:]))

    def find(self, key):
        return PENDING if key in self.unknown else super().find(key)


@pytest.fixture
def manager():
    """Host memory holds a, the remote tier b and c, the slowest tier b, c and d."""
    manager = BlockManager({HOST: Pool(8), DISK: Remote(8), OBJECT: Pool(8)})
    for tier, text in ((HOST, "a"), (DISK, "bc"), (OBJECT, "bcd")):
        catalog = manager.catalogs[tier]
        catalog.commit(catalog.reserve(keys(text)))
    return manager


def found(match):
    return [run.tier for run in match.runs for _ in run.slots]


@pytest.mark.parametrize("wait_for_writers", [True, False])
def test_a_tier_is_asked_for_the_blocks_that_are_not_near_before_it_is_searched(manager, wait_for_writers):
    match = manager.lookup(keys("abcd"), wait_for_writers=wait_for_writers)
    assert found(match) == [HOST, DISK, DISK, OBJECT]
    assert not match.pending
    assert manager.catalogs[DISK].expected == [keys("bcd")]


def test_a_lookup_that_finds_everything_near_asks_no_slower_tier(manager):
    manager.lookup(keys("a"))
    assert manager.catalogs[DISK].expected == []


def test_a_lookup_that_waits_ends_at_a_block_that_a_tier_does_not_know_yet(manager):
    manager.catalogs[DISK].unknown.add(b"c")
    match = manager.lookup(keys("abcd"))
    assert found(match) == [HOST, DISK]
    assert match.pending
    manager.catalogs[DISK].unknown.clear()
    assert found(manager.lookup(keys("abcd"))) == [HOST, DISK, DISK, OBJECT]


def test_a_lookup_that_does_not_wait_takes_the_block_from_the_next_tier(manager):
    manager.catalogs[DISK].unknown.add(b"c")
    match = manager.lookup(keys("abcd"), wait_for_writers=False)
    assert found(match) == [HOST, DISK, OBJECT, OBJECT]
    assert not match.pending


def test_a_lookup_that_does_not_wait_still_says_that_more_may_be_found_soon(manager):
    manager.catalogs[DISK].unknown.update(keys("x"))
    match = manager.lookup(keys("abx"), wait_for_writers=False)
    assert found(match) == [HOST, DISK]
    assert match.pending


def test_a_block_on_its_way_to_a_remote_tier_is_not_waited_for(manager):
    remote, local = manager.catalogs[DISK], manager.catalogs[OBJECT]
    remote.is_remote = True
    writing = remote.reserve(keys("x"))
    assert not manager.lookup(keys("ax")).pending
    local.reserve(keys("x"))
    assert manager.lookup(keys("ax")).pending
    remote.abandon(writing)


def test_a_block_that_a_tier_does_not_know_yet_is_not_in_it(manager):
    """``in`` is true for a place and never for PENDING, which is a number as well."""
    remote = manager.catalogs[DISK]
    remote.unknown.add(b"x")
    assert b"x" not in remote
    assert b"b" in remote


def test_a_suspended_tier_is_not_asked(manager):
    manager.suspended.add(DISK)
    manager.catalogs[DISK].unknown.add(b"b")
    match = manager.lookup(keys("abcd"))
    assert found(match) == [HOST, OBJECT, OBJECT, OBJECT]
    assert manager.catalogs[DISK].expected == []
