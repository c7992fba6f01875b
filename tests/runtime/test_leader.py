"""The leader believes only what every rank has confirmed, and lets nothing wrong be found."""

import pytest

from kvbm.core.cost import CostModel
from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from kvbm.plans import LoadResult, Report, StoreResult
from kvbm.runtime.leader import Leader
from tiernames import DISK, HOST, PRIORS


def keys(text):
    return [letter.encode() for letter in text]


def make(ranks=2, host="", disk="", size=16, **options):
    """A leader over two tiers that hold one published block a letter."""
    manager = BlockManager({HOST: Pool(size), DISK: Pool(size)})
    for tier, letters in ((HOST, host), (DISK, disk)):
        pool = manager.catalogs[tier]
        pool.commit(pool.reserve(keys(letters)))
    return Leader(manager, ranks, **options)


def onboard(leader, text, blocks=None, in_step=True):
    match = leader.manager.lookup(keys(text))
    assert match.blocks == len(text)
    return leader.onboard(match, "r", blocks or range(len(text)), in_step)


def offload(leader, text, blocks=None):
    return leader.offload(keys(text), blocks or range(100, 100 + len(text)))


def loaded(plan, *ranks, bad=()):
    return [Report(rank, loads=[LoadResult(plan.id, list(bad))]) for rank in ranks]


def stored(plan, *ranks, ok=True):
    return [Report(rank, stores=[StoreResult(plan.id, ok)]) for rank in ranks]


def found(leader, letters):
    return "".join(letter for letter in letters if leader.manager.lookup(keys(letter)).blocks)


def quiet(leader):
    """Nothing under way, nothing held for a plan that is over."""
    pools = leader.manager.catalogs.values()
    held = [(pool.pinned, pool.writing) for pool in pools]
    return not leader.busy and not leader.manager.busy and held == [(0, 0)] * len(pools)


# -- storing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_block_is_found_only_after_every_rank_has_written_it(ranks):
    leader = make(ranks)
    plan = offload(leader, "ab")
    for rank in reversed(range(ranks)):
        assert found(leader, "ab") == ""
        assert leader.unconfirmed_store_blocks
        leader.apply(stored(plan, rank))
    assert found(leader, "ab") == "ab"
    assert leader.counts.offloaded_blocks == 2
    assert quiet(leader)


def test_one_rank_that_answers_twice_is_not_two_ranks():
    leader = make()
    plan = offload(leader, "a")
    leader.apply(stored(plan, 0) + stored(plan, 0))
    assert found(leader, "a") == ""
    leader.apply(stored(plan, 1))
    assert found(leader, "a") == "a"


def test_a_rank_nobody_knows_confirms_nothing():
    leader = make()
    plan = offload(leader, "a")
    leader.apply(stored(plan, 0, 2, 7, -1))
    assert found(leader, "a") == ""


@pytest.mark.parametrize("failing", [0, 1])
def test_a_store_that_failed_on_one_rank_is_never_found(failing):
    leader = make()
    plan = offload(leader, "ab")
    leader.apply(stored(plan, failing, ok=False))
    leader.apply(stored(plan, 1 - failing))
    assert found(leader, "ab") == ""
    assert leader.counts.failed_store_blocks == 2
    assert leader.counts.offloaded_blocks == 0
    assert quiet(leader)


def test_a_rank_that_takes_its_word_back_is_believed():
    leader = make()
    plan = offload(leader, "a")
    leader.apply(stored(plan, 0) + stored(plan, 0, ok=False))
    leader.apply(stored(plan, 1))
    assert found(leader, "a") == ""
    assert quiet(leader)


def test_what_is_kept_already_is_not_offloaded():
    leader = make(host="ab")
    assert offload(leader, "ab") is None
    assert not leader.busy


def test_under_pressure_a_block_is_not_kept_rather_than_queued():
    leader = make(max_pending_blocks=2)
    plan = offload(leader, "ab")
    assert offload(leader, "cde") is None
    assert leader.counts.refused_store_blocks == 3
    leader.apply(stored(plan, 0))
    assert offload(leader, "cde") is None
    leader.apply(stored(plan, 1))
    assert offload(leader, "cde") is not None


def test_a_failed_store_makes_room_for_the_next():
    leader = make(ranks=1, max_pending_blocks=1)
    leader.apply(stored(offload(leader, "a"), 0, ok=False))
    assert offload(leader, "a") is not None


