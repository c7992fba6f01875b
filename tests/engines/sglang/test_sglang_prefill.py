"""How fast SGLang computes prompts is measured where its scheduler reports a batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from engine_pages import keys, put

from kvbm.engines.sglang.prefill import PrefillClock


def requests(*scheduled):
    return [SimpleNamespace(time_stats=SimpleNamespace(last_forward_entry_time=at)) for at in scheduled]


@pytest.fixture
def clock():
    now = [100.0]
    clock = PrefillClock(now=lambda: now[0])
    clock.set = lambda at: now.__setitem__(0, at)
    return clock


def test_a_batch_begins_when_its_last_request_was_scheduled(clock):
    clock.set(100.5)
    clock.end_batch(requests(99.0, 100.2), 8192)
    assert clock.take() == [(8192, pytest.approx(0.3))]
    assert clock.take() == []


def test_the_next_part_of_a_prompt_begins_when_the_one_before_has_ended(clock):
    for end in (100.25, 100.75):
        clock.set(end)
        clock.end_batch(requests(100.0), 8192)
    assert [round(seconds, 3) for _, seconds in clock.take()] == [0.25, 0.5]


def test_the_time_in_which_a_server_is_idle_does_not_count(clock):
    clock.set(100.25)
    clock.end_batch(requests(100.0), 4096)
    clock.set(200.25)
    clock.end_batch(requests(200.0), 4096)
    assert [seconds for _, seconds in clock.take()] == [pytest.approx(0.25)] * 2


def test_a_batch_of_which_nothing_is_known_says_nothing(clock):
    clock.end_batch([], 4096)
    assert clock.take() == []
    clock.set(101.0)
    clock.end_batch([], 4096)  # the one before has ended at 100
    assert clock.take() == [(4096, 1.0)]


def test_a_short_batch_is_no_measure_of_a_long_prompt(clock):
    """The page that is computed after 32,000 tokens have been loaded takes as long as a thousand others."""
    clock.set(100.05)
    clock.end_batch(requests(100.0), 64)
    clock.set(100.35)
    clock.end_batch(requests(100.0), 8192)
    assert clock.take() == [(8192, pytest.approx(0.3))]


def test_batches_that_nobody_asks_for_are_forgotten(clock):
    for number in range(1000):
        clock.set(100.0 + number)
        clock.end_batch(requests(99.0), 5000 + number)
    assert [tokens for tokens, _ in clock.take()] == list(range(5936, 6000))


def test_pages_are_refused_once_computing_was_seen_to_be_faster(stores):
    batches = []

    def take():
        taken, batches[:] = list(batches), []
        return taken

    store = stores(options={"page_tokens": 64, "prefill": take})
    put(store, range(64))
    asked = keys(*range(64))
    assert store.count(asked) == 64
    batches += [(8192, 8192 / 10**9)] * 20
    assert store.count(asked) == 0
    batches += [(8192, 8.0)] * 20  # another model, or a server that has others to serve
    assert store.count(asked) == 64
    assert store.cost.prefill_is_measured
