"""The tiers in order: what is brought back from where, what is kept, what a plan holds and when it lets go."""

import pytest

from kvbm.core.manager import BlockManager
from kvbm.core.match import Run
from kvbm.core.pool import Pool
from tiernames import DISK, HOST, OBJECT, Gone


def keys(text):
    return [letter.encode() for letter in text]


def tiers(host="", disk="", size=16):
    """A manager whose two tiers hold one published block a letter."""
    manager = BlockManager({HOST: Pool(size), DISK: Pool(size)})
    for tier, letters in ((HOST, host), (DISK, disk)):
        pool = manager.catalogs[tier]
        for key in keys(letters):
            pool.commit(pool.reserve([key]))
    return manager


def where(match):
    """A match as text: 'hhd' is two blocks of the host, then one of the disk."""
    return "".join(run.tier[0] * len(run.slots) for run in match.runs)


def load(manager, text, request="r", after=()):
    match = manager.lookup(keys(text))
    return manager.load(match, request, list(range(match.blocks)), in_step=False, after=list(after))


def store(manager, text):
    return manager.store(keys(text), range(100, 100 + len(text)))


def kept(manager, letters, tier=HOST):
    return "".join(letter for letter in letters if letter.encode() in manager.catalogs[tier])


# -- lookup -----------------------------------------------------------------------------------------------------------


def test_a_manager_without_tiers_is_refused():
    with pytest.raises(ValueError, match="at least one tier"):
        BlockManager({})


def test_nothing_is_found_in_empty_tiers():
    match = tiers().lookup(keys("abc"))
    assert match.blocks == 0
    assert match.runs == []
    assert not match.pending


class Scattered(Pool):
    """Blocks in odd places take a read of their own."""

    is_remote = True

    def is_alone(self, place):
        return place % 2 == 1


def test_a_match_tells_blocks_that_take_a_read_of_their_own():
    far = Scattered(8)
    manager = BlockManager({HOST: Pool(8), OBJECT: far})
    places = far.reserve(keys("abcdef"))
    far.commit(places)
    in_order = [key for odd in (0, 1) for key, place in zip(keys("abcdef"), places, strict=True) if place % 2 == odd]
    match = manager.lookup(in_order)
    assert [(run.tier, len(run.slots), run.alone) for run in match.runs] == [(OBJECT, 3, False), (OBJECT, 3, True)]
    assert [(len(run.slots), run.alone) for run in match.cut(4).runs] == [(3, False), (1, True)]
    assert [(len(run.slots), run.alone) for run in match.beyond(4).runs] == [(2, True)]


def test_a_match_ends_at_the_first_block_no_tier_has():
    assert where(tiers(host="abd").lookup(keys("abcd"))) == "hh"
    assert where(tiers(host="bcd").lookup(keys("abcd"))) == ""


def test_a_match_may_alternate_between_tiers_block_by_block():
    manager = tiers(host="aceg", disk="bdfh")
    match = manager.lookup(keys("abcdefgh"))
    assert where(match) == "hdhdhdhd"
    assert [slot for run in match.runs for slot in run.slots] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert where(manager.lookup(keys("acbdhfx"))) == "hhdddd"


def test_every_block_comes_from_the_fastest_tier_that_has_it():
    # The disk holds the whole prefix; one block is missing in the host. The rest must not come from the disk for that.
    assert where(tiers(host="abdef", disk="abcdef").lookup(keys("abcdef"))) == "hhdhhh"
    assert where(tiers(host="f", disk="abcdef").lookup(keys("abcdef"))) == "dddddh"


def test_three_tiers_are_searched_in_order():
    manager = BlockManager({tier: Pool(4) for tier in (HOST, DISK, OBJECT)})
    for tier, letters in ((HOST, "a"), (DISK, "abd"), (OBJECT, "abcd")):
        manager.catalogs[tier].commit(manager.catalogs[tier].reserve(keys(letters)))
    assert where(manager.lookup(keys("abcde"))) == "hdod"


def test_a_lookup_may_begin_after_what_the_engine_has_and_end_before_the_last_block():
    manager = tiers(host="abcd", disk="ef")
    match = manager.lookup(keys("abcdef"), start=2, limit=5)
    assert match.start == 2
    assert match.runs == [Run(HOST, [2, 3]), Run(DISK, [0])]
    assert manager.lookup(keys("xxcd"), start=2).blocks == 2
    assert manager.lookup(keys("abc"), start=3).blocks == 0
    assert manager.lookup(keys("abc"), start=5).blocks == 0
    assert manager.lookup(keys("abc"), limit=99).blocks == 3
    assert manager.lookup(keys("abc"), limit=0).blocks == 0
    assert manager.lookup(keys("abc"), start=2, limit=1).blocks == 0