# -- loading ----------------------------------------------------------------------------------------------------------


def test_a_load_holds_its_blocks_until_every_rank_has_them():
    leader = make(host="ab", size=2)
    plan = onboard(leader, "ab")
    leader.apply(loaded(plan, 1))
    assert offload(leader, "xy") is None
    assert leader.busy
    leader.apply(loaded(plan, 0))
    assert quiet(leader)
    assert found(leader, "ab") == "ab"
    assert offload(leader, "xy") is not None


def test_loaded_blocks_are_counted_once_and_by_tier():
    leader = make(host="ac", disk="bd")
    plan = onboard(leader, "abcd")
    leader.apply(loaded(plan, 0, bad=[1]) + loaded(plan, 1, bad=[1]))
    assert leader.counts.onboarded_blocks == {HOST: 2, DISK: 1}
    assert leader.counts.failed_load_blocks == 1


def test_blocks_that_were_missed_are_not_counted_as_loaded():
    leader = make(host="ac", disk="bd")
    plan = onboard(leader, "abcd")
    leader.apply([Report(rank, loads=[LoadResult(plan.id, [], 0.0, [3])]) for rank in range(2)])
    assert leader.counts.onboarded_blocks == {HOST: 2, DISK: 1}
    assert (leader.counts.failed_load_blocks, leader.counts.missed_load_blocks) == (1, 1)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_block_that_failed_to_load_on_one_rank_is_not_found_again(failing):
    leader = make(host="ac", disk="bd")
    plan = onboard(leader, "abcd")
    leader.apply(loaded(plan, failing, bad=[1, 2]))
    leader.apply(loaded(plan, 1 - failing))
    assert found(leader, "abcd") == "ad"
    assert quiet(leader)


def test_every_block_that_failed_on_any_rank_is_dropped():
    leader = make(ranks=3, host="abcd")
    plan = onboard(leader, "abcd")
    leader.apply(loaded(plan, 0, bad=[0]) + loaded(plan, 1, bad=[3]) + loaded(plan, 2))
    assert found(leader, "abcd") == "bc"
    assert leader.counts.failed_load_blocks == 2


def test_blocks_that_do_not_fit_a_packed_slot_are_not_kept_and_counted():
    leader = make(ranks=2)
    store = offload(leader, "abcd")
    leader.apply([Report(0, stores=[StoreResult(store.id, unpackable=[1], escapes=0.002)])])
    assert found(leader, "abcd") == ""
    leader.apply([Report(1, stores=[StoreResult(store.id, unpackable=[1, 3], escapes=0.001)])])
    assert leader.counts.escapes == pytest.approx(0.0015)
    assert found(leader, "abcd") == "ac"
    assert leader.counts.unpackable_blocks == 2
    assert leader.counts.offloaded_blocks == 2
    assert not leader.counts.failed_store_blocks
    assert quiet(leader)
    assert found(leader, "b") == ""
    again = offload(leader, "bd")
    leader.apply(stored(again, 0, 1))
    assert found(leader, "abcd") == "abcd"


def test_many_blocks_that_do_not_fit_are_a_warning(caplog):
    leader = make(ranks=1, size=300)
    letters = [chr(0x4E00 + i) for i in range(240)]
    for start in range(0, 240, 80):
        store = offload(leader, "".join(letters[start : start + 80]))
        leader.apply([Report(0, stores=[StoreResult(store.id, unpackable=list(range(6)))])])
    assert [record.getMessage() for record in caplog.records] == [
        "12 of 160 blocks do not fit a packed slot and are not kept, so what follows them in their prompts is not "
        "found. Slots have one size until the engine ends. Restart it with KVBM_PACK=off."
    ]


def test_reports_about_plans_that_are_over_change_nothing():
    leader = make(ranks=1, host="a")
    load, store = onboard(leader, "a"), offload(leader, "b")
    leader.apply(loaded(load, 0) + stored(store, 0))
    leader.apply(loaded(load, 0, bad=[0]) + stored(store, 0, ok=False))
    leader.apply([Report(0, loads=[LoadResult(99, [0])], stores=[StoreResult(99)])])
    assert found(leader, "ab") == "ab"
    assert quiet(leader)


