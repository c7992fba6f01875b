"""Training loops: an engine sleeps, wakes up, is paused and reset and gets new weights, while KVBM stores and loads."""

from __future__ import annotations

import shutil

import pytest
from engines import do, generate, prompt

pytestmark = [pytest.mark.engine]

PROMPT, BLOCKS = prompt(1, 200), 6
CACHE = {"cpu_cache_override_num_blocks": 256}
FILE = "model.safetensors"


def call(what, name=None, **arguments):
    return do("call", name, target=f"sleeping:{what}", **arguments)


@pytest.fixture(scope="module")
def other(model, tmp_path_factory):
    """A folder with other weights of the same model."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(model, folder)
    tensors = load_file(folder / FILE)
    tensors["model.layers.0.input_layernorm.weight"] *= -1.5
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def is_idle(state):
    return not any(state[name] for name in ("requests", "pinned", "writing", "busy", "faults"))


def test_an_engine_sleeps_and_wakes_up_while_blocks_are_stored(run_scenario, baseline, other, tmp_path):
    """vLLM's worker for CPUs ignores the call, so its memory stays; all else is as on a GPU."""
    disk = {"disk_cache_gb": 1, "disk_cache_dir": str(tmp_path), "disable_disk_offload_filter": True}
    steps = [
        do("faults", rules="slow-store"),
        do("hold_stores"),
        generate(PROMPT, name="before"),
        call("sleep", "light", level=1),
        do("state", "asleep"),
        call("wake"),
        do("mend"),
        do("faults", rules=""),
        generate(PROMPT, name="awake"),
        do("drain"),
        do("reset"),
        generate(PROMPT, name="loaded"),
        do("drain"),
        do("faults", rules="slow-store"),
        do("hold_stores"),
        generate(prompt(2, 200)),
        call("sleep", "deep", level=2),
        call("wake"),
        do("mend"),
        do("faults", rules=""),
        do("load_weights", checkpoint=str(other / FILE)),
        generate(PROMPT, name="new weights"),
        do("drain"),
        do("reset"),
        generate(PROMPT, name="new weights, loaded"),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, {**CACHE, **disk})
    (old,), (new,) = baseline([PROMPT]), baseline([PROMPT], engine={"model": str(other)})
    assert old != new
    assert (story["light"], story["deep"]) == (True, True)
    assert story["asleep"]["published"] == 0  # vLLM's sleep forgets every block
    assert [story.tokens(name)[0] for name in ("before", "awake", "loaded")] == [old] * 3
    assert [story.tokens(name)[0] for name in ("new weights", "new weights, loaded")] == [new] * 2
    assert story["loaded"]["cached"] == story["new weights, loaded"]["cached"] == [BLOCKS * 32]
    assert is_idle(story["end"])


def test_new_weights_in_a_paused_engine_leave_nothing_of_the_old_ones(run_scenario, baseline, other):
    steps = [
        generate(PROMPT),
        do("drain"),
        do("add", names=["goes on"], prompts=[prompt(3, 150)], max_tokens=40),
        do("step", times=6),
        do("pause", state="PAUSED_ALL"),
        do("load_weights", checkpoint=str(other / FILE)),
        do("reset", "reset", running=True, connector=True),
        do("pause", state="UNPAUSED"),
        do("finish"),
        generate(PROMPT, name="new"),
        do("drain"),
        do("reset"),
        generate(PROMPT, name="loaded"),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, dict(CACHE))
    (new,) = baseline([PROMPT], engine={"model": str(other)})
    assert story["reset"] is True
    assert story.tokens("new") == story.tokens("loaded") == [new]
    assert story["loaded"]["cached"] == [BLOCKS * 32]
    assert is_idle(story["end"])


@pytest.mark.matrix
@pytest.mark.parametrize("connector", [False, True], ids=["of vLLM", "of KVBM too"])
def test_a_reset_withdraws_the_loads_that_are_under_way(run_scenario, baseline, connector):
    """One of a request that waits, and one of a request that is gone, beside a request that runs."""
    other = prompt(3, 60)
    steps = [
        generate(PROMPT),
        do("drain"),
        do("reset"),
        do("add", names=["runs"], prompts=[other], max_tokens=40),
        do("step", times=4),
        do("faults", rules="slow"),
        do("hold_stores"),  # and loads
        do("add", names=["waits", "gone"], prompts=[PROMPT, PROMPT]),
        do("step", times=2),
        call("loads_under_way", "loads"),
        do("abort", names=["gone"]),
        do("reset", "reset", running=True, connector=connector),
        do("step", times=4),
        do("state", "held"),
        do("mend"),
        do("faults", rules=""),
        do("finish", "answers"),
        do("drain"),
        do("reset"),
        generate(PROMPT, name="again"),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, {**CACHE, "onboard": "async"})
    assert story["loads"] is True
    assert story["reset"] is True
    # No request gets blocks while a load may still write to them.
    held = story["held"]
    assert held["engine_blocks_free"] == 255
    (wanted,) = baseline([PROMPT])
    assert story["answers"] == {"waits": wanted, "runs": baseline([other], 40)[0]}
    assert story.tokens("again") == [wanted]
    assert story["again"]["cached"] == [BLOCKS * 32]
    assert is_idle(story["end"])


def test_new_weights_beside_a_load_leave_nothing_of_the_old_ones(run_scenario, baseline, other):
    steps = [
        generate(PROMPT),
        do("drain"),
        do("reset"),
        do("faults", rules="slow"),
        do("hold_stores"),  # and loads
        do("add", names=["waits"], prompts=[PROMPT]),
        do("step"),
        call("loads_under_way", "loads"),
        do("pause", state="PAUSED_ALL"),
        do("load_weights", checkpoint=str(other / FILE)),
        do("reset", "reset", running=True, connector=True),
        do("pause", state="UNPAUSED"),
        do("mend"),
        do("faults", rules=""),
        do("finish", "answers"),
        do("drain"),
        do("reset"),
        generate(PROMPT, name="loaded"),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, {**CACHE, "onboard": "async"})
    (old,), (new,) = baseline([PROMPT]), baseline([PROMPT], engine={"model": str(other)})
    assert old != new
    assert (story["loads"], story["reset"]) == (True, True)
    assert story["answers"] == {"waits": new}
    assert story.tokens("loaded") == [new]
    assert story["loaded"]["cached"] == [BLOCKS * 32]
    assert is_idle(story["end"])


def test_an_engine_of_another_process_pauses_beside_loads(run_scenario, baseline):
    """vLLM's pause waits for the load, and its request holds blocks then without having been in a step."""
    steps = [generate(PROMPT), call("pause_beside_loads", "answers", prompt=PROMPT, times=2)]
    kvbm = {**CACHE, "onboard": "async", "inject_faults": "slow"}
    story = run_scenario(steps, kvbm, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert story["answers"] == baseline([PROMPT]) * 2


def test_an_engine_of_another_process_sleeps_beside_loads(run_scenario, baseline):
    ways = [[1, "abort"], [2, "abort"], [1, "keep"], [2, "keep"], [1, "wait"]]
    steps = [generate(PROMPT), call("sleep_beside_loads", "story", prompt=PROMPT, ways=ways)]
    kvbm = {**CACHE, "onboard": "async", "inject_faults": "slow"}
    story = run_scenario(steps, kvbm, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    (wanted,) = baseline([PROMPT])
    assert story["story"] == {"errors": [], "kept": [wanted] * 3, "after": [wanted] * 5}
