"""How fast SGLang computes prompts is measured where its scheduler processes the result of a batch.

test_sglang_server.py measures a serving SGLang.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from engine_pages import keys, put

from kvbm.engines.sglang.prefill import PrefillClock


class Mode:
    """Of a batch, as in SGLang."""

    def __init__(self, kind):
        self.kind = kind

    def is_decode(self):
        return self.kind == "decode"

    def is_extend_without_speculative(self):
        return self.kind in ("extend", "mixed")


def prompts(launched, *lengths, before=(), from_host=0, from_storage=0, ranks=None, kind="extend"):
    """A batch of these lengths, each with so many tokens in front of it."""
    return SimpleNamespace(
        forward_mode=Mode(kind),
        launch_ts=launched,
        prefill_stats=SimpleNamespace(log_host_hit_tokens=from_host, log_storage_hit_tokens=from_storage),
        extend_lens=list(lengths),
        prefix_lens=list(before) or [0] * len(lengths),
        extend_num_tokens=sum(lengths),
        global_num_tokens=ranks,
    )


def decode(launched):
    return SimpleNamespace(forward_mode=Mode("decode"), launch_ts=launched, prefill_stats=None)


@pytest.fixture
def clock():
    now = [100.0]
    clock = PrefillClock(now=lambda: now[0])

    def end(at, batch):
        now[0] = at
        clock.end_batch(batch)

    clock.end = end
    return clock


def seconds(clock):
    return [pytest.approx(batch.seconds) for batch in clock.take()]


def test_a_batch_begins_when_it_is_launched(clock):
    clock.end(100.5, prompts(100.2, 5000, 3192))
    assert clock.take() == [(8192, pytest.approx(0.3), 0, False)]
    assert clock.take() == []


def test_the_next_part_of_a_prompt_begins_when_the_one_before_has_ended(clock):
    clock.end(100.25, prompts(100.0, 8192))
    clock.end(100.75, prompts(100.01, 8192, before=[8192]))  # launched while the first is computed
    assert seconds(clock) == [0.25, 0.5]


def test_the_decoding_step_before_a_prompt_does_not_count(clock):
    """With overlapping steps the scheduler launches a prompt while the GPU decodes."""
    clock.end(100.0, decode(99.9))
    clock.end(100.1, decode(99.95))
    clock.end(100.3, prompts(100.01, 4096))
    assert seconds(clock) == [0.2]


def test_the_time_in_which_a_server_is_idle_does_not_count(clock):
    clock.end(100.25, prompts(100.0, 4096))
    clock.end(200.25, prompts(200.0, 4096))
    assert seconds(clock) == [0.25] * 2


def test_steps_that_follow_each_other_tell_how_long_decoding_takes(clock):
    for at, batch in (
        (100.0, decode(99.9)),
        (100.02, decode(99.95)),
        (100.3, prompts(100.0, 4096)),
        (100.5, decode(0)),
    ):
        clock.end(at, batch)
    clock.end(100.53, decode(0))
    assert clock.take_steps() == [pytest.approx(0.02), pytest.approx(0.03)]
    assert clock.take_steps() == []


def test_tokens_in_front_of_a_batch_are_averaged_by_its_tokens(clock):
    clock.end(100.5, prompts(100.0, 6000, 2000, before=[1000, 9000]))
    assert clock.take()[0].before == 3000


@pytest.mark.parametrize("where", [{"from_host": 8192}, {"from_storage": 64}])
def test_a_batch_that_waits_for_loaded_layers_gives_a_bound(clock, where):
    clock.end(100.5, prompts(100.0, 4096, before=[8192], **where))
    assert clock.take()[0].is_bound


@pytest.mark.parametrize(
    ("length", "before", "is_bound"),
    [(64, 32_000, True), (1000, 32_000, True), (2048, 32_000, False), (300, 0, False), (300, 400, True), (64, 0, True)],
)
def test_the_short_end_of_a_long_prompt_gives_a_bound(clock, length, before, is_bound):
    clock.end(100.05, prompts(100.0, length, before=[before]))
    assert clock.take()[0].is_bound is is_bound


def test_with_data_parallel_attention_the_longest_rank_sets_the_pace(clock):
    clock.end(100.5, prompts(100.0, 1000, ranks=[1000, 8000]))
    assert clock.take()[0].tokens == 8000


def test_decoding_in_the_guise_of_a_prompt_says_nothing(clock):
    """With data-parallel attention SGLang makes prompts of one token of a rank's decoding requests."""
    batch = prompts(100.0, *[1] * 300)
    batch.prefill_stats = None
    clock.end(100.5, batch)
    clock.end(100.6, prompts(100.0, 3000, kind="verify"))
    assert clock.take() == []


def test_batches_that_are_not_taken_are_forgotten(clock):
    for number in range(1000):
        clock.end(100.0 + number, prompts(99.9 + number, 5000 + number))
        clock.end(100.1 + number, decode(100.0 + number))
        clock.end(100.2 + number, decode(100.0 + number))
    assert [batch.tokens for batch in clock.take()] == list(range(5936, 6000))
    assert len(clock.take_steps()) == 16


def store_with(stores, clock):
    store = stores(options={"page_tokens": 64, "prefill": clock})
    put(store, range(64))
    return store, lambda: store.count(keys(*range(64)))


def test_pages_are_refused_once_computing_was_seen_to_be_faster(stores, clock):
    store, count = store_with(stores, clock)
    assert count() == 64
    for i in range(20):
        clock.end(101.0 + i + 8192 / 10**9, prompts(101.0 + i, 8192))
    assert count() == 0
    for i in range(20):
        clock.end(208.0 + 10 * i, prompts(200.0 + 10 * i, 8192))  # another model, or a server that has others to serve
    assert count() == 64
    assert store.cost.prefill_is_measured


def test_batches_that_give_a_bound_never_make_computing_look_dearer(stores, clock):
    """All that comes back is loaded, and each ends with a page that waits for the layers in front of it."""
    store, count = store_with(stores, clock)
    count()
    before = store.cost.prefill_tokens_per_second
    for i in range(100):
        clock.end(101.0 + i, prompts(100.5 + i, 4096, before=[32_000], from_host=32_000))
        clock.end(101.2 + i, prompts(101.1 + i, 64, before=[32_000]))
    count()
    assert store.cost.prefill_tokens_per_second == before
    for i in range(20):
        clock.end(301.1 + i, prompts(301.0 + i, 8192, from_host=64))  # no slower than 80,000 tokens/s
    count()
    assert store.cost.prefill_tokens_per_second > 60_000