def test_a_lookup_tells_when_asking_again_soon_finds_more():
    manager = tiers(host="a")
    plan = store(manager, "bc")
    assert manager.lookup(keys("abc")).pending
    assert manager.lookup(keys("abc")).blocks == 1
    assert not manager.lookup(keys("abc"), limit=1).pending
    assert not manager.lookup(keys("axb")).pending
    manager.finish_store(plan.id, ok=True)
    assert manager.lookup(keys("abc")).blocks == 3
    assert not manager.lookup(keys("abc")).pending


def test_a_lookup_changes_nothing():
    manager = tiers(host="abc", size=3)
    manager.lookup(keys("abc"))
    store(manager, "x")
    assert kept(manager, "abc") == "bc"


@pytest.mark.parametrize(("blocks", "expected"), [(-1, ""), (0, ""), (1, "h"), (2, "hd"), (3, "hdd"), (9, "hddh")])
def test_a_match_can_be_cut(blocks, expected):
    match = tiers(host="ad", disk="bc").lookup(keys("abcd")).cut(blocks)
    assert where(match) == expected
    assert match.blocks == len(expected)


@pytest.mark.parametrize("blocks", range(6))
def test_what_is_cut_off_a_match_is_what_lies_beyond(blocks):
    match = tiers(host="ad", disk="bc").lookup(keys("xabcd"), 1)
    beyond = match.beyond(blocks)
    together = [*match.cut(blocks).runs, *beyond.runs]
    assert [(run.tier, slot) for run in together for slot in run.slots] == [
        (run.tier, slot) for run in match.runs for slot in run.slots
    ]
    assert beyond.start == 1 + min(blocks, 4)
    assert all(run.slots for run in beyond.runs)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize(("host", "disk"), [("abcd", ""), ("acd", "b"), ("ab", "cd"), ("", "abcd")])
def test_a_match_extended_by_the_block_after_it_is_the_longer_match(host, disk, start):
    manager = tiers(host=host, disk=disk)
    match = manager.lookup(keys("abcd"), start, 3)._replace(pending=True)
    (more,) = manager.lookup(keys("abcd"), 3, 4).runs
    assert match.extended(more, keys("abcd")) == manager.lookup(keys("abcd"), start)


def test_a_match_cut_short_is_not_waiting_for_anything():
    manager = tiers(host="ab")
    store(manager, "c")
    match = manager.lookup(keys("abc"))
    assert match.cut(2).pending
    assert not match.cut(1).pending


# -- loading ----------------------------------------------------------------------------------------------------------


def test_a_load_names_slots_and_engine_blocks_in_order():
    manager = tiers(host="ac", disk="bd")
    match = manager.lookup(keys("abcd"))
    plan = manager.load(match, "request", [50, 40, 30, 20], in_step=True, after=[7])
    assert [(copy.tier, copy.slots, copy.blocks) for copy in plan.copies] == [
        (HOST, [0], [50]),
        (DISK, [0], [40]),
        (HOST, [1], [30]),
        (DISK, [1], [20]),
    ]
    assert plan.blocks == [50, 40, 30, 20]
    assert (plan.request, plan.in_step, plan.after) == ("request", True, [7])


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_a_load_fills_exactly_as_many_blocks_as_were_matched(blocks):
    manager = tiers(host="ab")
    with pytest.raises(ValueError, match="2 matched blocks"):
        manager.load(manager.lookup(keys("ab")), "r", range(blocks), in_step=False, after=[])
    assert not manager.busy
    assert manager.catalogs[HOST].pinned == 0


def test_a_load_holds_its_slots_until_it_ends():
    manager = tiers(host="ab", size=2)
    plan = load(manager, "a")
    assert manager.busy
    assert manager.catalogs[HOST].pinned == 1
    store(manager, "xyz")
    assert kept(manager, "ab") == "a"
    assert store(manager, "z") is None
    assert manager.finish_load(plan.id) == 0
    assert manager.catalogs[HOST].pinned == 0
    assert kept(manager, "a") == "a"


