"""Blocks in several tables: what a prefix needs of each group is found, loaded and kept, and nothing else."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from kvbm.core import keys as core_keys
from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from kvbm.engines.vllm.groups import STATE, Offer, SeveralGroups
from tiernames import DISK, HOST

BLOCK = 4
KEYS = [bytes([i]) * 32 for i in range(12)]


def in_group(key, group):
    (found,) = core_keys.in_group([key], group)
    return found


def needed(windows, start, end):
    """(group, block) of every token that the token behind ``end`` blocks sees, but for the first ``start`` blocks."""
    found = set()
    for group, window in enumerate(windows):
        now = end * BLOCK
        if window == STATE:
            found |= {(group, end - 1)} if end > start else set()
            continue
        seen = range(max(0, now - window + 1) if window else 0, now)
        found |= {(group, token // BLOCK) for token in seen if token // BLOCK >= start}
    return found


def manager_with(pieces, tier=HOST):
    manager = BlockManager({HOST: Pool(200), DISK: Pool(200)})
    pool = manager.catalogs[tier]
    slots = pool.reserve([in_group(KEYS[i], group) for group, i in pieces])
    if slots:
        pool.commit(slots)
    return manager


@pytest.mark.parametrize("seed", range(200))
def test_the_longest_prefix_is_found_of_which_all_groups_have_what_they_see(seed):
    source = random.Random(seed)
    windows = [source.choice((0, 1, 3, 4, 5, 9, 20, STATE, STATE)) for _ in range(source.randrange(1, 4))]
    everything = [(group, i) for group in range(len(windows)) for i in range(len(KEYS))]
    there = {piece for piece in everything if source.random() < source.choice((0.5, 0.9, 0.97))}
    manager, groups = manager_with(sorted(there)), SeveralGroups(windows, BLOCK)
    start, limit = source.randrange(4), source.randrange(4, len(KEYS) + 1)
    ends = [end for end in range(start, limit + 1) if needed(windows, start, end) <= there]
    found = groups.find(manager, KEYS, start, limit)
    assert (found.start, found.blocks) == (start, max(ends) - start)
    assert found.keys == KEYS[:limit]


@pytest.mark.parametrize("seed", range(50))
def test_what_vllm_has_made_room_for_is_loaded_to_the_right_places(seed):
    source = random.Random(seed)
    windows = [0, *(source.choice((1, 5, 9, 20, STATE)) for _ in range(2))]
    start, end = source.randrange(3), source.randrange(5, len(KEYS))
    numbers = iter(source.sample(range(1, 500), 100))
    wanted = needed(windows, start, end)
    # As vLLM's tables: a block for what is seen and for what is computed next, none for what a window has passed over.
    tables = [
        [next(numbers) if (group, i) in needed(windows, 0, end) or i >= end else 0 for i in range(len(KEYS))]
        for group in range(3)
    ]
    manager, groups = manager_with(sorted(wanted)), SeveralGroups(windows, BLOCK)
    found = groups.find(manager, KEYS, start, end)
    match, blocks = groups.place(manager, found, tables, end - start)
    slots = [slot for run in match.runs for slot in run.slots]
    pool = manager.catalogs[HOST]
    assert len(slots) == len(blocks) == len(wanted)
    for slot, block in zip(slots, blocks, strict=True):
        (group,) = (g for g in range(3) if block in tables[g])
        assert pool.key_of(slot) == in_group(KEYS[tables[group].index(block)], group)
    assert groups.moved(end) == len(needed(windows, 0, end))


def test_a_block_that_is_gone_when_vllm_has_made_room_is_missed():
    groups = SeveralGroups([0, 5], BLOCK)
    manager = manager_with(sorted(needed([0, 5], 0, 6)))
    found = groups.find(manager, KEYS, 0, 6)
    assert found.blocks == 6
    manager.catalogs[HOST].drop([in_group(KEYS[5], 1)])
    match, blocks = groups.place(manager, found, [list(range(1, 13)), [0] * 5 + [20, 21]], 6)
    assert match.blocks < len(blocks)
    with pytest.raises(ValueError, match="cannot fill"):
        manager.load(match, "r", blocks, False, [])


def move(manager, group, block):
    """To disk."""
    manager.catalogs[HOST].drop([in_group(KEYS[block], group)])
    disk = manager.catalogs[DISK]
    disk.commit(disk.reserve([in_group(KEYS[block], group)]))


def test_a_match_says_how_much_of_it_comes_from_which_tier():
    """What one block on disk costs is not what a prefix on disk would cost. But never less than there is."""
    groups, pieces = SeveralGroups([0, 5], BLOCK), sorted(needed([0, 5], 0, 10))  # eleven: ten and one of the window
    manager = manager_with(pieces)

    def shares():
        return [(run.tier, len(run.slots)) for run in groups.find(manager, KEYS, 0, 10).runs]

    assert shares() == [(HOST, 10)]
    move(manager, 1, 9)
    assert shares() == [(HOST, 9), (DISK, 1)]
    for i in range(5):
        move(manager, 0, i)
    assert shares() == [(HOST, 4), (DISK, 6)]
    for i in range(5, 10):
        move(manager, 0, i)
    assert shares() == [(DISK, 10)]
    manager.suspended.add(DISK)
    assert groups.find(manager, KEYS, 0, 10).blocks == 0


def test_what_somebody_else_is_bringing_up_from_disk_is_waited_for_and_read_once():
    groups = SeveralGroups([0, 5], BLOCK)
    manager = manager_with(sorted(needed([0, 5], 0, 10)))
    for group, block in ((0, 3), (1, 9)):
        move(manager, group, block)
        coming = manager.catalogs[HOST].reserve([in_group(KEYS[block], group)])
        found = groups.find(manager, KEYS, 0, 10)
        assert (found.blocks, found.pending, found.awaited) == (0, True, in_group(KEYS[block], group))
        assert groups.find(manager, KEYS, 0, 10, wait_for_writers=False).blocks == 10
        manager.catalogs[HOST].commit(coming)
    assert groups.find(manager, KEYS, 0, 10).awaited is None


def test_a_table_that_is_shorter_than_what_was_offered_is_no_table():
    """vLLM would take blocks for loaded that are in none."""
    groups = SeveralGroups([0, 5], BLOCK)
    manager = manager_with(sorted(needed([0, 5], 0, 6)))
    found = groups.find(manager, KEYS, 0, 6)
    for tables in ([[1, 2, 3, 4, 5], [0] * 5 + [20]], [[1, 2, 3, 4, 5, 6], [0] * 5]):
        with pytest.raises(ValueError, match="vLLM has 5 blocks in a table of which it should have 6"):
            groups.place(manager, found, tables, 6)


def test_what_is_just_being_written_is_worth_a_wait():
    groups = SeveralGroups([0, 5], BLOCK)
    pieces = sorted(needed([0, 5], 0, 3))
    manager = manager_with(pieces[:-1])
    assert not groups.find(manager, KEYS, 0, 3).pending
    group, i = pieces[-1]
    manager.catalogs[HOST].reserve([in_group(KEYS[i], group)])
    assert groups.find(manager, KEYS, 0, 3).pending


def test_blocks_that_vllm_has_let_go_of_are_not_kept():
    """Stores may come late: by then a block behind the window may be somebody else's."""
    groups = SeveralGroups([0, 5], BLOCK)
    tables = [[1, 2, 3, 4], [11, 12, 13, 14]]
    keys, blocks = groups.completed(KEYS, tables, 0, 4, computed=12)  # the next token sees tokens 8 to 12
    assert blocks == [1, 2, 3, 4, 13, 14]
    assert keys == [in_group(KEYS[i], g) for g, i in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3))]
    assert groups.completed(KEYS, [[1, 2, 3, 4], [0, 0, 0, 14]], 0, 4, computed=0)[1] == [1, 2, 3, 4, 14]