# -- a failed load and the stores beside it ---------------------------------------------------------------------------


def test_a_failed_load_taints_stores_in_flight():
    leader = make(host="a")
    before = offload(leader, "b")
    load = onboard(leader, "a")
    beside = offload(leader, "c", blocks=[50])
    leader.apply(loaded(load, 1, bad=[0]))
    leader.apply(loaded(load, 0) + stored(before, 0, 1) + stored(beside, 0, 1))
    assert found(leader, "abc") == ""
    assert leader.counts.tainted_store_blocks == 2
    assert leader.counts.offloaded_blocks == 0
    assert quiet(leader)


def test_a_failed_load_taints_the_stores_of_the_same_report():
    leader = make(ranks=1, host="a")
    load, store = onboard(leader, "a"), offload(leader, "b")
    leader.apply([Report(0, loads=[LoadResult(load.id, [0])], stores=[StoreResult(store.id)])])
    assert found(leader, "ab") == ""


def test_a_failed_load_taints_the_stores_of_the_same_batch_of_reports():
    leader = make(host="a")
    load, store = onboard(leader, "a"), offload(leader, "b")
    leader.apply(stored(store, 0, 1) + loaded(load, 0) + loaded(load, 1, bad=[0]))
    assert found(leader, "ab") == ""


def test_a_store_waits_for_the_load_its_step_computed_on():
    leader = make(host="a")
    load, store = onboard(leader, "a", in_step=True), offload(leader, "b")
    leader.apply(stored(store, 0, 1) + loaded(load, 0))
    assert found(leader, "b") == ""
    assert leader.unconfirmed_store_blocks
    leader.apply(loaded(load, 1))
    assert found(leader, "ab") == "ab"
    assert quiet(leader)


def test_a_load_that_fails_after_the_stores_beside_it_have_been_confirmed_still_taints_them():
    leader = make(host="a")
    load, store = onboard(leader, "a", in_step=True), offload(leader, "b")
    leader.apply(stored(store, 0, 1) + loaded(load, 0))
    leader.apply(loaded(load, 1, bad=[0]))
    assert found(leader, "ab") == ""
    assert leader.counts.tainted_store_blocks == 1
    assert quiet(leader)


def test_a_store_waits_for_every_load_of_its_step():
    leader = make(ranks=1, host="ab")
    first, second = onboard(leader, "a"), onboard(leader, "b", blocks=[9])
    store = offload(leader, "c")
    leader.apply(stored(store, 0))
    leader.apply(loaded(second, 0))
    assert found(leader, "c") == ""
    leader.apply(loaded(first, 0))
    assert found(leader, "c") == "c"


def test_a_store_does_not_wait_for_a_load_outside_the_step():
    leader = make(ranks=1, host="a")
    onboard(leader, "a", in_step=False)
    leader.apply(stored(offload(leader, "b"), 0))
    assert found(leader, "b") == "b"


def test_a_store_that_waits_for_a_load_has_given_the_engine_its_blocks_back():
    leader = make(ranks=1, host="a", max_pending_blocks=1)
    load, store = onboard(leader, "a"), offload(leader, "b")
    leader.apply(stored(store, 0))
    leader.apply(stored(store, 0))
    assert leader.fences(store.copy.blocks) == []
    assert offload(leader, "c", blocks=[7]) is not None
    assert offload(leader, "d", blocks=[8]) is None
    leader.apply(loaded(load, 0))
    assert found(leader, "b") == "b"


def test_a_store_planned_while_ranks_still_answer_for_a_failed_load_is_tainted():
    leader = make(host="a")
    load = onboard(leader, "a")
    leader.apply(loaded(load, 0, bad=[0]))
    store = offload(leader, "b")
    leader.apply(stored(store, 0, 1) + loaded(load, 1))
    assert found(leader, "b") == ""


def test_a_failed_load_nobody_planned_here_taints_stores_all_the_same():
    # An engine that could not plan a load has the workers report it failed under an id of its own.
    leader = make(ranks=1)
    store = offload(leader, "a")
    leader.apply([Report(0, loads=[LoadResult(-1, [0])], stores=[StoreResult(store.id)])])
    assert found(leader, "a") == ""
    assert quiet(leader)