def test_plans_have_ids_of_their_own():
    manager = tiers(host="ab")
    ids = [load(manager, "a").id, store(manager, "x").id, load(manager, "b").id, store(manager, "y").id]
    assert len(set(ids)) == 4


def test_a_load_plan_ends_once():
    manager = tiers(host="a")
    plan = load(manager, "a")
    manager.finish_load(plan.id)
    with pytest.raises(KeyError):
        manager.finish_load(plan.id)


def test_blocks_that_did_not_arrive_are_never_found_again():
    manager = tiers(host="ac", disk="bd")
    plan = load(manager, "abcd")
    manager.finish_load(plan.id, bad=[1, 2, 2])
    assert kept(manager, "abcd", HOST) == "ad"
    assert kept(manager, "abcd", DISK) == "d"
    assert where(manager.lookup(keys("abcd"))) == "h"
    assert all(pool.pinned == 0 for pool in manager.catalogs.values())


def test_a_block_that_failed_is_found_when_it_has_been_stored_again():
    manager = tiers(host="a")
    manager.finish_load(load(manager, "a").id, bad=[0])
    assert manager.lookup(keys("a")).blocks == 0
    manager.finish_store(store(manager, "a").id, ok=True)
    assert manager.lookup(keys("a")).blocks == 1


def test_a_block_that_failed_in_one_tier_may_still_be_good_in_another():
    manager = tiers(host="a", disk="a")
    manager.finish_load(load(manager, "a").id, bad=[0])
    assert where(manager.lookup(keys("a"))) == "d"


def test_two_loads_of_one_block_may_both_fail():
    manager = tiers(host="a", size=2)
    first, second = load(manager, "a"), load(manager, "a", request="s")
    manager.finish_load(first.id, bad=[0])
    assert manager.lookup(keys("a")).blocks == 0
    assert manager.catalogs[HOST].free == 1
    manager.finish_load(second.id, bad=[0])
    assert manager.catalogs[HOST].free == 2


def test_a_late_failure_does_not_reach_a_fresh_copy_of_the_block():
    manager = tiers(host="a", size=2)
    first, second = load(manager, "a"), load(manager, "a", request="s")
    manager.finish_load(first.id, bad=[0])
    manager.finish_store(store(manager, "a").id, ok=True)
    manager.finish_load(second.id, bad=[0])
    assert manager.lookup(keys("a")).runs == [Run(HOST, [1])]


def test_a_load_from_an_alternating_match_leaves_the_front_of_the_prefix_the_last_to_go():
    manager = tiers(host="abe", disk="cd", size=3)
    manager.finish_load(load(manager, "abcde").id)
    for letter, left in zip("xyz", ["ab", "a", ""], strict=True):
        store(manager, letter)
        assert kept(manager, "abe") == left


@pytest.mark.parametrize(
    "change", ["evicted", "evicted and replaced", "dropped", "dropped under a reader", "rewritten"]
)
def test_a_match_that_is_out_of_date_is_never_loaded(change):
    manager = tiers(host="ab", size=2)
    host = manager.catalogs[HOST]
    match = manager.lookup(keys("ab"))
    if change == "evicted":
        host.abandon(host.reserve(keys("x")))
    elif change == "evicted and replaced":
        host.commit(host.reserve(keys("x")))
    elif change == "dropped":
        host.drop([b"b"])
    elif change == "dropped under a reader":
        host.pin([1])
        host.drop([b"b"])
    else:
        host.drop([b"b"])
        host.reserve(keys("b"))
    pinned = host.pinned
    with pytest.raises(ValueError, match="out of date"):
        manager.load(match, "r", [0, 1], in_step=False, after=[])
    with pytest.raises(ValueError, match="out of date"):
        manager.hold(match)
    assert not manager.busy
    assert host.pinned == pinned


def test_a_match_is_good_while_other_blocks_come_and_go():
    manager = tiers(host="abc", size=4)
    prompt = keys("ab")
    match = manager.lookup(prompt)
    prompt.append(b"z")  # a request's keys grow
    manager.finish_store(store(manager, "x").id, ok=True)
    manager.catalogs[HOST].drop([b"c"])
    assert manager.load(match, "r", [0, 1], in_step=False, after=[]).copies[0].slots == [0, 1]


def test_a_match_that_is_held_stays_good_until_it_is_released():
    manager = tiers(host="ab", disk="c", size=2)
    match = manager.lookup(keys("abc"))
    manager.hold(match)
    assert store(manager, "xy") is None
    plan = manager.load(match, "r", [0, 1, 2], in_step=True, after=[])
    manager.release(match)
    assert store(manager, "xy") is None
    manager.finish_load(plan.id)
    assert all(pool.pinned == 0 for pool in manager.catalogs.values())


