"""From host memory to disk: what is taken, what is passed over, and what the next engine will find."""

import pytest

from kvbm.core.cost import CostModel
from kvbm.core.manager import BlockManager
from kvbm.core.policy.admission import FrequencyFilter
from kvbm.core.pool import Pool
from kvbm.plans import LoadResult, MoveResult, Report, StoreResult
from kvbm.runtime.leader import Leader
from kvbm.tiers.base import Route
from tiernames import DISK, HOST, OBJECT, PRIORS


def keys(text):
    return [letter.encode() for letter in text]


class Book:
    def __init__(self):
        self.rows, self.touched = {}, []

    def put(self, pairs):
        self.rows.update(pairs)

    def remove(self, gone):
        for key in gone:
            self.rows.pop(key, None)

    def touch(self, used, is_prefix=False):
        self.touched = used, is_prefix

    def clear(self):
        self.rows.clear()


def make(ranks=2, host=16, disk=16, filtered=False, most=100):
    manager = BlockManager({HOST: Pool(host), DISK: Pool(disk)})
    leader = Leader(manager, ranks, block_bytes=[1000] * ranks, cost=CostModel(PRIORS))
    leader.add_edge(Route(DISK, None, FrequencyFilter(lambda: 0.0) if filtered else None, most))
    manager.catalogs[DISK].journal = Book()
    return leader


@pytest.fixture
def leader():
    return make()


def store(leader, text):
    plan = leader.offload(keys(text), range(len(text)))
    leader.apply([Report(rank, stores=[StoreResult(plan.id)]) for rank in range(leader.ranks)])


def move(leader):
    return next(iter(leader.plan_moves()), None)


def spilled(plan, *ranks, bad=(), seconds=0.0):
    return [Report(rank, moves=[MoveResult(plan.id, list(bad), seconds)]) for rank in ranks]


def on_disk(leader, text):
    return "".join(letter for letter in text if letter.encode() in leader.manager.catalogs[DISK])


def index(leader):
    return leader.manager.catalogs[DISK].journal.rows


def test_without_a_filter_what_has_come_to_host_memory_goes_on_to_disk(leader):
    store(leader, "abc")
    plan = move(leader)
    assert plan.tags == keys("abc")
    assert move(leader) is None
    leader.apply(spilled(plan, 0))
    assert on_disk(leader, "abc") == ""
    assert index(leader) == {}
    leader.apply(spilled(plan, 1))
    assert on_disk(leader, "abc") == "abc"
    assert index(leader) == dict(zip(keys("abc"), plan.targets, strict=True))
    assert sum(leader.counts.moved_blocks.values()) == 3
    assert not leader.busy


def test_with_a_filter_only_what_is_found_again_goes_to_disk():
    leader = make(filtered=True)
    store(leader, "abc")
    assert move(leader) is None
    leader.used(keys("ab"))
    plan = move(leader)
    assert plan.tags == keys("ab")
    leader.apply(spilled(plan, 0, 1))
    leader.used(keys("abc"))
    assert move(leader).tags == keys("c")


def test_a_block_that_one_rank_could_not_write_is_not_on_disk(leader):
    store(leader, "abc")
    plan = move(leader)
    leader.apply(spilled(plan, 0) + spilled(plan, 1, bad=[1]))
    assert on_disk(leader, "abc") == "ac"
    assert set(index(leader)) == set(keys("ac"))
    assert (sum(leader.counts.moved_blocks.values()), sum(leader.counts.failed_move_blocks.values())) == (2, 1)


def test_what_is_evicted_from_the_disk_leaves_the_index():
    leader = make(disk=2)
    for text in ("ab", "c"):
        store(leader, text)
        leader.apply(spilled(move(leader), 0, 1))
    assert on_disk(leader, "abc") == "ac"
    assert set(index(leader)) == set(keys("ac"))