def test_a_failed_load_leaves_later_stores_alone():
    leader = make(ranks=1, host="a")
    leader.apply(loaded(onboard(leader, "a"), 0, bad=[0]))
    leader.apply(stored(offload(leader, "ab"), 0))
    assert found(leader, "ab") == "ab"
    assert leader.counts.tainted_store_blocks == 0


def test_a_load_that_went_well_taints_nothing():
    leader = make(ranks=1, host="a")
    load, store = onboard(leader, "a"), offload(leader, "b")
    leader.apply(loaded(load, 0) + stored(store, 0))
    assert found(leader, "ab") == "ab"


# -- engine blocks that are still being read --------------------------------------------------------------------------


def test_whoever_writes_a_block_is_told_which_stores_still_read_it():
    leader = make(host="z")
    first, second = offload(leader, "ab", blocks=[1, 2]), offload(leader, "c", blocks=[3])
    assert leader.fences([1, 2]) == [first.id]
    assert leader.fences([3, 2, 9]) == [first.id, second.id]
    assert leader.fences([9]) == []
    assert onboard(leader, "z", blocks=[3]).after == [second.id]


def test_stores_that_every_rank_has_confirmed_are_not_in_flight():
    leader = make(ranks=1, host="z")
    onboard(leader, "z")
    first, second = offload(leader, "a"), offload(leader, "b")
    assert leader.stores_in_flight() == [first.id, second.id]
    leader.apply(stored(first, 0))  # waits for the load
    assert leader.stores_in_flight() == [second.id]
    assert leader.unconfirmed_store_blocks


def test_a_fence_falls_when_every_rank_has_read_the_block():
    leader = make()
    plan = offload(leader, "a", blocks=[1])
    leader.apply(stored(plan, 0))
    assert leader.fences([1]) == [plan.id]
    leader.apply(stored(plan, 1))
    assert leader.fences([1]) == []


def test_a_store_whose_fence_comes_too_late_is_not_published():
    leader = make(ranks=1)
    plan, other = offload(leader, "a", blocks=[1]), offload(leader, "b", blocks=[2])
    assert leader.fences([1, 3], too_late=True) == [plan.id]
    leader.apply(stored(plan, 0))
    leader.apply(stored(other, 0))
    assert leader.counts.tainted_store_blocks == 1
    assert leader.manager.near.published == 1


@pytest.mark.parametrize("how", ["failed", "tainted"])
def test_a_fence_falls_however_the_store_ends(how):
    leader = make(ranks=1)
    plan = offload(leader, "a", blocks=[1])
    if how == "tainted":
        leader.reset()
    leader.apply(stored(plan, 0, ok=how == "tainted"))
    assert leader.fences([1]) == []


def test_a_block_stored_again_is_fenced_by_its_last_store():
    leader = make(ranks=1)
    first = offload(leader, "a", blocks=[1])
    second = offload(leader, "b", blocks=[1])
    assert leader.fences([1]) == [second.id]
    leader.apply(stored(first, 0))
    assert leader.fences([1]) == [second.id]
    leader.apply(stored(second, 0))
    assert leader.fences([1]) == []


def test_blocks_that_were_not_copied_are_not_fenced():
    leader = make(host="a")
    plan = offload(leader, "ab", blocks=[1, 2])
    assert plan.copy.blocks == [2]
    assert leader.fences([1]) == []


# -- reset ------------------------------------------------------------------------------------------------------------


def test_reset_forgets_every_tier():
    leader = make(host="ab", disk="cd")
    leader.reset()
    assert found(leader, "abcd") == ""
    assert all(pool.free == pool.size for pool in leader.manager.catalogs.values())


def test_reset_leaves_nothing_pinned_and_publishes_nothing_in_flight():
    leader = make(host="ab", disk="c")
    load, store = onboard(leader, "abc"), offload(leader, "xy")
    leader.apply(stored(store, 0))
    leader.reset()
    assert found(leader, "abcxy") == ""
    leader.apply(loaded(load, 0, 1) + stored(store, 1))
    assert found(leader, "abcxy") == ""
    assert leader.counts.tainted_store_blocks == 2
    assert quiet(leader)
    assert all(pool.free == pool.size for pool in leader.manager.catalogs.values())


def test_reset_reaches_a_store_that_waits_for_a_load():
    leader = make(ranks=1, host="a")
    load, store = onboard(leader, "a"), offload(leader, "b")
    leader.apply(stored(store, 0))
    leader.reset()
    leader.apply(loaded(load, 0))
    assert found(leader, "ab") == ""
    assert quiet(leader)


