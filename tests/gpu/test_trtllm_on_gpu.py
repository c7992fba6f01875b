"""KVBM under the simulator of TensorRT-LLM, with a pool on a GPU that all ranks share and steps from CUDA graphs.

Every token of the simulated model depends on every byte of KV that it reads, so equal answers mean equal KV. A pass
takes half a millisecond longer than it would, which leaves the CPU a step ahead of the GPU: where a copy does not wait
for a pass, or a pass for a copy, the bytes are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from devices import ON_CUDA
from trtllm_sim.executor import Options
from trtllm_sim.launch import KVBM, differences, end_fork_server, run
from trtllm_sim.workload import Work

from tiernames import DISK

pytestmark = pytest.mark.gpu

WORK = Work(requests=200, cancel=0.2, seed=3)
# Most of a run's time is its start: eight processes in turn on a GPU end sooner than four and four.
AT_ONCE = 2 if ON_CUDA else 1

ENGINE = Options(ranks=4, device="cuda:0" if ON_CUDA else "cpu", layers=4, width=64, lag=1_000_000)
GRAPHS = replace(ENGINE, cuda_graphs=True)
# Blocks of some kilobytes are sooner computed than loaded; what is loaded here is loaded for the test's sake.
HOST = {"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "120", "KVBM_LOAD": "always"}
LATE = {"KVBM_INJECT_FAULTS": "slow-store:every=2"}
FAULTS = "load:rank=1:every=9,store:rank=2:every=11,disk-read:every=7,disk-flip:every=5,disk-write:every=6"


def scenarios(disk: str) -> dict[str, list[Options]]:
    """Engines that serve the same requests, one after the other."""
    beneath = {
        **HOST, "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "40", "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": "900",
        "DYN_KVBM_DISK_CACHE_DIR": disk, "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "1",
    }  # fmt: skip
    on_disk = replace(GRAPHS, connector=KVBM, env=beneath, blocks=24)
    late = replace(GRAPHS, connector=KVBM, env=HOST | LATE, store_delay=0.05, blocks=24)
    return {
        "alone": [replace(ENGINE, overlap=False, chunked=False)],
        "disk": [on_disk, replace(on_disk, env=beneath | {"KVBM_INJECT_FAULTS": FAULTS})],
        "host": [replace(ENGINE, connector=KVBM, env=HOST)],
        "graphs": [replace(GRAPHS, connector=KVBM, env=HOST, generation="1.3", layout=True)],
        "late": [late],
        "no fences": [replace(late, fences=False)],
        "killed": [replace(GRAPHS, connector=KVBM, env=HOST, kill=(2, 20))],
        "flipped": [replace(GRAPHS, corrupt=(3, 20))],
        "graphs alone": [GRAPHS],
    }


@pytest.fixture(scope="module")
def served(
    device: str, figure: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """What came of each engine of a scenario, by the scenario's name."""
    folder = tmp_path_factory.mktemp("disk")
    pool = ThreadPoolExecutor(AT_ONCE)
    ended = {name: pool.submit(_serve, engines) for name, engines in scenarios(str(folder)).items()}
    yield lambda name: ended[name].result()
    pool.shutdown(cancel_futures=True)
    for name, future in ended.items():
        if not future.cancelled() and future.exception() is None:
            for result in future.result():
                figure(f"{name}: {_describe(result)}")
    end_fork_server()


def _serve(engines: list[Options]) -> list[dict[str, Any]]:
    return [run(options, WORK, timeout=60) for options in engines]


def _describe(result: dict[str, Any]) -> str:
    text = f"{result['iterations']} steps, {result['replays']} from a graph, start {result['start_seconds']:.1f} s, "
    text += f"then {result['seconds']:.1f} s"
    if result["kvbm"] is None:
        return text
    counts = result["kvbm"]["counts"]
    loaded = ", ".join(f"{blocks} blocks from {tier}" for tier, blocks in counts.onboarded_blocks.items())
    failed = counts.failed_load_blocks
    return f"{text}; {counts.offloaded_blocks} blocks stored, {loaded or 'none'} loaded, {failed} not arrived"


def check(served: Callable[[str], list[dict[str, Any]]], result: dict[str, Any]) -> Any:
    """Every answer is right and nothing is left behind. Returns KVBM's counts."""
    [alone] = served("alone")
    assert differences(alone, result) == []
    assert len(result["outputs"]) == WORK.requests
    assert len(result["cancelled"]) > 20
    assert result["free_blocks"] == result["blocks"]
    kvbm = result["kvbm"]
    assert [kvbm[name] for name in ("requests", "offers", "set_backs", "pinned", "writing")] == [0] * 5
    return kvbm["counts"]


def test_blocks_from_host_memory_are_those_that_were_computed(served):
    [result] = served("host")
    assert sum(check(served, result).onboarded_blocks.values()) > 200
    assert result["kvbm"]["faults"] == {}
    assert result["replays"] == 0


def test_graphs_alone_answer_like_steps_that_are_launched(served):
    [alone], [result] = served("alone"), served("graphs alone")
    assert differences(alone, result) == []
    assert result["replays"] > 50


def test_steps_replayed_from_graphs_fill_blocks_and_read_those_that_came_back(served):
    [result] = served("graphs")
    assert sum(check(served, result).onboarded_blocks.values()) > 200
    assert result["kvbm"]["faults"] == {}
    assert result["replays"] > 50


def test_a_disk_beneath_and_whatever_happens_to_it(served):
    first, second = served("disk")
    assert sum(check(served, first).moved_blocks.values()) > 50
    counts = check(served, second)
    assert counts.onboarded_blocks[DISK] > 20
    assert counts.failed_load_blocks > 0
    assert second["replays"] > 50


def test_a_store_that_is_late_keeps_what_was_in_a_block_before_the_engine_gave_it_away(served):
    [result] = served("late")
    assert sum(check(served, result).onboarded_blocks.values()) > 50


def test_the_ranks_that_live_go_on_without_one_that_was_killed(served):
    [result] = served("killed")
    check(served, result)
    assert result["lost_ranks"] == result["kvbm"]["lost"] == [2]


def test_one_wrong_bit_of_kv_changes_an_answer(served):
    [alone], [result] = served("alone"), served("flipped")
    assert differences(alone, result)


def test_a_step_that_does_not_wait_for_a_copy_changes_an_answer(served):
    [alone], [result] = served("alone"), served("no fences")
    assert differences(alone, result)
