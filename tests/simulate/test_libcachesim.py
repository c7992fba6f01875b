"""LRU and ARC beside libcachesim, an independent simulator of caches, on the same requests.

The two models overlap where a block counts as a hit wherever it lies in a prompt, and where the blocks of a prompt are
used from its end to its front: so the last one is the oldest, as in KVBM. `make test-simulate` installs libcachesim.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbm.simulate import synthetic
from kvbm.simulate.engine import SimulatedEngine
from kvbm.simulate.sweep import machine_of, settings_of
from kvbm.simulate.trace import read
from tiernames import HOST

libcachesim = pytest.importorskip("libcachesim")

# A trace in Mooncake's format; without it generated workloads alone are compared.
TRACE = os.environ.get("KVBM_TEST_TRACE", "")


def trace_named(name):
    return read([Path(name)], whole_blocks=True) if os.path.exists(name) else synthetic.generate(name)


def other_hit_rate(policy, trace, slots):
    cache = policy(cache_size=slots)
    numbers, hits, blocks = {}, 0, 0
    for request in trace.requests:
        for key in reversed(request.keys):
            number = numbers.setdefault(key, len(numbers))
            hits += cache.get(libcachesim.Request(obj_id=number, obj_size=1))
            blocks += 1
    return hits / blocks


@pytest.mark.parametrize("slots", [3000, 10_000, 30_000])
@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("name", [*([TRACE] if TRACE else []), "chat", "rag"], ids=os.path.basename)
def test_both_find_the_same_part_of_all_blocks(name, policy, slots):
    trace = trace_named(name)
    settings = {"host_policy": policy, "load": "always"}
    engine = SimulatedEngine(trace, settings_of(trace, settings, [HOST]), {HOST: slots}, machine_of(trace))
    engine.run()
    blocks = sum(len(request.keys) for request in trace.requests)
    ours = engine.totals.tiers[HOST].blocks / blocks
    theirs = other_hit_rate({"lru": libcachesim.LRU, "arc": libcachesim.ARC}[policy], trace, slots)
    print(f"{name} {policy} {slots}: {ours:.4f}, libcachesim {theirs:.4f}")
    assert abs(ours - theirs) <= 0.01