def test_a_block_that_cannot_be_read_leaves_disk_and_index(leader):
    store(leader, "ab")
    leader.apply(spilled(move(leader), 0, 1))
    leader.manager.catalogs[HOST].clear()
    plan = leader.onboard(leader.manager.lookup(keys("ab")), "r", [0, 1], in_step=False)
    leader.apply([Report(rank, loads=[LoadResult(plan.id, [0])]) for rank in (0, 1)])
    assert on_disk(leader, "ab") == "b"
    assert set(index(leader)) == set(keys("b"))
    assert leader.counts.onboarded_blocks == {DISK: 1}
    assert leader.counts.promoted_blocks == 1


def test_only_so_much_is_under_way_and_as_much_again_waits():
    leader = make(most=3)
    store(leader, "abcde")
    assert sum(leader.counts.refused_move_blocks.values()) == 2
    first = move(leader)
    assert first.tags == keys("abc")
    store(leader, "fghi")
    assert move(leader) is None
    assert sum(leader.counts.refused_move_blocks.values()) == 3
    leader.apply(spilled(first, 0, 1))
    assert move(leader).tags == keys("fgh")
    leader.used(keys("de"))  # passed over once, found again
    assert leader.edges[0]._waiting == dict.fromkeys(keys("de"))


def test_prompts_that_come_at_once_wait_for_their_turn():
    """Six of 28 blocks, confirmed in one step, and a host tier of which half holds fewer than all of them."""
    leader = make(host=300, disk=300, most=1024)
    prompts = [[bytes([number, i]) for i in range(28)] for number in range(6)]
    for prompt in prompts:
        plan = leader.offload(prompt, range(28))
        leader.apply([Report(rank, stores=[StoreResult(plan.id)]) for rank in (0, 1)])
    while (plan := move(leader)) is not None:
        assert len(plan.slots) <= 150
        leader.apply(spilled(plan, 0, 1))
    assert sum(leader.counts.refused_move_blocks.values()) == 0
    assert [sum(key in leader.manager.catalogs[DISK] for key in prompt) for prompt in prompts] == [28] * 6


def test_never_more_than_half_of_host_memory_waits_for_the_disk():
    leader = make(host=8)
    store(leader, "abcdef")
    assert len(move(leader).slots) == 4
    store(leader, "uvwxyz")
    assert move(leader) is None
    assert leader.manager.catalogs[HOST].pinned == 4


def test_a_block_that_left_host_memory_before_its_turn_is_skipped():
    leader = make(host=8)
    store(leader, "ab")
    for text in ("wxyz", "1234"):
        leader.edges[0]._waiting.clear()
        store(leader, text)
    leader.edges[0]._waiting = dict.fromkeys(keys("ab"))
    assert move(leader) is None
    assert sum(leader.counts.refused_move_blocks.values()) == 2
    assert not leader.busy
    leader.used(keys("abwx"))
    assert move(leader).tags == keys("wx")


def test_a_disk_that_owes_a_read_is_left_alone_until_it_has_answered(leader):
    store(leader, "abcd")
    leader.apply(spilled(move(leader), 0, 1))
    leader.manager.catalogs[HOST].clear()
    load = leader.onboard(leader.manager.lookup(keys("abcd")), "r", range(4), in_step=False)
    suspected = []
    leader.manager.catalogs[DISK].suspect = lambda: suspected.append(DISK)
    leader.apply(
        [Report(0, loads=[LoadResult(load.id, missed=[2, 3], late=[DISK])]), Report(1, loads=[LoadResult(load.id)])]
    )
    assert suspected == [DISK]  # at the first late answer, before the read has ended
    assert leader.counts.failed_load_blocks == leader.counts.missed_load_blocks == 2
    assert leader.counts.onboarded_blocks == {DISK: 2}
    store(leader, "xy")
    assert move(leader) is None
    assert leader.manager.lookup(keys("abcd"), wait_for_writers=False).blocks == 0
    assert leader.manager.catalogs[HOST].writing == 4  # the late read still writes there
    leader.apply([Report(0, loads=[LoadResult(load.id, bad=[3])])])
    assert leader.manager.catalogs[HOST].writing == 0
    assert [key in leader.manager.catalogs[HOST] for key in keys("abcd")] == [True, True, True, False]
    assert on_disk(leader, "abcd") == "abc"
    assert move(leader).tags == keys("xy")


