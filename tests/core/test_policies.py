"""The order of eviction: a copy to another tier is no use, and a use is never forgotten."""

import pytest

from kvbm.core.manager import BlockManager
from kvbm.core.policy import LRU, POLICIES, make_policy
from kvbm.core.policy import lru as lru_module
from kvbm.core.pool import Pool
from tiernames import DISK, HOST


def keys(text):
    return [letter.encode() for letter in text]


def order(policy):
    return [policy.evict() for _ in range(len(policy))]


@pytest.fixture(params=[1, 64], ids=["in arrays", "slot by slot"])
def ring(request, monkeypatch):
    """Six slots, each used after the one before it."""
    monkeypatch.setattr(lru_module, "_MIN_BATCH", request.param)
    ring = LRU(6)
    for slot in range(6):
        ring.inserted([slot], [bytes([slot])])
    return ring


@pytest.mark.parametrize("pinned", [[2], [0], [5], [1, 4], [4, 1], [0, 1, 2, 3, 4, 5], [3, 2]])
def test_slots_released_without_a_use_return_to_their_old_places(ring, pinned):
    ring.pinned(pinned)
    ring.released(pinned, used=False)
    assert order(ring) == [0, 1, 2, 3, 4, 5]


def test_slots_of_one_prefix_return_to_their_old_places_among_each_other(ring):
    ring.hit([5, 4, 3, 2, 1, 0])  # the end of the prefix goes first
    ring.pinned([5, 3])
    ring.released([5], used=False)
    ring.released([3], used=False)
    assert order(ring) == [5, 4, 3, 2, 1, 0]


def test_slots_released_after_a_use_go_last(ring):
    ring.pinned([2, 1])
    ring.released([2, 1], used=True)
    assert order(ring) == [0, 3, 4, 5, 2, 1]


def test_uses_of_other_slots_meanwhile_leave_a_released_slot_older_than_them(ring):
    ring.pinned([3])
    ring.hit([0, 1])
    ring.released([3], used=False)
    assert order(ring) == [2, 3, 4, 5, 0, 1]


def test_a_release_looks_at_a_bounded_number_of_slots(ring, monkeypatch):
    monkeypatch.setattr(lru_module, "_MAX_WALK", 2)
    ring.pinned([0])
    ring.released([0], used=False)
    assert order(ring) == [1, 2, 3, 0, 4, 5]


def evicted(pool, count):
    """The blocks that go first, in order."""
    gone = []
    for _ in range(count):
        before = set(pool.findable)
        pool.lend(1)
        gone += before - set(pool.findable)
    return b"".join(gone).decode()


@pytest.fixture
def manager():
    manager = BlockManager({HOST: Pool(4), DISK: Pool(8)})
    for key in keys("abcd"):
        plan = manager.store([key], [0])
        manager.finish_store(plan.id, ok=True)
    return manager


def test_a_finished_move_does_not_make_blocks_recently_used(manager):
    plan = manager.move(keys("ab"), DISK)
    manager.finish_move(plan.id)
    assert evicted(manager.near, 4) == "abcd"


def test_a_failed_move_does_not_make_blocks_recently_used(manager):
    plan = manager.move(keys("ab"), DISK)
    manager.finish_move(plan.id, bad=[0, 1])
    assert evicted(manager.near, 4) == "abcd"


def test_a_block_that_is_touched_while_it_moves_counts_as_used(manager):
    plan = manager.move(keys("ab"), DISK)
    manager.touch(keys("a"))
    manager.finish_move(plan.id)
    assert evicted(manager.near, 4) == "bcda"


def test_a_block_that_a_load_has_read_while_it_moves_counts_as_used(manager):
    move = manager.move(keys("ab"), DISK)
    load = manager.load(manager.lookup(keys("a")), "r", [0], in_step=False, after=[])
    manager.finish_load(load.id)
    manager.finish_move(move.id)
    assert evicted(manager.near, 4) == "bcda"


def test_a_use_while_pinned_counts_for_the_block_and_not_for_the_next_one_in_its_slot(manager):
    move = manager.move(keys("a"), DISK)
    manager.touch(keys("a"))
    manager.near.drop(keys("a"))
    manager.finish_move(move.id)
    plan = manager.store(keys("e"), [0])
    manager.finish_store(plan.id, ok=True)
    manager.touch(keys("bcd"))
    plan = manager.move(keys("e"), DISK)
    manager.finish_move(plan.id)
    assert evicted(manager.near, 1) == "e"


def test_a_policy_is_made_by_its_name():
    policy = make_policy("lru", 3, float)
    assert isinstance(policy, LRU)
    policy.inserted([2], [b"a"])
    assert order(policy) == [2]


def test_an_unknown_policy_is_refused_with_the_names_that_are_known():
    with pytest.raises(ValueError, match="eviction policy 'fifo': expected one of arc, lru, s3fifo, session"):
        make_policy("fifo", 3, float)


def test_an_error_inside_a_policy_is_not_mistaken_for_an_unknown_name(monkeypatch):
    def broken(slots, clock):
        raise KeyError(slots)

    monkeypatch.setitem(POLICIES, "broken", broken)
    with pytest.raises(KeyError):
        make_policy("broken", 3, float)