def test_holding_keeps_no_block_that_is_forgotten_meanwhile():
    manager = tiers(host="ab", size=2)
    match = manager.lookup(keys("ab"))
    manager.hold(match)
    manager.clear()
    with pytest.raises(ValueError, match="out of date"):
        manager.load(match, "r", [0, 1], in_step=True, after=[])
    manager.release(match)
    assert manager.catalogs[HOST].free == 2


def test_a_released_match_leaves_the_front_of_the_prefix_the_last_to_go():
    manager = tiers(host="abe", disk="cd", size=3)
    match = manager.lookup(keys("abcde"))
    manager.hold(match)
    manager.release(match)
    for letter, left in zip("xyz", ["ab", "a", ""], strict=True):
        store(manager, letter)
        assert kept(manager, "abe") == left


# -- keeping ----------------------------------------------------------------------------------------------------------


def test_a_store_is_found_when_it_has_ended_well():
    manager = tiers()
    plan = store(manager, "ab")
    assert plan.copy.tier is HOST
    assert plan.copy.blocks == [100, 101]
    assert manager.busy
    assert manager.lookup(keys("ab")).blocks == 0
    assert len(manager.finish_store(plan.id, ok=True)) == 2
    assert manager.lookup(keys("ab")).runs == [Run(HOST, plan.copy.slots)]
    assert not manager.busy


def test_a_prompt_that_is_there_already_is_not_gone_through_block_by_block(monkeypatch):
    """One that has just been brought back is offered whole: ten thousand blocks, while the next step waits."""
    manager = tiers(host="abcd")
    pool = manager.catalogs[HOST]
    monkeypatch.setattr(pool, "holds", lambda key: pytest.fail("asked for a single block"))
    assert store(manager, "abcd") is None
    assert store(manager, "") is None


def test_a_store_that_failed_leaves_nothing():
    manager = tiers()
    plan = store(manager, "ab")
    assert manager.finish_store(plan.id, ok=False) == []
    assert manager.lookup(keys("ab")).blocks == 0
    assert manager.catalogs[HOST].free == 16
    assert store(manager, "ab") is not None


def test_a_store_plan_ends_once():
    manager = tiers()
    plan = store(manager, "a")
    manager.finish_store(plan.id, ok=False)
    with pytest.raises(KeyError):
        manager.finish_store(plan.id, ok=True)
    assert manager.lookup(keys("a")).blocks == 0


def test_what_is_held_or_on_its_way_is_not_stored_again():
    manager = tiers(host="a")
    store(manager, "bc")
    plan = store(manager, "abcd")
    assert plan.copy.blocks == [103]
    assert store(manager, "abcd") is None


def test_what_only_a_slower_tier_holds_is_stored():
    manager = tiers(disk="ab")
    assert store(manager, "ab").copy.blocks == [100, 101]


def test_a_key_that_is_given_twice_is_stored_once():
    manager = tiers()
    plan = store(manager, "aba")
    assert plan.copy.blocks == [100, 101]


def test_keys_and_blocks_come_in_pairs():
    manager = tiers()
    with pytest.raises(ValueError, match="shorter"):
        manager.store(keys("abc"), [1, 2])
    assert not manager.catalogs[HOST].writing


def test_nothing_to_store_is_no_plan():
    assert tiers().store([], []) is None


def test_a_full_tier_stores_a_prefix_of_what_was_asked():
    manager = tiers(size=3)
    plan = store(manager, "abcde")
    assert plan.copy.blocks == [100, 101, 102]
    assert store(manager, "fg") is None
    manager.finish_store(plan.id, ok=True)
    assert kept(manager, "abcde") == "abc"


def test_a_store_evicts_strangers_first():
    manager = tiers(host="abxyz", size=5)
    manager.finish_store(store(manager, "abcde").id, ok=True)
    assert kept(manager, "abcdexyz") == "abcde"


def test_a_store_never_evicts_the_blocks_in_front_of_it():
    manager = tiers(host="abcd", size=4)
    assert store(manager, "abcdefgh") is None
    assert kept(manager, "abcd") == "abcd"
    manager = tiers(host="abcx", size=4)
    manager.finish_store(store(manager, "abcdefgh").id, ok=True)
    assert kept(manager, "abcdefghx") == "abcd"


