"""Blocks of a remote tier come to host memory while their request waits: bounded, verified, and never after a reset."""

import pytest

from kvbm.core.cost import CostModel
from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from kvbm.plans import LoadResult, MoveResult, Report
from kvbm.runtime.leader import Leader
from tiernames import HOST, OBJECT, PRIORS


class Remote(Pool):
    is_remote = True

    def __init__(self, size):
        super().__init__(size)
        self.expected = []

    def expect(self, keys, start=0, hint=None):
        self.expected.append((list(keys), start))


def keys(text):
    return [letter.encode() for letter in text]


def publish(pool, text):
    pool.commit(pool.reserve(keys(text)))


@pytest.fixture
def leader():
    manager = BlockManager({HOST: Pool(32), OBJECT: Remote(32)})
    publish(manager.catalogs[OBJECT], "abcdefghijkl")
    publish(manager.near, "a")
    return Leader(manager, 2, block_bytes=[1000, 1000], cost=CostModel(PRIORS))


def ended(leader, plan, *ranks, bad=(), seconds=0.0):
    leader.apply([Report(rank, moves=[MoveResult(plan.id, list(bad), seconds)]) for rank in ranks])


def start(leader, text):
    return leader.fetches.start(leader.manager.lookup(keys(text)))


def near(leader, text):
    return [key in leader.manager.near for key in keys(text)]


def test_blocks_can_be_found_when_every_rank_has_read_them(leader):
    assert start(leader, "abcd") == 3, "the first is near already"
    (plan,) = leader.plan_moves()
    assert (plan.source, plan.target, plan.tags) == (OBJECT, HOST, keys("bcd"))
    assert leader.manager.lookup(keys("abcd")).pending, "a request waits for them, and reads nothing twice"
    ended(leader, plan, 0)
    assert near(leader, "bcd") == [False] * 3
    ended(leader, plan, 1)
    assert near(leader, "abcd") == [True] * 4
    assert leader.counts.fetched_blocks == {OBJECT: 3}
    assert not leader.busy
    assert leader.manager.catalogs[OBJECT].pinned == 0


def test_a_block_that_is_bad_on_any_rank_is_dropped(leader):
    start(leader, "abcd")
    (plan,) = leader.plan_moves()
    ended(leader, plan, 0)
    ended(leader, plan, 1, bad=[1])
    assert near(leader, "abcd") == [True, True, False, True]
    assert keys("c")[0] not in leader.manager.catalogs[OBJECT]
    assert leader.counts.failed_fetch_blocks == {OBJECT: 1}


def test_nothing_is_published_after_a_reset(leader):
    start(leader, "abcd")
    (plan,) = leader.plan_moves()
    ended(leader, plan, 0)
    leader.reset()
    ended(leader, plan, 1)
    assert near(leader, "abcd") == [False] * 4
    assert leader.manager.near.free == 32


def test_a_lost_rank_ends_its_fetches(leader):
    start(leader, "abcd")
    leader.plan_moves()
    leader.fail_rank(1)
    leader.apply([Report(0, moves=[MoveResult(1, [])])])
    assert not leader.fetches.under_way
    assert near(leader, "abcd") == [False] * 4


def test_fetches_hold_a_part_of_the_near_tier_at_most(leader):
    assert leader.fetches.max_blocks == 8
    assert start(leader, "abcdefghijkl") == 8
    assert leader.fetches.start(leader.manager.lookup(keys("l"))) == 0
    (plan,) = leader.plan_moves()
    assert plan.tags == keys("bcdefghi")


def test_failing_fetches_suspend_the_tier(leader):
    for letter in "bcd":
        start(leader, letter)
        (plan,) = leader.plan_moves()
        ended(leader, plan, 0, 1, bad=[0])
    assert leader.plan_moves() == []
    assert OBJECT in leader.manager.suspended
    assert leader.manager.lookup(keys("e")).blocks == 0


def test_the_cost_model_learns_from_fetches(leader):
    before = leader._cost.rate(OBJECT)
    start(leader, "abcd")
    (plan,) = leader.plan_moves()
    ended(leader, plan, 0, 1, seconds=5.0)
    assert leader._cost.rate(OBJECT) != before


def test_the_cost_model_learns_what_a_read_of_one_block_costs(leader):
    """From fetches and from loads, of blocks that the tier has alone."""
    remote, cost = leader.manager.catalogs[OBJECT], leader._cost
    remote.is_alone = lambda place: True
    before = cost.load_seconds(OBJECT, 0, 100)
    start(leader, "abcdefghi")
    (plan,) = leader.plan_moves()
    ended(leader, plan, 0, 1, seconds=10.0)
    fetched = cost.load_seconds(OBJECT, 0, 100)
    assert fetched > 2 * before
    plan = leader.onboard(leader.manager.lookup(keys("jkl")), "r", [1, 2, 3], in_step=False)
    leader.apply([Report(rank, loads=[LoadResult(plan.id, seconds=20.0)]) for rank in (0, 1)])
    assert cost.load_seconds(OBJECT, 0, 100) > fetched
    assert cost.rate(OBJECT).bytes_per_second == pytest.approx(PRIORS[OBJECT].bytes_per_second)


def test_a_remote_tier_is_asked_for_what_the_near_tier_lacks(leader):
    manager, remote = leader.manager, leader.manager.catalogs[OBJECT]
    manager.expect(keys("abcd"), 0, 3)
    assert remote.expected == [(keys("abcd"), 1)], "a group of blocks may end behind the last one that is wanted"
    manager.expect(keys("a"), 0, 1)
    manager.suspended.add(OBJECT)
    manager.expect(keys("xyz"), 0, 3)
    assert len(remote.expected) == 1


@pytest.mark.parametrize(("load", "worth"), [("auto", True), ("always", True), ("never", False)])
def test_an_answer_is_worth_waiting_for_while_loading_beats_computing(load, worth):
    cost = CostModel(PRIORS, load=load, tokens_per_second=100)
    assert cost.is_worth_asking(OBJECT, 0.01, 1_000_000, 0, 1000) is worth
    if load == "auto":
        assert not cost.is_worth_asking(OBJECT, 60.0, 1_000_000, 0, 1000)
        assert not cost.is_worth_asking(OBJECT, 0.01, 1 << 40, 0, 1000)
