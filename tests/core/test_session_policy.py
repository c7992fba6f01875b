"""The policies on workloads: ours keeps what returns, believes hints as far as they are true, and shares hold."""

import random

import pytest
from workloads import WORKLOADS, chat, noise, replay, serve

from kvbm.core.manager import BlockManager
from kvbm.core.policy import Retention, Turn, make_policy
from kvbm.core.policy.group import Group
from kvbm.core.policy.returns import EDGES, Returns, bucket_of
from kvbm.core.policy.shares import Shares
from kvbm.core.policy.waiting import Waiting, age
from kvbm.core.pool import Pool
from tiernames import HOST

MAX_LOSS = 0.01  # to LRU


@pytest.mark.long
@pytest.mark.parametrize("size", [600, 2000, 6000])
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_session_never_loses_more_than_a_hundredth_to_lru(name, size):
    requests = list(WORKLOADS[name]())
    assert replay(requests, size, "session") >= replay(requests, size, "lru") - MAX_LOSS


def test_conversations_that_go_on_stay_longer_than_with_lru():
    requests = chat()
    assert replay(requests, 600, "session") > replay(requests, 600, "lru") + 0.015


def truth(request, turn):
    return turn._replace(is_final=request.is_last, retention=() if request.is_last else (Retention(1),))


def lies(request, turn):
    return turn._replace(is_final=not request.is_last, retention=(Retention(1),) if request.is_last else ())


@pytest.mark.long
def test_true_hints_help_and_false_ones_do_no_harm():
    requests, rng = chat(), random.Random(1)

    def anything(request, turn):
        return turn._replace(is_final=rng.random() < 0.5, retention=(Retention(rng.choice([-1, 1])),))

    without = replay(requests, 600, "session")
    assert replay(requests, 600, "session", truth) > without + 0.05
    for hints in (lies, anything):
        assert replay(requests, 600, "session", hints) >= replay(requests, 600, "lru") - MAX_LOSS