def test_requests_with_a_common_front_are_stored_together_in_a_full_tier():
    manager = tiers(host="abxy", size=4)
    manager.finish_store(store(manager, "abcabd").id, ok=True)
    assert kept(manager, "abcdxy") == "abcd"


def test_a_store_may_evict_the_blocks_behind_it():
    # b is worth nothing without a.
    manager = tiers(host="b", size=1)
    manager.finish_store(store(manager, "ab").id, ok=True)
    assert kept(manager, "ab") == "a"
    manager = tiers(host="acx", size=3)
    manager.finish_store(store(manager, "abcd").id, ok=True)
    assert kept(manager, "abcdx") == "abc"


def test_blocks_in_front_that_are_being_read_or_written_take_no_room():
    manager = tiers(host="ax", size=3)
    load(manager, "a")
    plan = store(manager, "abc")
    assert plan.copy.blocks == [101, 102]
    manager.finish_store(plan.id, ok=True)
    assert kept(manager, "abcx") == "abc"


def test_last_blocks_of_a_stored_prefix_are_evicted_first():
    manager = tiers(size=3)
    manager.finish_store(store(manager, "abc").id, ok=True)
    for letter, left in zip("xyz", ["ab", "a", ""], strict=True):
        store(manager, letter)
        assert kept(manager, "abc") == left


# -- housekeeping -----------------------------------------------------------------------------------------------------


def test_touched_blocks_go_last_in_every_tier():
    manager = tiers(host="abc", disk="cab", size=3)
    manager.touch(keys("ab"))
    for pool in manager.catalogs.values():
        for letter, left in zip("xyz", ["ab", "a", ""], strict=True):
            pool.reserve(keys(letter))
            assert "".join(x for x in "abc" if x.encode() in pool) == left


def test_clearing_empties_every_tier():
    manager = tiers(host="ab", disk="bcd")
    assert manager.clear() == 5
    assert manager.lookup(keys("a")).blocks == manager.lookup(keys("b")).blocks == 0
    assert all(pool.free == pool.size for pool in manager.catalogs.values())


def test_plans_under_way_survive_clearing():
    manager = tiers(host="ab")
    reading, writing = load(manager, "ab"), store(manager, "xy")
    manager.clear()
    assert manager.finish_load(reading.id, bad=[1]) == 0
    assert len(manager.finish_store(writing.id, ok=True)) == 2
    host = manager.catalogs[HOST]
    assert (host.free, host.published, host.pinned, host.writing) == (14, 2, 0, 0)


# -- slower tiers -----------------------------------------------------------------------------------------------------


def test_what_comes_from_disk_stays_in_host_memory():
    manager = tiers(host="a", disk="bcd")
    plan = load(manager, "abcd")
    near, far = plan.copies
    assert (near.via, near.tags) == ([], [])
    assert len(set(far.via)) == 3
    assert far.tags == keys("bcd")
    assert manager.catalogs[HOST].writing == 3
    assert kept(manager, "abcd") == "a"
    assert manager.finish_load(plan.id) == 3
    assert kept(manager, "abcd") == "abcd"
    assert where(manager.lookup(keys("abcd"))) == "hhhh"
    assert kept(manager, "bcd", DISK) == "bcd"
    assert [manager.catalogs[HOST].find(key) for key in keys("bcd")] == far.via


def test_of_a_load_from_disk_only_what_arrived_stays():
    manager = tiers(disk="abcd")
    assert manager.finish_load(load(manager, "abcd").id, bad=[1], missed=[3]) == 2
    assert kept(manager, "abcd") == "ac"
    assert kept(manager, "abcd", DISK) == "acd"  # nothing is known against the one that was missed
    assert manager.catalogs[HOST].free == 14


def test_nothing_stays_of_a_load_that_is_not_to_be_kept():
    manager = tiers(disk="ab")
    assert manager.finish_load(load(manager, "ab").id, keep=False) == 0
    assert kept(manager, "ab") == ""
    assert manager.catalogs[HOST].free == 16


def test_a_load_larger_than_host_memory_passes_through_a_part_of_it():
    manager = BlockManager({HOST: Pool(4), DISK: Pool(16)}, staging_slots=3)
    for tier, letters in ((HOST, "xy"), (DISK, "abcdefgh")):
        manager.catalogs[tier].commit(manager.catalogs[tier].reserve(keys(letters)))
    plan = load(manager, "abcdefgh")
    (copy,) = plan.copies
    assert len(copy.via) == len(set(copy.via)) == 3
    assert manager.catalogs[HOST].lent == 3
    assert kept(manager, "xy") == "x"
    assert manager.finish_load(plan.id) == 0
    assert manager.catalogs[HOST].lent == 0
    assert manager.catalogs[HOST].free == 3
    assert kept(manager, "abcdefgh", DISK) == "abcdefgh"