def test_what_is_under_way_at_a_reset_is_not_kept_and_the_next_engine_finds_nothing(leader):
    store(leader, "ab")
    leader.apply(spilled(move(leader), 0, 1))
    book = leader.manager.catalogs[DISK].journal
    store(leader, "cd")
    plan = move(leader)
    leader.manager.catalogs[HOST].clear()
    load = leader.onboard(leader.manager.lookup(keys("ab")), "r", [0, 1], in_step=False)
    leader.reset()
    assert book.rows == {}
    leader.apply(spilled(plan, 0, 1))
    leader.apply([Report(rank, loads=[LoadResult(load.id)]) for rank in (0, 1)])
    assert on_disk(leader, "abcd") == ""
    assert leader.manager.lookup(keys("abcd")).blocks == 0
    store(leader, "ab")
    again = move(leader)
    assert again.tags != keys("ab")
    leader.apply(spilled(again, 0, 1))
    assert on_disk(leader, "ab") == "ab"
    assert book.rows == {}


def test_a_lost_rank_ends_spilling_and_leaves_the_index_to_the_next_engine(leader):
    store(leader, "ab")
    leader.apply(spilled(move(leader), 0, 1))
    store(leader, "cd")
    plan = move(leader)
    store(leader, "e")
    leader.fail_rank(1)
    leader.apply(spilled(plan, 0))
    assert not leader.busy
    assert move(leader) is None
    assert set(index(leader)) == set(keys("ab"))


def test_what_writing_took_is_counted(leader):
    store(leader, "ab")
    plan = move(leader)
    leader.apply(spilled(plan, 0, seconds=2.0) + spilled(plan, 1, seconds=0.5))
    assert leader.counts.stored_bytes == {DISK: 4000}
    assert leader.counts.stored_seconds == {DISK: 2.0}


def test_a_load_of_two_tiers_says_what_each_took(leader):
    store(leader, "ab")
    leader.apply(spilled(move(leader), 0, 1))
    leader.manager.catalogs[HOST].drop([b"b"])
    load = leader.onboard(leader.manager.lookup(keys("ab")), "r", [0, 1], in_step=False)
    took = [{HOST: 0.25, DISK: 4.0}, {HOST: 0.5, DISK: 1.0}]
    leader.apply([Report(rank, loads=[LoadResult(load.id, tier_seconds=took[rank])]) for rank in (0, 1)])
    assert leader.counts.loaded_seconds == {HOST: 0.5, DISK: 4.0}
    assert leader.counts.loaded_bytes == {HOST: 2000, DISK: 2000}


def test_a_load_that_was_given_up_shows_how_slow_the_disk_is(leader):
    store(leader, "ab")
    leader.apply(spilled(move(leader), 0, 1))
    leader.manager.catalogs[HOST].clear()
    before = leader._cost.rate(DISK)
    load = leader.onboard(leader.manager.lookup(keys("ab")), "r", [0, 1], in_step=False)
    missed = LoadResult(load.id, missed=[1], tier_seconds={DISK: 3.0})
    leader.apply([Report(0, loads=[missed]), Report(1, loads=[LoadResult(load.id)])])
    assert leader._cost.rate(DISK) != before
    assert leader.counts.loaded_seconds == {}


def test_the_next_engine_learns_what_was_used(leader):
    store(leader, "abc")
    leader.apply(spilled(move(leader), 0, 1))
    leader.touch(keys("axb"))  # the journal knows which of them it has
    assert leader.manager.catalogs[DISK].journal.touched == (keys("axb"), False)
    leader.touch(keys("ab"), is_prefix=True)
    assert leader.manager.catalogs[DISK].journal.touched == (keys("ab"), True)


def test_nothing_comes_to_stay_in_host_memory_once_a_rank_is_lost(leader):
    store(leader, "ab")
    leader.apply(spilled(move(leader), 0, 1))
    leader.manager.catalogs[HOST].clear()
    load = leader.onboard(leader.manager.lookup(keys("ab")), "r", [0, 1], in_step=False)
    leader.apply([Report(1, loads=[LoadResult(load.id)])])
    leader.fail_rank(1)
    leader.apply([Report(0, loads=[LoadResult(load.id)])])
    assert leader.manager.lookup(keys("ab")).blocks == 0
    assert not leader.busy


