"""A host tier that outlives the engine, under vLLM's own scheduler and under a real vLLM."""

from __future__ import annotations

import random
import shutil

import pytest
from engines import EngineFailedError, do, generate, numbers, prompt

from kvbm.tiers.disk import inspect as caches
from tiernames import DISK, HOST

pytestmark = pytest.mark.engine


# -- vLLM's scheduler over a model made of numbers --------------------------------------------------------------------


@pytest.fixture
def make_engine(make_clockwork, monkeypatch, tmp_path):
    monkeypatch.setattr("kvbm.tiers.host.open.PATIENCE_SECONDS", 0.1)
    kept = {"host_persist": True, "host_persist_dir": str(tmp_path)}
    return lambda kvbm=None, **options: make_clockwork({**kept, **(kvbm or {})}, heir=True, **options)


PROMPT = numbers(1, 42)  # of ten blocks and a half


def ask(engine, name):
    engine.add(name, PROMPT)
    engine.run()
    engine.check()
    return engine.onboarded


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_what_was_kept_is_in_host_memory_after_a_restart(overlap, ranks, make_engine):
    first = make_engine(overlap=overlap, ranks=ranks)
    assert ask(first, "first") == 0
    published = first.pool.published
    first.close()
    second = make_engine(overlap=overlap, ranks=ranks)
    assert second.pool.published == published > 10
    second.check_pool()
    assert ask(second, "second") == 10
    second.check_idle()


def test_without_the_setting_nothing_is_left(make_engine, tmp_path):
    ask(make_engine({"host_persist": False}), "first")
    assert list(tmp_path.iterdir()) == []


def test_blocks_that_have_been_evicted_are_not_looked_for(make_engine):
    small = {"cpu_cache_override_num_blocks": 12}
    first = make_engine(small)
    ask(first, "first")
    for i in range(3):
        first.add(f"other{i}", numbers(10 + i, 42), 1)
        first.run()
    there = set(first.pool.findable)
    first.close()
    second = make_engine(small)
    assert set(second.pool.findable) == there
    assert ask(second, "second") == 0
    second.check_idle()


def test_a_block_that_was_damaged_meanwhile_is_computed_again(make_engine, tmp_path):
    first = make_engine()
    request = first.add("first", PROMPT)
    first.run()
    slot = first.pool.find(request.block_hashes[4])
    first.close()
    (place,) = caches.find(tmp_path)
    size = caches.describe(place).slot_bytes
    with open(place / "rank-0.slab", "r+b") as slab:
        slab.seek(slot * size + 100)
        byte = slab.read(1)[0]
        slab.seek(-1, 1)
        slab.write(bytes([byte ^ 4]))
    second = make_engine()
    assert ask(second, "second") == 4
    second.check_idle()


def test_a_cleared_cache_is_not_found_by_the_next_engine(make_engine):
    first = make_engine()
    ask(first, "first")
    first.scheduler.reset_prefix_cache(reset_connector=True)
    ask(first, "second")
    first.close()
    second = make_engine()
    assert second.pool.published == 0
    assert ask(second, "third") == 0


def test_a_second_engine_has_a_host_tier_of_its_own(make_engine, caplog):
    first = make_engine()
    ask(first, "first")
    second = make_engine()
    assert "this engine's host tier will not survive a restart" in caplog.text
    assert "KVBM_HOST_PERSIST_DIR" in caplog.text
    assert ask(second, "second") == 0
    assert second.pool.published > 0  # it has one all the same
    second.close()
    first.close()
    assert ask(make_engine(), "third") == 10


def test_another_models_memory_is_left_alone(make_engine, tmp_path):
    first = make_engine()
    ask(first, "first")
    first.close()
    (place,) = caches.find(tmp_path)
    other = place.with_name("kvbm-another-0123456789abcdef")
    shutil.copytree(place, other)
    before = {file.name: file.read_bytes() for file in other.iterdir()}
    assert ask(make_engine(), "second") == 10
    assert {file.name: file.read_bytes() for file in other.iterdir()} == before


def test_what_a_failed_load_has_tainted_is_not_found_by_the_next_engine(make_engine):
    first = make_engine({"inject_faults": "load:every=1", "onboard": "async"})
    ask(first, "first")
    first.forget()
    ask(first, "second")  # its load fails, and whatever was being stored meanwhile is in doubt
    assert first.counts.failed_load_blocks > 0
    there = set(first.pool.findable)
    first.close()
    second = make_engine()
    assert set(second.pool.findable) == there
    ask(second, "third")
    second.check_idle()


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_of_engines_end_with_the_right_tokens(seed, make_engine):
    chance = random.Random(seed)
    for number in range(4):
        faults = chance.choice(["", "load:every=4", "store:every=3"])
        kvbm = {"cpu_cache_override_num_blocks": 30, "inject_faults": faults, "onboard": "async" if faults else "auto"}
        engine = make_engine(kvbm, overlap=seed % 2 == 1)
        for i in range(8):
            engine.add(f"{number}-{i}", numbers(chance.randrange(3), chance.randrange(8, 60)), 4)
            if chance.random() < 0.5:
                engine.run()
            if chance.random() < 0.3:
                engine.forget()
        engine.run()
        engine.check()
        engine.check_pool()
        engine.close()


def test_disk_and_host_are_both_there_again(make_engine, tmp_path):
    disk = {
        "disk_cache_override_num_blocks": 200,
        "disk_cache_dir": str(tmp_path / "disk"),
        "disable_disk_offload_filter": True,
        "cpu_cache_override_num_blocks": 12,
    }
    first = make_engine(disk)
    ask(first, "first")
    first.add("other", numbers(2, 42), 1)
    first.run()
    first.close()
    second = make_engine(disk)
    assert second.pool.published == 12
    second.add("second", PROMPT)
    second.add("third", numbers(2, 42))
    second.run()
    second.check()
    assert second.counts.onboarded_blocks[DISK] > 0
    assert second.counts.onboarded_blocks[HOST] > 0
    second.check_idle()


# -- a real vLLM ------------------------------------------------------------------------------------------------------

PROMPTS = [prompt(40 + i, 400) for i in range(4)]  # of twelve blocks and a bit
RANKS = {"engine": {"tensor_parallel_size": 2}, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}


@pytest.mark.parametrize(("end", "ranks"), [("kill", 1), ("stop", 2)])
def test_prompts_come_back_from_host_memory_after_the_end_of_an_engine(end, ranks, run_scenario, baseline, tmp_path):
    wanted = baseline(PROMPTS)
    options = RANKS if ranks == 2 else {}
    kvbm = {"cpu_cache_override_num_blocks": 128, "host_persist": True, "host_persist_dir": str(tmp_path)}
    first = [generate(*PROMPTS, name="cold"), do("drain")]
    if end == "kill":
        with pytest.raises(EngineFailedError, match="status -9"):
            run_scenario([*first, do("wait_for_index"), do("kill")], kvbm, **options)
    else:
        assert run_scenario(first, kvbm, **options).tokens("cold") == wanted
    steps = [generate(*PROMPTS, name="again"), do("drain"), do("state", "end"), do("metrics", "metrics")]
    story = run_scenario(steps, kvbm, **options)
    assert story.tokens("again") == wanted
    assert story["end"]["onboarded"] == story["metrics"]["kvbm_onboard_blocks_h2d"] == 48
    assert story["end"]["from_disk"] == 0
    assert story["end"]["faults"] == {}
    assert story.said("blocks are there from before, 0 were not whole")
