"""One tier's slots: who may find them, who may take them, who goes first."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbm.core.policy import LRU, lru
from kvbm.core.pool import Pool
from tiernames import Gone


def keys(text):
    return [letter.encode() for letter in text]


def filled(text, size=None):
    """A pool that holds one published block a letter, in the slots 0, 1, 2, ..."""
    pool = Pool(size or len(text))
    pool.commit(pool.reserve(keys(text)))
    return pool


def found(pool, letters):
    """Which of these letters can be found, each on its own."""
    return "".join(letter for letter in letters if pool.match(keys(letter)))


# -- finding ----------------------------------------------------------------------------------------------------------


def test_a_new_pool_is_all_free():
    pool = Pool(3)
    assert (pool.free, pool.writing, pool.published, pool.pinned, pool.available) == (3, 0, 0, 0, 3)
    assert pool.match(keys("a")) == []


@pytest.mark.parametrize("size", [0, -1])
def test_a_pool_without_slots_is_refused(size):
    with pytest.raises(ValueError, match="at least one slot"):
        Pool(size)


def test_a_block_is_not_found_while_it_is_written():
    pool = Pool(2)
    slots = pool.reserve(keys("ab"))
    assert pool.match(keys("ab")) == []
    assert b"a" not in pool
    assert pool.find(b"a") is None
    assert pool.holds(b"a")
    assert pool.is_writing(b"a")
    pool.commit(slots)
    assert pool.match(keys("ab")) == slots
    assert b"a" in pool
    assert pool.find(b"a") == slots[0]
    assert not pool.is_writing(b"a")


def test_a_match_ends_at_the_first_block_that_is_missing():
    pool = filled("abde")
    assert pool.match(keys("abcde")) == [0, 1]
    assert pool.match(keys("xab")) == []
    assert pool.match([]) == []


def test_a_match_may_begin_anywhere():
    pool = filled("abcd")
    assert pool.match(keys("abcd"), 2) == [2, 3]
    assert pool.match(keys("xxcd"), 2) == [2, 3]
    assert pool.match(keys("abcd"), 4) == []
    assert pool.match(keys("abcd"), 9) == []


@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 99])
@pytest.mark.parametrize("held", [0, 1, 15, 16, 17, 47, 48, 49, 100])
def test_a_match_of_any_length_is_exact(start, held):
    names = [str(i).encode() for i in range(200)]
    pool = Pool(200)
    pool.commit(pool.reserve(names[: start + held]))
    assert pool.match(names, start) == list(range(start, start + held))


def test_a_slot_knows_its_block():
    pool = Pool(2)
    (slot,) = pool.reserve(keys("a"))
    assert pool.key_of(slot) == b"a"
    pool.commit([slot])
    assert pool.key_of(slot) == b"a"
    pool.drop([b"a"])
    assert pool.key_of(slot) is None


# -- writing ----------------------------------------------------------------------------------------------------------


def test_allocation_is_all_or_nothing():
    pool = Pool(3)
    writing = pool.reserve(keys("a"))
    assert pool.reserve(keys("bcd")) is None
    assert (pool.free, pool.writing, pool.evictions) == (2, 1, 0)
    assert not pool.holds(b"b")
    pool.commit(writing)
    assert pool.reserve(keys("bcd")) is not None
    assert pool.evictions == 1


def test_allocation_that_cannot_succeed_evicts_nothing():
    pool = filled("abc")
    pool.pin([0])
    assert pool.reserve(keys("xyz")) is None
    assert found(pool, "abc") == "abc"
    assert pool.evictions == 0


def test_an_empty_allocation_is_no_allocation():
    pool = filled("ab")
    assert pool.reserve([]) == []
    assert found(pool, "ab") == "ab"


def test_no_slot_is_handed_out_twice():
    pool = Pool(4)
    assert sorted(pool.reserve(keys("ab")) + pool.reserve(keys("cd"))) == [0, 1, 2, 3]
    assert pool.reserve(keys("e")) is None


@pytest.mark.parametrize("wanted", ["xa", "xw", "xyx", "xyza"])
def test_a_block_is_never_written_twice_and_a_refusal_changes_nothing(wanted):
    # a is published, w is being written; three blocks can be had, and the last of them only by evicting a.
    pool = filled("a", size=4)
    pool.reserve(keys("w"))
    with pytest.raises(ValueError, match="already holds"):
        pool.reserve(keys(wanted))
    assert (pool.free, pool.writing, pool.published, pool.evictions) == (2, 1, 1, 0)
    assert found(pool, "a") == "a"


def test_abandoned_slots_are_free_and_never_found():
    pool = Pool(2)
    slots = pool.reserve(keys("ab"))
    pool.abandon(slots)
    assert (pool.free, pool.writing, pool.published) == (2, 0, 0)
    assert pool.match(keys("ab")) == []
    assert not pool.holds(b"a")
    assert pool.reserve(keys("ab")) is not None


@pytest.mark.parametrize("end", [Pool.commit, Pool.abandon])
def test_a_slot_that_is_not_being_written_can_be_neither_published_nor_abandoned(end):
    pool = filled("a", size=2)
    for slot in (0, 1):  # published, free
        with pytest.raises((KeyError, ValueError)):
            end(pool, [slot])
    assert (pool.free, pool.writing, pool.published, pool.pinned) == (1, 0, 1, 0)


# -- evicting ---------------------------------------------------------------------------------------------------------


def test_the_block_unused_for_longest_is_evicted_first():
    pool = Pool(3)
    for letter in "abc":
        pool.commit(pool.reserve(keys(letter)))
    pool.reserve(keys("x"))
    assert found(pool, "abc") == "bc"
    pool.reserve(keys("y"))
    assert found(pool, "abc") == "c"


def test_last_blocks_of_a_prefix_are_evicted_first():
    pool = filled("abcd")
    for letter, left in zip("wxyz", ["abc", "ab", "a", ""], strict=True):
        pool.reserve(keys(letter))
        assert found(pool, "abcd") == left


def test_reading_a_prefix_leaves_its_last_blocks_the_first_to_go():
    pool = filled("ab", size=4)
    pool.commit(pool.reserve(keys("cd")))
    slots = pool.match(keys("ab"))
    pool.pin(slots)
    pool.unpin(slots)
    for letter, left in zip("wxyz", ["abc", "ab", "a", ""], strict=True):
        pool.reserve(keys(letter))
        assert found(pool, "abcd") == left


def test_touching_a_prefix_makes_it_the_last_to_go():
    pool = filled("abcd")
    pool.touch(keys("xcdy"))
    for letter, left in zip("1234", ["acd", "cd", "c", ""], strict=True):
        pool.reserve(keys(letter))
        assert found(pool, "abcd") == left


def test_touching_finds_neither_pinned_nor_unwritten_blocks():
    pool = filled("ab", size=3)
    pool.reserve(keys("w"))
    pool.pin([0])
    pool.touch(keys("abw"))
    assert pool.available == 1
    pool.reserve(keys("x"))
    assert pool.reserve(keys("y")) is None
    assert found(pool, "ab") == "a"


def test_evictions_are_counted():
    pool = filled("abc")
    pool.reserve(keys("xy"))
    assert pool.evictions == 2


def test_only_idle_published_blocks_are_evictable():
    pool = filled("ab", size=4)
    pool.reserve(keys("w"))
    pool.pin([1])
    assert [letter for letter in "abwz" if pool.is_evictable(letter.encode())] == ["a"]


# -- reading ----------------------------------------------------------------------------------------------------------


def test_allocation_never_evicts_a_pinned_block():
    pool = filled("abcd")
    pool.pin([1, 2])
    assert pool.available == 2
    assert set(pool.reserve(keys("xy"))) == {0, 3}
    assert pool.reserve(keys("z")) is None
    assert found(pool, "abcd") == "bc"


def test_a_pinned_block_can_be_found_and_pinned_again():
    pool = filled("a")
    pool.pin([0])
    assert pool.match(keys("a")) == [0]
    pool.pin([0])
    pool.unpin([0])
    assert pool.reserve(keys("x")) is None
    pool.unpin([0])
    assert pool.reserve(keys("x")) == [0]


def test_two_readers_of_a_slot_count_as_one_pinned_slot():
    pool = filled("ab")
    pool.pin([0])
    pool.pin([0])
    assert (pool.pinned, pool.published) == (1, 2)


@pytest.mark.parametrize("slot", [0, 2])
def test_nobody_lets_go_of_what_he_does_not_hold(slot):
    pool = filled("ab", size=3)
    with pytest.raises(ValueError, match="is not pinned"):
        pool.unpin([slot])


@pytest.mark.parametrize("slots", [[0, 1, 2], [0, 0], [2, 0, 1]])
def test_letting_go_of_more_than_is_held_lets_go_of_nothing(slots):
    pool = filled("abc")
    pool.pin([0, 1])
    with pytest.raises(ValueError, match="is not pinned"):
        pool.unpin(slots)
    assert (pool.pinned, pool.available) == (2, 1)
    pool.unpin([0, 1])
    assert (pool.pinned, pool.available) == (0, 3)


def test_only_blocks_that_can_be_found_can_be_pinned_and_a_refusal_pins_nothing():
    pool = filled("abd", size=5)
    (writing,) = pool.reserve(keys("w"))
    pool.pin([2])
    pool.drop([b"d"])
    free = 4
    for slot in (writing, free, 2):
        with pytest.raises(KeyError):
            pool.pin([0, slot])
    assert pool.pinned == 1
    assert pool.available == 3
    pool.unpin([2])
    assert pool.pinned == 0


# -- forgetting -------------------------------------------------------------------------------------------------------


def test_a_dropped_block_is_gone_and_its_slot_free():
    pool = filled("ab")
    assert pool.drop([b"a"])
    assert found(pool, "ab") == "b"
    assert not pool.holds(b"a")
    assert (pool.free, pool.published) == (1, 1)
    assert not pool.drop([b"a"])


def test_many_dropped_blocks_are_told_of_in_one_go():
    """Whoever keeps an index of them takes a lock and wakes a thread for each call, while the engine waits."""
    pool = Pool(4)
    slots = pool.reserve([b"a", b"b", b"c", b"d"])
    pool.commit(slots[:3])
    pool.pin(slots[1:2])
    told, gone = [], []
    pool.on_change = lambda keys, findable: told.append((list(keys), findable))
    pool.journal = Gone(lambda keys: gone.append(list(keys)))
    assert pool.drop([b"a", b"b", b"x", b"d", b"a"]) == 2
    assert told == [([b"a", b"b"], False)]
    assert gone == [[b"a", b"b"]]
    assert list(pool.findable) == [b"c"]
    assert (pool.free, pool.pinned, pool.writing) == (1, 1, 1)
    assert pool.drop([b"x"]) == 0
    assert len(told) == len(gone) == 1


def test_a_block_dropped_under_its_reader_is_gone_at_once_and_its_slot_later():
    pool = filled("ab")
    pool.pin([0])
    pool.pin([0])
    assert pool.drop([b"a"])
    assert found(pool, "ab") == "b"
    assert (pool.free, pool.published, pool.pinned, pool.available) == (0, 1, 1, 1)
    pool.unpin([0])
    assert pool.free == 0
    pool.unpin([0])
    assert (pool.free, pool.pinned) == (1, 0)


def test_a_slot_let_go_of_twice_at_once_is_free_once():
    pool = filled("ab")
    pool.pin([0, 1])
    pool.pin([0, 0])
    pool.drop([b"a"])
    pool.unpin([0])
    assert pool.pinned == 2
    pool.unpin([0, 1, 0])
    assert (pool.free, pool.available, pool.pinned) == (1, 2, 0)
    assert sorted(pool.reserve(keys("xy"))) == [0, 1]


def test_a_block_dropped_under_its_reader_can_be_stored_elsewhere_meanwhile():
    pool = filled("a", size=2)
    pool.pin([0])
    pool.drop([b"a"])
    slots = pool.reserve(keys("a"))
    assert slots == [1]
    pool.commit(slots)
    pool.unpin([0])
    assert pool.match(keys("a")) == [1]
    assert pool.free == 1


def test_dropping_does_not_reach_a_block_that_is_being_written():
    pool = Pool(1)
    slots = pool.reserve(keys("a"))
    assert not pool.drop([b"a"])
    pool.commit(slots)
    assert found(pool, "a") == "a"


def test_clearing_forgets_every_published_block():
    pool = filled("abc", size=5)
    pool.pin([1])
    writing = pool.reserve(keys("w"))
    assert pool.clear() == 3
    assert found(pool, "abc") == ""
    assert (pool.free, pool.writing, pool.published, pool.pinned) == (3, 1, 0, 1)
    pool.unpin([1])
    assert pool.pinned == 0
    pool.commit(writing)
    assert found(pool, "w") == "w"
    assert pool.clear() == 1
    assert pool.free == 5


def test_clearing_is_not_evicting():
    pool = filled("abc")
    pool.clear()
    assert pool.evictions == 0


# -- the policy -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 3, 64], ids=lambda many: f"from {many} at once", scope="module")
def many(request):
    """From how many slots on they are treated all at once."""
    usual, lru._MIN_BATCH = lru._MIN_BATCH, request.param
    yield
    lru._MIN_BATCH = usual


@pytest.mark.usefixtures("many")
def test_lru_takes_in_the_order_of_last_use():
    ring = LRU(5)
    ring.hit([1, 2, 3, 0])
    ring.hit([1, 1])
    ring.pinned([2])
    assert len(ring) == 3
    assert 1 in ring
    assert [slot for slot in (2, 4, 5, -1) if slot in ring] == []
    assert [ring.evict() for _ in range(3)] == [3, 0, 1]
    assert len(ring) == 0


@pytest.mark.usefixtures("many")
def test_lru_has_nothing_to_give_but_what_it_was_given():
    ring = LRU(3)
    with pytest.raises(KeyError):
        ring.evict()
    with pytest.raises(KeyError):
        ring.pinned([1])
    ring.hit([])
    ring.pinned([])
    with pytest.raises(KeyError):
        ring.evict()
    ring.hit([1])
    ring.pinned([1])
    with pytest.raises(KeyError):
        ring.pinned([1])
    assert len(ring) == 0


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("gone", [[0, 4], [4, 0], [0, 0], [0, 1, 2, 4], [2, 1, 2]])
def test_what_cannot_be_removed_whole_is_not_removed_at_all(gone):
    ring = LRU(5)
    ring.hit([0, 1, 2, 3])
    with pytest.raises(KeyError):
        ring.pinned(gone)
    assert [ring.evict() for _ in range(4)] == [0, 1, 2, 3]


@pytest.mark.usefixtures("many")
@given(
    st.lists(
        st.one_of(
            st.lists(st.integers(0, 7), max_size=8),
            st.tuples(st.integers(0, 7), st.integers(1, 8), st.booleans()),
            st.just("take"),
        ),
        max_size=60,
    )
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lru_keeps_the_order_of_use_whatever_comes(history):
    ring, order = LRU(8), []
    for event in history:
        if isinstance(event, list):
            ring.hit(event)
            for slot in event:
                order = [*(s for s in order if s != slot), slot]
        elif isinstance(event, tuple):
            start, count, backwards = event
            gone = order[start : start + count][:: -1 if backwards else 1]
            ring.pinned(gone)
            order = [slot for slot in order if slot not in gone]
        elif order:
            assert ring.evict() == order.pop(0)
        assert len(ring) == len(order)
        assert [slot for slot in range(8) if slot in ring] == sorted(order)
    assert [ring.evict() for _ in range(len(ring))] == order


def test_a_pool_evicts_by_the_policy_it_is_given():
    class HighestSlot(LRU):
        def evict(self):
            slot = max(slot for slot in range(2) if slot in self)
            self.dropped([slot])
            return slot

    pool = Pool(2, HighestSlot(2))
    pool.commit(pool.reserve(keys("a")))
    pool.commit(pool.reserve(keys("b")))
    pool.reserve(keys("c"))
    assert found(pool, "ab") == "a"


# -- lending, adopting, telling ---------------------------------------------------------------------------------------


def test_what_is_lent_cannot_be_found_and_comes_back_free():
    pool = Pool(4)
    pool.commit(pool.reserve(keys("abc")))
    slots = pool.lend(3)
    assert len(set(slots)) == 3
    assert (pool.lent, pool.free, pool.published) == (3, 0, 1)
    assert found(pool, "abc") == "a"
    assert pool.lend(9) != []
    assert pool.lend(1) == []
    assert pool.reserve(keys("x")) is None
    pool.take_back(slots)
    assert (pool.lent, pool.free) == (1, 3)
    with pytest.raises(KeyError):
        pool.take_back(slots)


def test_an_adopted_pool_finds_its_blocks_where_they_lie_and_evicts_the_oldest_first():
    pool = Pool(4)
    assert pool.adopt([(b"a", 3), (b"b", 0), (b"c", 2)]) == 3
    assert [pool.find(key) for key in keys("abc")] == [3, 0, 2]
    assert pool.free == 1
    pool.commit(pool.reserve(keys("xy")))
    assert found(pool, "abcxy") == "bcxy"
    assert {pool.find(b"x"), pool.find(b"y")} == {1, 3}


def test_what_cannot_be_is_not_adopted():
    pool = Pool(3)
    assert pool.adopt([(b"a", 0), (b"b", 0), (b"a", 1), (b"c", 3), (b"d", -1), (b"e", 2)]) == 2
    assert found(pool, "abcde") == "ae"
    assert (pool.free, pool.available) == (1, 3)


def test_only_an_empty_pool_adopts():
    pool = Pool(2)
    pool.reserve(keys("a"))
    with pytest.raises(ValueError, match="holds nothing"):
        pool.adopt([(b"b", 1)])


def test_an_adoption_that_breaks_off_changes_nothing():
    def broken():
        yield b"a", 0
        raise OSError

    pool = Pool(2)
    with pytest.raises(OSError):
        pool.adopt(broken())
    assert (pool.free, pool.published) == (2, 0)


def test_whoever_keeps_a_list_hears_of_blocks_that_are_gone_one_by_one_but_not_of_all_at_once():
    pool, gone = Pool(3), []
    pool.journal = Gone(gone.extend)
    pool.commit(pool.reserve(keys("abc")))
    pool.drop([b"b"])
    assert gone == keys("b")
    pool.reserve(keys("xy"))
    assert gone == keys("bc")
    pool.lend(1)
    assert gone == keys("bca")
    pool.abandon([pool._writing[b"x"]])
    pool.commit(pool.reserve(keys("z")))
    pool.clear()
    assert gone == keys("bca")
