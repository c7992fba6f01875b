"""The simulated engine: what it counts, beside models that are written differently."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from kvbm.core.rate import Rate
from kvbm.simulate import synthetic
from kvbm.simulate.engine import SimulatedEngine
from kvbm.simulate.optimum import optimal_hits
from kvbm.simulate.sweep import machine_of, settings_of
from kvbm.simulate.trace import Request, Trace, key_of
from tiernames import DISK, HOST

BLOCK = 16


def trace_of(chains, gap=1.0):
    requests = [
        Request(at * gap, len(chain) * BLOCK + 1, 1, [key_of("", number) for number in chain])
        for at, chain in enumerate(chains)
    ]
    return Trace("test", requests, BLOCK)


def replay(trace, sizes, device_blocks=0, **settings):
    given = {"load": "always", **{key: str(value) for key, value in settings.items()}}
    config = settings_of(trace, given, sizes)
    engine = SimulatedEngine(trace, config, sizes, machine_of(trace, device_blocks=device_blocks))
    engine.run()
    assert not engine.session._faults.counts
    return engine


def sessions(seed, count=400):
    """Chains that grow, a few dozen side by side; a block's number stands for its whole path."""
    source, numbers, chains = random.Random(seed), iter(range(10**6)), []
    live = [[next(numbers)] for _ in range(40)]
    for _ in range(count):
        at = source.randrange(len(live))
        live[at] = live[at] + [next(numbers) for _ in range(source.randrange(3))]
        chains.append(live[at])
        if source.random() < 0.2:
            live[at] = live[at][: source.randrange(1, 3)]
    return chains


def lru_hits(chains, slots):
    """Least recently used, the end of a prefix first: another way to say what host memory does."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = []
    for chain in chains:
        hits.append(next((at for at, block in enumerate(chain) if block not in kept), len(chain)))
        for block in reversed(chain):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > slots:
            kept.popitem(last=False)
    return hits


@pytest.mark.parametrize("slots", [30, 100, 400])
def test_host_memory_alone_is_a_plain_lru_cache(slots):
    chains = sessions(slots)
    engine = replay(trace_of(chains), {HOST: slots}, host_policy="lru")
    assert [sum(found.values()) for found in engine.found] == lru_hits(chains, slots)
    assert engine.totals.tiers[HOST].prefix_blocks == sum(lru_hits(chains, slots)) > 0
    assert engine.totals.blocks == sum(map(len, chains)) + len(chains)  # with the last blocks, which hold a token each


@pytest.mark.parametrize("slots", [30, 100, 400])
def test_nothing_finds_more_than_the_optimum(slots):
    chains = sessions(slots)
    engine = replay(trace_of(chains), {HOST: slots})
    assert engine.totals.tiers[HOST].prefix_blocks <= sum(optimal_hits(chains, slots))


def test_bytes_are_counted_where_they_move():
    chains = [[1, 2, 3], [4, 5, 6], [1, 2, 3]]
    engine = replay(trace_of(chains), {HOST: 3, DISK: 10}, disable_disk_offload_filter=True)
    size = engine._machine.block_bytes
    tiers = engine.totals.tiers
    assert engine.found == [{}, {}, {DISK: 3}]
    assert tiers[DISK].written_bytes == 6 * size
    assert tiers[DISK].read_bytes == 3 * size
    assert tiers[HOST].read_bytes == 0
    assert tiers[HOST].written_bytes == (6 + 3) * size  # computed, and brought back from disk
    assert tiers[HOST].evicted_blocks == 6


def test_the_filter_writes_only_blocks_that_were_found_again():
    chains = [[1, 2], [3, 4], [1, 2], [5, 6]]
    engine = replay(trace_of(chains), {HOST: 10, DISK: 10})
    assert engine.totals.tiers[DISK].written_bytes == 2 * engine._machine.block_bytes


def test_the_filter_forgets_by_the_time_of_the_trace():
    # Each block is found three times; frequency 8 is asked for, and time passes between the requests.
    chains = [[1, 2]] * 4
    settings = {"disk_filter_threshold": 8, "disk_filter_decay_secs": 10}
    quick, slow = (replay(trace_of(chains, gap), {HOST: 10, DISK: 10}, **settings) for gap in (0.1, 30.0))
    assert quick.totals.tiers[DISK].written_bytes > 0
    assert slow.totals.tiers[DISK].written_bytes == 0


def test_blocks_of_the_engines_own_cache_are_not_looked_up():
    chains = [[1, 2, 3], [1, 2, 3], [7, 8, 9, 10, 11, 12], [1, 2, 3]]
    engine = replay(trace_of(chains), {HOST: 20}, device_blocks=6)
    assert engine.found == [{}, {}, {}, {HOST: 3}]
    assert engine.totals.tiers["device"].prefix_blocks == 3


def test_hits_shorten_the_expected_time_to_first_token():
    chain = list(range(400))
    engine = replay(trace_of([chain, chain]), {HOST: 500}, load="auto")
    first, second = engine.totals.ttft_seconds
    assert second < first / 4
    assert engine.totals.recompute_seconds[0] == first


def test_a_hit_that_is_slower_to_load_than_to_compute_is_found_and_not_loaded():
    chain = list(range(40))
    trace = trace_of([chain, chain])
    config = settings_of(trace, {}, [HOST])
    engine = SimulatedEngine(trace, config, {HOST: 100}, machine_of(trace, rates={HOST: Rate(1e6, 0.0)}))
    engine.run()
    assert engine.found == [{}, {HOST: 40}]
    assert engine.loaded == [0, 0]


@pytest.mark.parametrize("name", synthetic.NAMES)
def test_generated_workloads_are_the_same_every_time_and_reuse_blocks(name):
    first, second = (synthetic.generate(name) for _ in range(2))
    assert first == second
    assert first.requests == sorted(first.requests, key=lambda request: request.at)
    seen = set()
    reused = 0
    for request in first.requests:
        reused += sum(key in seen for key in request.keys)
        seen.update(request.keys)
    assert 0.05 < reused / first.blocks < 0.98
    assert 1000 < len(first.requests) < 40_000


def test_an_unknown_workload_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="expected one of agents"):
        synthetic.generate("nonsense")