def test_what_the_filter_holds_back_is_counted():
    leader = make(filtered=True)
    store(leader, "abcd")
    assert sum(leader.counts.filtered_move_blocks.values()) == 4
    leader.edges[0].used(keys("ab"))
    assert sum(leader.counts.filtered_move_blocks.values()) == 4
    without = make()
    store(without, "abcd")
    assert sum(without.counts.filtered_move_blocks.values()) == 0


# -- several edges ----------------------------------------------------------------------------------------------------


def three_tiers(routes, near=16):
    manager = BlockManager({HOST: Pool(near), DISK: Pool(32), OBJECT: Pool(32)}, staging_slots=3)
    leader = Leader(manager, 2)
    for source, target in routes:
        leader.add_edge(Route(target, source, None, 100))
    return leader


def test_all_edges_together_hold_half_of_the_near_tier():
    leader = three_tiers([(HOST, DISK), (HOST, OBJECT)])
    store(leader, "abcdefghijkl")
    plans = leader.plan_moves()
    assert [(plan.target, len(plan.slots)) for plan in plans] == [(DISK, 4), (OBJECT, 4)]
    assert leader.manager.near.pinned <= 8
    assert leader.plan_moves() == []


def test_blocks_go_on_from_a_staged_tier_when_every_rank_has_written_them_there():
    leader = three_tiers([(HOST, DISK), (DISK, OBJECT)])
    store(leader, "abcd")
    (first,) = leader.plan_moves()
    leader.apply(spilled(first, 0, bad=[1]))
    assert leader.plan_moves() == []
    leader.apply(spilled(first, 1))
    (second,) = leader.plan_moves()
    assert (second.source, second.target) == (DISK, OBJECT)
    assert second.tags == keys("acd")
    assert len(set(second.via)) == 3
    near, disk = leader.manager.near, leader.manager.catalogs[DISK]
    assert (near.lent, disk.pinned) == (3, 3)
    leader.apply(spilled(second, 0, 1, bad=[2]))
    assert (near.lent, disk.pinned, near.pinned) == (0, 0, 0)
    assert set(leader.manager.catalogs[OBJECT].findable) == set(keys("ac"))


def test_a_staged_move_takes_no_more_blocks_than_there_are_staging_slots():
    leader = three_tiers([(DISK, OBJECT)], near=4)
    disk = leader.manager.catalogs[DISK]
    disk.commit(disk.reserve(keys("abcdef")))
    leader.used(keys("abcdef"))
    (plan,) = leader.plan_moves()
    assert (len(plan.slots), len(plan.via)) == (2, 2)  # half of the near tier
    leader.apply(spilled(plan, 0, 1))
    leader.reset()
    assert leader.plan_moves() == []
    assert not leader.busy


def test_blocks_of_a_staged_tier_wait_for_staging_slots():
    leader = three_tiers([(DISK, OBJECT)])
    disk = leader.manager.catalogs[DISK]
    disk.commit(disk.reserve(keys("abcdef")))
    leader.used(keys("abcdef"))
    moved = []
    for _ in range(2):
        (plan,) = leader.plan_moves()
        moved += plan.tags
        leader.apply(spilled(plan, 0, 1))
    assert moved == keys("abcdef")
    leader.used(keys("abcdef"))
    held = leader.manager.near.lend(16)
    disk.commit(disk.reserve(keys("g")))
    leader.used(keys("g"))
    assert leader.plan_moves() == []
    leader.manager.near.take_back(held)
    assert [plan.tags for plan in leader.plan_moves()] == [keys("g")]


def test_a_suspended_source_is_not_read_for_a_move():
    leader = three_tiers([(DISK, OBJECT)])
    disk = leader.manager.catalogs[DISK]
    disk.commit(disk.reserve(keys("ab")))
    leader.used(keys("ab"))
    leader.manager.suspended.add(DISK)
    assert leader.edges[0].plan() is None
    leader.manager.suspended.clear()
    assert leader.edges[0].plan() is not None
