"""How many pages are reported: those that are expected sooner than SGLang computes them, and before it gives up."""

from __future__ import annotations

import pytest
from engine_pages import PAGE, get, keys, put

from kvbm.core.rate import Rate
from kvbm.engines.sglang.settings import Prefetch
from tiernames import DISK

TOKENS = {"page_tokens": 64}


@pytest.fixture
def on_slow_disk(stores, monkeypatch):
    """A store that has eight pages on a disk of ten pages a second, and none in memory."""

    def make(**options):
        store = stores()
        put(store, range(8))
        store.close()
        monkeypatch.setattr("kvbm.tiers.disk.file.measure", lambda file: Rate(PAGE / 0.1, 0.0))
        return stores(prefill_tokens_per_second=options.pop("speed"), options={**TOKENS, **options})

    return make


@pytest.mark.parametrize(("base", "found"), [(0.5, 4), (2.0, 8), (0.1, 0)])
def test_no_more_pages_are_reported_than_come_before_sglang_ends_the_prefetch(on_slow_disk, base, found):
    """They take 0.8 s, and a bit for caution. Computing them takes five."""
    store = on_slow_disk(speed=100, prefetch=Prefetch(True, base - 8 * 64 / 2**20, 1 / 2**20))
    assert store.count(keys(*range(8))) == found
    late = {"later than SGLang waits": 8 - found} if found < 8 else {}
    assert store.counts.refused_load_blocks == late


def test_a_request_that_asks_again_counts_as_refused_once(on_slow_disk, monkeypatch):
    """Each refusal makes the slow disk look a little better, so that it is tried again one day."""
    monkeypatch.setattr("kvbm.core.cost._FORGET", 0.5)
    store = on_slow_disk(speed=10**6)
    for _ in range(20):
        store.cost.observe_load(DISK, 8 * PAGE, 8.0)
    seen = store.cost.rate(DISK).bytes_per_second
    for _ in range(20):
        assert store.count(keys(*range(8))) == 0
    once = store.cost.rate(DISK).bytes_per_second
    assert 1.5 * seen < once < 3 * seen
    assert store.count(keys(*range(1, 8))) == 0
    assert store.cost.rate(DISK).bytes_per_second > 1.2 * once
    assert store.counts.refused_load_blocks == {"recomputing is faster": 20 * 8 + 7}


def test_what_other_pools_load_with_a_page_counts(on_slow_disk):
    """0.8 s from the disk alone, and 1.6 s with as much of another pool; computing takes one."""
    store = on_slow_disk(speed=512)
    assert store.count(keys(*range(8))) == 8
    assert store.count(keys(*range(8)), more_bytes=PAGE) == 0


@pytest.mark.parametrize(("hidden_size", "found"), [(None, 0), (4, 8)])
def test_attention_makes_a_long_prompt_dearer_than_its_first_tokens(on_slow_disk, hidden_size, found):
    """512 tokens are computed in half a second, or in several with a width of four; loading them takes 0.8 s."""
    store = on_slow_disk(speed=1024, hidden_size=hidden_size)
    assert store.count(keys(*range(8))) == found


def test_a_load_has_the_time_that_computing_takes_at_its_place(stores):
    """The last pages of a prompt take longer to compute, and may take longer to load."""
    store = stores(prefill_tokens_per_second=10, options={**TOKENS, "hidden_size": 4})
    put(store, range(8))
    assert store.count(keys(*range(8))) == 8
    deadlines = []
    onboard = store.leader.onboard
    store.leader.onboard = lambda *args, **named: deadlines.append(named["deadline_seconds"]) or onboard(*args, **named)
    for page in (0, 7):
        get(store, [page])
    first, last = deadlines
    assert first == store.cost.compute_seconds(0, 64)
    assert last == store.cost.compute_seconds(7 * 64, 64) > 5 * first