@pytest.mark.long
@pytest.mark.parametrize("policy", ["lru", "session"])
def test_a_tenant_at_its_quota_does_not_lower_the_hit_rate_of_another(policy):
    quiet, size = chat(rate=0.3), 1200
    alone = replay(quiet, size // 2, policy)
    now = [0.0]
    pool = Pool(size, Shares(size, {1: 0.5, 2: 0.5}, lambda slots: make_policy(policy, slots, lambda: now[0])))
    loud = sorted(
        [(request.time, 1, request) for request in quiet] + [(r.time, 2, r) for r in noise(requests=6000)],
        key=lambda each: each[:2],
    )
    hits = total = 0
    for now[0], tenant, request in loud:
        found = serve(pool, request, tenant=tenant)
        if tenant == 1:
            hits, total = hits + found, total + len(request.keys)
    assert hits / total >= alone - MAX_LOSS


def test_a_tenant_uses_free_slots_above_its_share_until_another_needs_them():
    shares = Shares(4, {1: 0.5}, lambda slots: make_policy("lru", slots, float))
    pool = Pool(4, shares)
    pool.commit(pool.reserve([b"a", b"b", b"c", b"d"], [1, 1, 1, 1]))
    pool.commit(pool.reserve([b"e", b"f"]))  # the common tenant's share is the other half
    assert set(pool.findable) == {b"a", b"b", b"e", b"f"}
    pool.commit(pool.reserve([b"g"], [1]))
    assert set(pool.findable) == {b"a", b"g", b"e", b"f"}
    assert pool.tenants_of([pool.find(b"g"), pool.find(b"e")]) == [1, 0]


def test_a_long_prompt_takes_no_more_than_what_is_above_the_share_of_another():
    shares = Shares(8, {1: 0.5}, lambda slots: make_policy("lru", slots, float))
    pool = Pool(8, shares)
    pool.commit(pool.reserve([b"a", b"b", b"c", b"d", b"e", b"f"], [1] * 6))
    pool.commit(pool.reserve([b"w", b"x"], [0] * 2))
    pool.commit(pool.reserve([b"p", b"q", b"r", b"s"], [0] * 4))
    assert set(pool.findable) == {b"a", b"b", b"c", b"d", b"p", b"q", b"r", b"s"}


def test_a_prompt_that_is_longer_than_the_share_is_kept_in_part():
    pool = Pool(8, Shares(8, {1: 0.5, 2: 0.5}, lambda slots: make_policy("lru", slots, float)))
    pool.commit(pool.reserve([b"a", b"b", b"c", b"d"], [2] * 4))
    manager = BlockManager({HOST: pool})
    plan = manager.store([b"p", b"q", b"r", b"s", b"t"], range(5), [1] * 5)
    manager.finish_store(plan.id, ok=True)
    assert set(pool.findable) == {b"a", b"b", b"c", b"d", b"p", b"q", b"r", b"s"}


@pytest.mark.parametrize("shares", [{1: 0.7, 2: 0.4}, {1: 0.0}, {0: 0.5}, {1: -1.0}])
def test_shares_that_cannot_be_had_are_refused(shares):
    with pytest.raises(ValueError, match="shares of tenants"):
        Shares(4, shares, lambda slots: make_policy("lru", slots, float))


def test_a_tenant_that_reads_all_of_its_blocks_takes_none_of_anothers_share():
    pool = Pool(4, Shares(4, {1: 0.5, 2: 0.5}, lambda slots: make_policy("lru", slots, float)))
    pool.commit(pool.reserve([b"a", b"b"], [1, 1]))
    pool.commit(pool.reserve([b"c", b"d"], [2, 2]))
    pool.pin(pool.match([b"a", b"b"]))
    assert pool.reserve([b"e"], [1]) is None
    assert set(pool.findable) == {b"a", b"b", b"c", b"d"}


@pytest.mark.parametrize("dropped", [False, True], ids=["not written", "dropped while it is read"])
def test_a_slot_that_was_given_up_does_not_count_for_its_tenant(dropped):
    pool = Pool(4, Shares(4, {1: 0.5, 2: 0.5}, lambda slots: make_policy("lru", slots, float)))
    pool.commit(pool.reserve([b"a", b"b"], [1, 1]))
    slots = pool.reserve([b"x", b"y"], [1, 1])
    if dropped:
        pool.commit(slots)
        pool.pin(slots)
        pool.drop([b"x", b"y"])
        pool.unpin(slots)
    else:
        pool.abandon(slots)
    pool.lend(2)
    assert pool.reserve([b"c"], [2]) is None
    assert set(pool.findable) == {b"a", b"b"}


@pytest.mark.parametrize(("seconds", "first"), [(50.0, b"a"), (5000.0, b"b")])
def test_a_wish_to_keep_blocks_ends_with_its_lifetime(seconds, first):
    """Without a wish, the older of two prompts goes first."""
    now = [0.0]
    pool = Pool(2, make_policy("session", 2, lambda: now[0]))
    for now[0], key, wishes in ((0.0, b"a", (Retention(1, seconds),)), (400.0, b"b", ())):
        pool.commit(pool.reserve([key]))
        pool.end_turn([key], Turn(retention=wishes))
    now[0] = 1000.0
    pool.lend(1)
    assert first not in pool


def test_a_block_that_is_written_after_its_turn_has_ended_joins_its_conversation():
    now = [0.0]
    pool = Pool(8, make_policy("session", 8, lambda: now[0]))
    slots = pool.reserve([b"a", b"b", b"c"])
    pool.commit(slots[:2])
    pool.end_turn([b"a", b"b", b"c"], Turn())
    pool.commit(slots[2:])
    pool.lend(5)
    pool.lend(1)
    assert set(pool.findable) == {b"a", b"b"}


def test_a_block_that_is_computed_again_in_front_of_a_shared_group_can_be_evicted():
    pool = Pool(8, make_policy("session", 8, float))
    for keys in ([b"a", b"b", b"c", b"d"], [b"a", b"b", b"e", b"f"]):
        pool.commit(pool.reserve([key for key in keys if key not in pool]))
        pool.end_turn(keys, Turn())
    pool.drop([b"a"])
    pool.commit(pool.reserve([b"a"]))
    pool.end_turn([b"a", b"b", b"g"], Turn())
    assert len(pool.lend(8)) == 8
    assert not pool.findable


def ages_counted(time, now, together):
    returns, group = Returns(), Group(1)
    group.time = time
    waiting = Waiting(returns, 10)
    waiting.add(group)
    if together:
        waiting.look(now)
    waiting.remove(group)
    age(returns, group, now)
    return group.bucket, list(returns.exposed)


@pytest.mark.parametrize("bucket", range(6))
def test_an_age_is_counted_once_alone_or_with_those_of_others(bucket):
    """At the very moment at which a group is due, floats are rounded: both must say the same."""
    chance = random.Random(bucket)
    for time in (chance.random() * 1e3 for _ in range(50)):
        now = time + float(EDGES[bucket + 1])
        assert ages_counted(time, now, together=True) == ages_counted(time, now, together=False)


def test_a_sample_leaves_no_group_out():
    returns = Returns()
    waiting = Waiting(returns, 10)
    groups = [Group(number) for number in range(95)]
    for group in groups:
        waiting.add(group)
    for _ in range(10):
        waiting.look(100.0)
    for group in groups:
        waiting.remove(group)
    assert {group.bucket for group in groups} == {bucket_of(100.0)}


def grouped(pool):
    """A conversation of three blocks, and the policy."""
    pool.commit(pool.reserve([b"a", b"b", b"c"]))
    pool.end_turn([b"a", b"b", b"c"], Turn())
    return pool._policy


def test_a_block_that_is_dropped_while_it_is_read_leaves_its_conversation():
    pool = Pool(8, make_policy("session", 8, float))
    policy = grouped(pool)
    slots = pool.match([b"a", b"b", b"c"])
    pool.pin(slots)
    pool.drop([b"a", b"b", b"c"])
    pool.unpin(slots)
    assert not any(group.live for group in policy._groups)
    pool.commit(pool.reserve([b"x", b"y", b"z"]))
    pool.end_turn([b"x", b"y", b"z"], Turn())
    assert len(pool.lend(8)) == 8


def test_a_new_block_in_front_of_a_shared_group_can_be_read_after_its_turn_has_ended():
    pool = Pool(8, make_policy("session", 8, float))
    for keys in ([b"a", b"b", b"c", b"d"], [b"a", b"b", b"e", b"f"]):
        pool.commit(pool.reserve([key for key in keys if key not in pool]))
        pool.end_turn(keys, Turn())
    pool.drop([b"a"])
    pool.commit(pool.reserve([b"a"]))
    slots = pool.match([b"a"])
    pool.pin(slots)
    pool.end_turn([b"a", b"b", b"g"], Turn())
    pool.unpin(slots)
    assert len(pool.lend(8)) == 8


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("overtakes", [False, True])
def test_the_last_block_of_a_turn_is_set_apart_where_conversations_go_on_without_it(overtakes, before):
    """Whatever they did before."""
    now = [0.0]
    pool = Pool(64, make_policy("session", 64, lambda: now[0]))
    apart = 0
    for talk in range(200):
        keys = [b"%d-%d" % (talk, i) for i in range(4)]
        for turn in range(5):
            now[0] += 1.0
            fresh = [key for key in keys if key not in pool]
            pool.commit(pool.reserve(fresh))
            pool.end_turn(keys, Turn())
            if talk >= 190:
                policy = pool._policy
                apart += policy._group[pool.find(keys[-1])] != policy._group[pool.find(keys[-2])]
            keys = keys[:-1] if (overtakes if talk >= 100 else before) else keys
            keys = [*keys, *(b"%d-%d-%d" % (talk, turn, i) for i in range(3))]
    assert apart == 50 if overtakes else apart < 10