def test_without_any_room_in_host_memory_a_load_from_disk_is_planned_to_miss():
    manager = tiers(host="a", disk="bc", size=2)
    writing = store(manager, "x")
    plan = load(manager, "abc")
    assert plan.copies[1].via == []
    assert manager.finish_load(plan.id, missed=[1, 2]) == 0
    manager.finish_store(writing.id, ok=True)
    assert not manager.busy
    assert (manager.catalogs[HOST].pinned, manager.catalogs[DISK].pinned) == (0, 0)


def test_many_requests_with_one_prefix_read_it_from_disk_once():
    manager = tiers(disk="abc")
    plan = load(manager, "abc")
    match = manager.lookup(keys("abc"))
    assert (match.blocks, match.pending) == (0, True)
    impatient = manager.lookup(keys("abc"), wait_for_writers=False)
    assert where(impatient) == "ddd"
    second = manager.load(impatient, "s", [7, 8, 9], in_step=False, after=[])
    assert set(second.copies[0].via).isdisjoint(plan.copies[0].via)
    assert manager.finish_load(second.id) == 0
    assert manager.finish_load(plan.id) == 3
    assert where(manager.lookup(keys("abc"))) == "hhh"


def test_a_tier_at_rest_is_not_looked_into():
    manager = tiers(host="ac", disk="bd")
    manager.suspended.add(DISK)
    assert where(manager.lookup(keys("abcd"))) == "h"
    assert manager.move(keys("ac"), DISK) is None
    manager.suspended.clear()
    assert where(manager.lookup(keys("abcd"))) == "hdhd"


def test_a_spill_copies_what_the_disk_has_not():
    manager = tiers(host="abc", disk="b")
    plan = manager.move(keys("abcax"), DISK)
    assert plan.tags == keys("ac")
    assert plan.slots == [manager.catalogs[HOST].find(key) for key in keys("ac")]
    assert manager.busy
    assert manager.move(keys("abc"), DISK) is None  # on its way
    assert kept(manager, "abc", DISK) == "b"
    assert manager.finish_move(plan.id) == keys("ac")
    assert kept(manager, "abc", DISK) == "abc"
    assert not manager.busy
    assert manager.catalogs[HOST].pinned == 0


def test_a_spill_keeps_its_source_from_being_evicted():
    manager = tiers(host="ab", size=2)
    plan = manager.move(keys("ab"), DISK)
    assert store(manager, "x") is None
    manager.finish_move(plan.id)
    assert store(manager, "x") is not None


def test_a_spill_that_failed_in_part_leaves_the_other_part():
    manager = tiers(host="abc")
    plan = manager.move(keys("abc"), DISK)
    assert manager.finish_move(plan.id, bad=[1]) == keys("ac")
    assert kept(manager, "abc", DISK) == "ac"
    assert manager.catalogs[DISK].free == 14


def test_a_block_that_turns_out_bad_while_it_is_spilled_is_not_kept_on_disk():
    manager = tiers(host="abc")
    plan, reading = manager.move(keys("abc"), DISK), load(manager, "abc")
    manager.finish_load(reading.id, bad=[1])
    assert manager.finish_move(plan.id) == keys("ac")
    assert kept(manager, "abc", DISK) == "ac"
    assert manager.catalogs[HOST].pinned == 0


def test_a_spill_evicts_from_the_disk_what_was_not_used_for_longest_and_says_so():
    manager = tiers(host="xyz", disk="abc", size=4)
    gone = []
    manager.catalogs[DISK].journal = Gone(gone.extend)
    manager.touch(keys("a"))
    manager.finish_move(manager.move(keys("xyz"), DISK).id)
    assert gone == keys("bc")
    assert kept(manager, "abcxyz", DISK) == "axyz"


def test_blocks_written_under_another_seal_have_other_tags():
    manager = tiers(host="ab", disk="c")
    manager.generation = b"!"
    assert manager.move(keys("ab"), DISK).tags == [b"a!", b"b!"]
    assert load(manager, "abc").copies[1].tags == [b"c!"]
