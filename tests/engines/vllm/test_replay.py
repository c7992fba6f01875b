"""A record of a real vLLM, replayed by the simulator: every lookup finds the blocks that it found in the engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engines import BLOCK, do, generate, prompt

from kvbm.simulate.engine import SimulatedEngine
from kvbm.simulate.sweep import machine_of, settings_of
from kvbm.simulate.trace import read

pytestmark = pytest.mark.engine

HOST_BLOCKS, DISK_BLOCKS = 40, 60
POLICY = {"always": "session", "auto": "lru"}
ENGINE = {"num_gpu_blocks_override": 25, "max_model_len": 512, "max_num_batched_tokens": 512}


def conversations(seed: int, users: int, turns: int) -> list[list[list[int]]]:
    """Batches of prompts: users with a common head, in turns that grow at the tail, in a random order."""
    source = random.Random(seed)
    head = prompt(seed, 2 * BLOCK)
    history = {user: head + prompt(seed * 100 + user, source.randrange(1, 4) * BLOCK) for user in range(users)}
    batches = []
    for turn in range(users * turns // 2):
        asking = source.sample(range(users), source.randrange(1, 4))
        batches.append([list(history[user]) for user in asking])
        for user in asking:
            history[user] += prompt(turn * 1000 + user, source.randrange(8, 2 * BLOCK))
            history[user] = history[user][: 10 * BLOCK]
    return batches


@pytest.fixture(scope="module", params=["always", "auto"])
def record(request, run_scenario, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    steps = [generate(*batch, max_tokens=5) for batch in conversations(7, users=8, turns=8)]
    steps[8:8] = [do("reset", connector=True)]
    kvbm = {
        "cpu_cache_override_num_blocks": HOST_BLOCKS, "disk_cache_override_num_blocks": DISK_BLOCKS,
        "disk_cache_dir": str(tmp_path_factory.mktemp("disk")), "load": request.param,
        "enable_record": True, "record_dir": str(folder), "host_policy": POLICY[request.param],
        "disk_policy": POLICY[request.param],
    }  # fmt: skip
    run_scenario([*steps, do("drain")], kvbm, ENGINE)
    (path,) = folder.glob("*.jsonl")
    return path


def replay(record: Path, **sizes: int) -> SimulatedEngine:
    trace = read([record])
    assert trace.is_exact
    slots = {**trace.slots, **sizes}
    engine = SimulatedEngine(trace, settings_of(trace, {}, slots), slots, machine_of(trace))
    engine.run(exact=not sizes)
    return engine


def test_every_lookup_finds_the_blocks_that_it_found_in_the_engine(record):
    trace = read([record])
    lines = sorted((line for request in trace.requests for line in request.lookups), key=lambda line: line.order)
    assert len(lines) > 40
    engine = replay(record)
    assert engine.found == [line.found for line in lines]
    assert engine.loaded == [line.loaded for line in lines]
    tiers = [tier for tier in trace.slots if any(tier in line.found for line in lines)]
    assert tiers == list(trace.slots)  # or the comparison would say little
    assert engine.totals.tiers[tiers[0]].evicted_blocks > 20


def test_a_larger_tier_finds_at_least_as_much_and_a_smaller_one_less(record):
    near = next(iter(read([record]).slots))
    found = [sum(sum(found.values()) for found in replay(record, **{near: slots}).found) for slots in (4, 2000)]
    assert found[0] < found[1]
