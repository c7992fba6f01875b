"""An adapter is the weights that were loaded, wherever they came from and however often."""

from __future__ import annotations

import pytest
from adapter_files import write_adapter, write_hub_adapter
from engines import do, generate, prompt

pytestmark = pytest.mark.engine

BLOCKS = 3
PROMPTS = {
    name: prompt(i, 32 * BLOCKS + 8)
    for i, name in enumerate(("home", "hub", "early", "same", "reload", "evict", "stale", "fly", "other"), start=500)
}
HOST = {"cpu_cache_override_num_blocks": 256}
ENGINE = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 8, "max_model_len": 512}
RANKS = {"tensor_parallel_size": 2}
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
OLD, NEW = 1, 2  # seeds


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Folders that no test changes."""
    return {seed: write_adapter(tmp_path_factory.mktemp("seed"), seed) for seed in (OLD, NEW)}


@pytest.fixture(scope="module")
def alone(baseline, seeds):
    """Tokens of vLLM without KVBM, by (prompt, seed)."""
    names = list(PROMPTS)
    found = {}
    for seed, folder in seeds.items():
        tokens = baseline([PROMPTS[name] for name in names], 16, ENGINE, lora=[["a", 1, folder]])
        found |= {(name, seed): [each] for name, each in zip(names, tokens, strict=True)}
    assert all(found[name, OLD] != found[name, NEW] for name in names)
    return found


def ask(name, adapter, **options):
    return generate(PROMPTS[name], name=name, lora=[adapter], **options)


def test_after_a_restart_an_adapter_is_found_by_its_weights_alone(run_scenario, seeds, alone, tmp_path, monkeypatch):
    """The second engine finds other weights under a path with ~ and under a hub id, and weights that the first engine
    did not have in memory when their files were already there."""
    kvbm = {
        **HOST,
        "disk_cache_override_num_blocks": 256,
        "disk_cache_dir": str(tmp_path / "disk"),
        "disable_disk_offload_filter": True,
    }
    hub, home = tmp_path / "hub", tmp_path / "home"
    (tmp_path / "disk").mkdir()
    options = {"env": {"HOME": str(home)}, "patch": {"huggingface_hub.constants:HF_HUB_CACHE": str(hub)}}
    engine = {**ENGINE, "max_cpu_loras": 4}
    adapters = {
        "home": ["home", 1, "~/adapter"],
        "hub": ["hub", 2, "some/adapter"],
        "early": ["early", 3, str(tmp_path / "early")],
        "same": ["same", 4, str(tmp_path / "same")],
    }
    for folder in ("home/adapter", "early", "same"):
        write_adapter(tmp_path / folder, OLD)
    write_hub_adapter(hub, "some/adapter", "a" * 40, OLD)
    requests = [ask(name, adapter) for name, adapter in adapters.items()]
    early = [
        do("add_lora", adapter=adapters["early"]),
        do("replace", folder=str(tmp_path / "early"), source=seeds[NEW]),
    ]
    first = run_scenario([*early, *requests, do("drain"), do("state", "end")], kvbm, engine, **options)
    for name in adapters:
        assert first.tokens(name) == alone[name, OLD], name
    assert first["end"]["spilled"] == 4 * BLOCKS

    write_adapter(home / "adapter", NEW)
    write_hub_adapter(hub, "some/adapter", "b" * 40, NEW)
    second = run_scenario([*requests, do("drain"), do("state", "end")], kvbm, engine, **options)
    for name in ("home", "hub", "early"):
        assert second.tokens(name) == alone[name, NEW], name
        assert second[name]["cached"] == [0]
    assert second.tokens("same") == alone["same", OLD]
    assert second["same"]["cached"] == [32 * BLOCKS]
    assert second["end"]["from_disk"] == BLOCKS
    assert second["end"]["faults"] == {}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mode", "ranks"), [("sync", 1), pytest.param("async", 1, marks=pytest.mark.long), ("sync", 2)]
)
def test_new_weights_of_an_adapter_are_another_adapter(mode, ranks, run_scenario, seeds, alone, tmp_path):
    reloaded, evicted, stale, other = (
        [name, number, write_adapter(tmp_path / name, OLD)]
        for number, name in enumerate(("reload", "evict", "stale", "other"), start=1)
    )

    def load(adapter, seed):
        return [do("replace", folder=adapter[2], source=seeds[seed]), do("add_lora", adapter=adapter, in_place=True)]

    steps = [
        # Loaded again in place, after which vLLM's own prefix cache is reset; then with the first weights once more.
        ask("reload", reloaded),
        do("drain"),
        *load(reloaded, NEW),
        do("reset"),
        generate(PROMPTS["reload"], name="new weights", lora=[reloaded]),
        do("drain"),
        do("state", "reloaded"),
        *load(reloaded, OLD),
        do("reset"),
        generate(PROMPTS["reload"], name="old weights", lora=[reloaded]),
        do("drain"),
        do("state", "as before"),
        # Dropped from vLLM's CPU cache, and read again from other files.
        ask("evict", evicted),
        ask("other", other),
        do("replace", folder=evicted[2], source=seeds[NEW]),
        do("drain"),
        do("reset"),
        generate(PROMPTS["evict"], name="evicted", lora=[evicted]),
        do("drain"),
        do("reset"),
        generate(PROMPTS["evict"], name="evicted again", lora=[evicted]),
        do("drain"),
        do("reset"),
        generate(PROMPTS["evict"], name="kept again", lora=[evicted]),
        # Without a reset vLLM itself goes on from blocks of the old weights. Nothing of that may be kept.
        generate(PROMPTS["stale"][: 32 * BLOCKS], lora=[stale], max_tokens=1),
        do("drain"),
        *load(stale, NEW),
        generate(PROMPTS["stale"], name="goes on", lora=[stale]),
        do("drain"),
        do("reset"),
        ask("stale", stale),
        do("state", "end"),
    ]
    engine = {**ENGINE, **(RANKS if ranks == 2 else {})}
    story = run_scenario(steps, {**HOST, "onboard": mode}, engine, TWO_RANKS if ranks == 2 else None)
    assert story.tokens("reload") == story.tokens("old weights") == alone["reload", OLD]
    assert story.tokens("new weights") == alone["reload", NEW]
    assert story["reloaded"]["onboarded"] == 0
    # With several ranks the leader hears of the new weights with the first step that needs them.
    assert story["as before"]["onboarded"] == (BLOCKS if ranks == 1 else 0)
    assert story.tokens("evict") == alone["evict", OLD]
    for name in ("evicted", "evicted again", "kept again"):
        assert story.tokens(name) == alone["evict", NEW], name
    assert story["kept again"]["cached"] == [32 * BLOCKS]
    assert story["goes on"]["cached"] == [32 * BLOCKS]  # or the next line shows nothing
    assert story.tokens("stale") == alone["stale", NEW]
    assert story["end"]["faults"] == {}


def test_a_request_in_flight_keeps_nothing_from_the_reload_of_its_adapter_on(run_scenario, seeds, tmp_path):
    adapter = ["fly", 1, write_adapter(tmp_path / "fly", OLD)]
    flight = {"prompts": [PROMPTS["fly"]], "max_tokens": 100, "lora": [adapter]}
    steps = [
        do("add", names=["first"], **flight),
        do("step", times=4),
        do("drain_stores"),
        do("state", "before"),
        do("replace", folder=adapter[2], source=seeds[NEW]),
        do("add_lora", adapter=adapter, in_place=True),
        do("finish", "mixed"),
        do("drain"),
        do("state", "after"),
        do("replace", folder=adapter[2], source=seeds[OLD]),
        do("add_lora", adapter=adapter, in_place=True),
        do("reset"),
        do("add", names=["second"], **flight),
        do("finish", "whole"),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, HOST, ENGINE)
    assert story["before"]["offloaded"] == story["after"]["offloaded"] == BLOCKS
    assert story["mixed"]["first"] != story["whole"]["second"]
    assert story["end"]["onboarded"] == BLOCKS
    assert story["end"]["offloaded"] == (len(PROMPTS["fly"]) + 99) // 32


@pytest.mark.long
def test_two_ranks_find_the_blocks_of_an_adapter_again(run_scenario, seeds, alone, tmp_path):
    kvbm = {
        **HOST,
        "disk_cache_override_num_blocks": 256,
        "disk_cache_dir": str(tmp_path),
        "disable_disk_offload_filter": True,
    }
    steps = [ask("same", ["same", 1, seeds[OLD]]), do("drain"), do("state", "end")]
    stories = [run_scenario(steps, kvbm, {**ENGINE, **RANKS}, TWO_RANKS) for _ in range(2)]
    assert [story.tokens("same") for story in stories] == [alone["same", OLD]] * 2
    assert [story["end"]["from_disk"] for story in stories] == [0, BLOCKS]