def test_of_states_only_those_are_kept_that_vllm_offers():
    """A table has states of tokens between boundaries too, and states that are a chunk old."""
    groups = SeveralGroups([STATE, 0], BLOCK)
    tables = [[0, 12, 13, 14], [1, 2, 3, 4]]
    offers = [Offer(0, 12, 2 * BLOCK), Offer(0, 14, 4 * BLOCK), Offer(0, 13, 2 * BLOCK + 1), Offer(1, 3, 3 * BLOCK)]
    keys, blocks = groups.completed(KEYS, tables, 0, 3, 0, offers)  # the fourth block has no key yet
    assert blocks == [1, 2, 3, 12]
    assert keys == [in_group(KEYS[i], g) for g, i in ((1, 0), (1, 1), (1, 2), (0, 1))]
    assert groups.completed(KEYS, tables, 0, 3, 0)[1] == [1, 2, 3]


def test_who_has_used_a_prefix_has_not_used_what_lies_behind_a_window():
    assert SeveralGroups([5, 0], BLOCK).used(KEYS, 3) == [
        in_group(KEYS[i], g) for g, i in ((0, 2), (1, 0), (1, 1), (1, 2))
    ]


@pytest.mark.parametrize(
    ("windows", "announced"), [((5, 0, 5), 1), ((0, 0), 0), ((5, 9), None), ((0, STATE), None), ((5, 0, STATE), None)]
)
def test_events_tell_of_a_group_that_stands_for_all(windows, announced):
    groups = SeveralGroups(windows, BLOCK)
    assert groups.announced == announced
    keys = [] if announced is None else [in_group(key, announced) for key in KEYS]
    assert list(groups.announced_keys(KEYS)) == keys


def test_no_two_groups_share_a_key():
    keys = {in_group(key, group) for key in KEYS for group in range(20)}
    assert len(keys) == 20 * len(KEYS)
    assert keys.isdisjoint(KEYS)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_many_keys_are_changed_as_one_is(count):
    keys = [bytes([i, i * 7 % 256]) * 16 for i in range(count)]
    assert core_keys.in_group(keys, 5) == [key[:-1] + bytes([key[-1] ^ 6]) for key in keys]
