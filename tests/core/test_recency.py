"""Batches of slots leave their queue without work, and none is lost: it finds what an exact queue finds."""

import random

import numpy as np
import pytest

from kvbm.core.policy import recency
from kvbm.core.policy.recency import AWAY, Recency

HERE, ELSEWHERE = 1, 2


class Queue:
    def __init__(self, size):
        self.states = np.full(size, AWAY, np.int8)
        self.recency = Recency(self.states, HERE)

    def use(self, slots, now):
        self.states[slots] = HERE
        self.recency.use(np.array(slots, np.int32), now)

    def restore(self, slots):
        self.states[slots] = HERE
        self.recency.restore(np.array(slots, np.int32))

    def take(self, count=100):
        run = self.recency.first(count)
        self.states[run] = AWAY
        return run


def test_the_oldest_batch_goes_first_and_its_first_slot_before_the_others():
    queue = Queue(6)
    queue.use([3, 1], 1.0)
    queue.use([5, 0], 2.0)
    assert queue.recency.oldest_before(0.5) is None
    assert queue.recency.oldest_before(1.5) == 1.0
    assert [queue.take(1), queue.take(), queue.take(), queue.take()] == [[3], [1], [5, 0], []]


def test_a_slot_counts_where_it_was_used_last():
    queue = Queue(3)
    queue.use([0, 1], 1.0)
    queue.use([0], 2.0)
    assert [queue.take(), queue.take()] == [[1], [0]]


def test_slots_that_were_pinned_while_their_batch_was_passed_go_first():
    queue = Queue(4)
    queue.use([0], 1.0)
    queue.use([1, 2], 2.0)
    queue.states[0] = AWAY
    assert queue.recency.oldest_before(10.0) == 2.0
    queue.restore([0])
    assert [queue.take(), queue.take()] == [[0], [1, 2]]


def test_slots_released_without_a_use_before_that_return_to_their_place():
    queue = Queue(4)
    queue.use([0], 1.0)
    queue.use([1], 2.0)
    queue.states[1] = AWAY
    queue.restore([1])
    assert [queue.take(), queue.take()] == [[0], [1]]


def test_batches_of_which_no_slot_is_left_take_no_memory(monkeypatch):
    monkeypatch.setattr(recency, "_MIN_BATCHES", 8)
    queue = Queue(4)
    queue.recency._limit = 8
    queue.use([3], 0.0)
    for now in range(1, 1000):
        queue.use([now % 2], float(now))
    assert len(queue.recency._batches) < 50
    assert queue.take() == [3]


def test_a_pinned_slot_keeps_its_place_when_batches_are_forgotten():
    queue = Queue(4)
    queue.use([3], 0.0)
    queue.use([2], 1.0)
    queue.states[3] = AWAY
    queue.recency._forget_left()
    queue.restore([3])
    assert [queue.take(), queue.take()] == [[3], [2]]


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_list_of_all_uses_finds(seed, monkeypatch):
    monkeypatch.setattr(recency, "_MAX_TOGETHER", 3)
    monkeypatch.setattr(recency, "_MIN_BATCHES", 4)
    rng, size = random.Random(seed), 12
    queue = Queue(size)
    queue.recency._limit = 4
    used: list[int] = []  # the oldest first
    for now in range(300):
        some = rng.sample(range(size), rng.randint(1, 4))
        match rng.randrange(4):
            case 0 | 1:
                queue.use(some, float(now))
                used = [slot for slot in used if slot not in some] + some
            case 2:
                away = [slot for slot in some if slot in used]
                queue.states[away] = ELSEWHERE
                used = [slot for slot in used if slot not in away]
            case 3:
                run = queue.take(rng.randint(1, 3))
                assert run == used[: len(run)]
                assert bool(run) == bool(used)
                del used[: len(run)]