def test_stores_after_a_reset_are_kept():
    leader = make(ranks=1, host="a")
    leader.reset()
    leader.apply(stored(offload(leader, "ab"), 0))
    assert found(leader, "ab") == "ab"


# -- a rank that is gone ----------------------------------------------------------------------------------------------


def test_what_a_lost_rank_owed_has_failed_and_nothing_is_found_or_kept_any_more():
    leader = make(host="ab", disk="c")
    load, store = onboard(leader, "abc"), offload(leader, "xy")
    confirmed = offload(leader, "z", blocks=[9])
    leader.apply(stored(confirmed, 1))
    leader.fail_rank(1)
    assert found(leader, "abcxyz") == ""
    leader.apply(loaded(load, 0) + stored(store, 0) + stored(confirmed, 0))
    assert found(leader, "abcxyz") == ""
    assert leader.counts.failed_load_blocks == 3
    assert leader.counts.failed_store_blocks == 3
    assert leader.counts.onboarded_blocks == {HOST: 0, DISK: 0}
    assert offload(leader, "d") is None
    assert quiet(leader)


def test_whoever_must_tell_the_engine_hears_of_a_load_once_every_rank_has_answered():
    leader = make(host="abc")
    heard = []
    leader.on_ended_load = lambda plan, bad: heard.append((plan.id, sorted(bad)))
    good, bad = onboard(leader, "ab"), onboard(leader, "abc")
    leader.apply(loaded(good, 0, 1))
    leader.apply(loaded(bad, 0, bad=[2]))
    assert heard == [(good.id, [])]
    leader.apply(loaded(bad, 1, bad=[1]))
    assert heard == [(good.id, []), (bad.id, [1, 2])]


# -- what things take -------------------------------------------------------------------------------------------------


def timed(plan, *seconds, bad=()):
    return [Report(rank, loads=[LoadResult(plan.id, list(bad), took)]) for rank, took in enumerate(seconds)]


def test_a_load_takes_what_the_slowest_rank_took():
    cost = CostModel(PRIORS)
    leader = make(2, host="abcd", block_bytes=[1 << 30, 2 << 30], cost=cost)
    before = cost.rate(HOST)
    leader.apply(timed(onboard(leader, "abcd"), 4.0, 2.0))
    assert leader.counts.loaded_seconds == {HOST: 4.0}
    assert leader.counts.loaded_bytes == {HOST: 12 << 30}
    like = CostModel(PRIORS)
    like.observe_load(HOST, 8 << 30, 4.0)
    assert cost.rate(HOST) == like.rate(HOST) != before


@pytest.mark.parametrize(
    ("host", "disk", "seconds", "bad"), [("ab", "c", 1.0, ()), ("abc", "", 1.0, (1,)), ("abc", "", 0.0, ())]
)
def test_a_load_of_two_tiers_or_one_that_failed_or_was_not_timed_teaches_nothing(host, disk, seconds, bad):
    cost = CostModel(PRIORS)
    leader = make(1, host=host, disk=disk, block_bytes=[1 << 30], cost=cost)
    before = [cost.rate(tier) for tier in (HOST, DISK)]
    leader.apply(timed(onboard(leader, "abc"), seconds, bad=bad))
    assert [cost.rate(tier) for tier in (HOST, DISK)] == before
    assert leader.counts.loaded_seconds == leader.counts.loaded_bytes == {}


def test_what_stores_took_is_counted_when_they_went_well():
    leader = make(1, block_bytes=[1000])
    for text, ok in (("ab", True), ("c", False)):
        plan = offload(leader, text)
        leader.apply([Report(0, stores=[StoreResult(plan.id, ok, 0.5)])])
    assert leader.counts.stored_bytes == {HOST: 2000}
    assert leader.counts.stored_seconds == {HOST: 0.5}


def test_a_reset_that_fails_half_way_leaves_no_block_to_be_found():
    class Broken:
        def reset(self):
            raise OSError("the disk is gone")

    leader = make(host="ab", disk="cd")
    leader.edges = [Broken()]
    with pytest.raises(OSError, match="gone"):
        leader.reset()
    assert found(leader, "abcd") == ""
