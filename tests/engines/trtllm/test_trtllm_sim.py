"""KVBM under the simulator of TensorRT-LLM: whatever happens, the answers are those of the engine alone.

The model's every token depends on every byte of KV it reads, so equal answers mean equal KV. What was run against the
engine itself is said in docs/tensorrt-llm.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from trtllm_sim.executor import Options
from trtllm_sim.launch import KVBM, SimulationError, differences, run
from trtllm_sim.workload import Work

from tiernames import DISK

pytestmark = [pytest.mark.simulated, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[3]
# Blocks of a kilobyte are sooner computed than loaded; what is loaded here is loaded for the test's sake.
HOST = {"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "120", "KVBM_LOAD": "always"}
RANDOM = Work(requests=200, cancel=0.2)
SHORT = Work(requests=80, cancel=0.2, seed=2)

_alone: dict[str, dict] = {}


def alone(work):
    """The engine's answers without a connector: steps that neither overlap nor are cut into chunks."""
    if repr(work) not in _alone:
        _alone[repr(work)] = run(Options(ranks=2, overlap=False, chunked=False), work)
    return _alone[repr(work)]


def serve(work, faults="", ranks=4, timeout=300, **options):
    env = {**HOST, **options.pop("env", {})}
    if faults:
        env["KVBM_INJECT_FAULTS"] = faults
    return run(Options(ranks=ranks, connector=KVBM, env=env, **options), work, timeout)


def counts(result):
    return result["kvbm"]["counts"]


def onboarded(result):
    return sum(counts(result).onboarded_blocks.values())


def check(work, result):
    """Every answer is right, and nothing is left behind."""
    assert differences(alone(work), result) == []
    assert result["free_blocks"] == result["blocks"]
    kvbm = result["kvbm"]
    assert {name: kvbm[name] for name in ("requests", "offers", "set_backs", "pinned", "writing")} == {
        "requests": 0, "offers": 0, "set_backs": 0, "pinned": 0, "writing": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"generation": "1.0"},
        {"generation": "1.2", "chunked": False},
        {"generation": "1.2", "overlap": False, "partial_reuse": True},
        {"generation": "1.3", "layout": True},
    ],
    ids=["1.0", "1.2-whole-prompts", "1.2-plain-steps-partial-reuse", "1.3-regions"],
)
def test_two_hundred_random_requests_are_answered_as_by_the_engine_alone(options):
    result = serve(RANDOM, **options)
    check(RANDOM, result)
    assert len(result["outputs"]) == 200
    assert len(result["cancelled"]) > 20
    assert onboarded(result) > 200
    assert result["kvbm"]["faults"] == {}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"partial_reuse": True, "faults": "slow-store:every=2", "store_delay": 0.02},
        {"faults": "load:rank=1:every=4"},
    ],
    ids=["plain", "stores-that-are-late", "loads-that-fail"],
)
def test_an_engine_that_puts_off_takes_less_and_takes_back(options):
    """As the second cache manager of 1.3 does."""
    result = serve(SHORT, generation="1.3", layout=True, speculate=0.3, ranks=2, **options)
    check(SHORT, result)
    assert onboarded(result) > 50


def test_one_wrong_bit_of_kv_changes_an_answer():
    assert differences(alone(SHORT), run(Options(ranks=4, corrupt=(3, 10)), SHORT))


def test_blocks_that_are_wrong_and_claim_to_be_right_change_an_answer():
    assert differences(alone(SHORT), serve(SHORT, faults="zeros:rank=2:every=5"))


@pytest.mark.parametrize("faults", ["load:rank=2:every=5", "load:every=3"])
def test_blocks_that_do_not_arrive_are_computed(faults):
    result = serve(SHORT, faults=faults)
    check(SHORT, result)
    assert counts(result).failed_load_blocks > 10


def test_a_load_that_fails_while_nothing_else_runs_is_computed():
    work = Work(requests=24, conversations=3, seed=4)
    result = serve(work, faults="load:rank=1:every=2", max_batch=1, blocks=22)
    check(work, result)
    assert counts(result).failed_load_blocks > 3


def test_a_load_that_is_late_does_not_write_to_blocks_of_a_request_that_was_cancelled():
    work = Work(requests=120, cancel=0.5, seed=5)
    result = serve(work, faults="slow:every=2", load_delay=0.02, blocks=24)
    check(work, result)
    assert onboarded(result) > 50


@pytest.mark.parametrize("partial_reuse", [False, True])
def test_a_store_that_is_late_keeps_what_was_in_a_block_before_the_engine_gave_it_away(partial_reuse):
    """With partial reuse the engine writes to a block before anybody hears of its new owner."""
    work = Work(requests=120, seed=7, conversations=16, prefixes=8)
    result = serve(work, faults="slow-store:every=2", store_delay=0.05, partial_reuse=partial_reuse, blocks=24)
    check(work, result)
    assert onboarded(result) > 50


@pytest.mark.parametrize(
    ("host", "faults"),
    [
        (40, "disk-read:every=5,load:rank=1:every=9"),
        pytest.param(40, "disk-flip:every=7,disk-write:every=6", marks=pytest.mark.long),
        (0, "disk-torn:every=5,disk-slow-read:every=9:seconds=0.1"),
    ],
    ids=["reads-and-loads", "bits-and-writes", "disk-alone-torn-and-slow"],
)
def test_a_disk_beneath_and_whatever_happens_to_it(tmp_path, host, faults):
    disk = {
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(host), "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": "900",
        "DYN_KVBM_DISK_CACHE_DIR": str(tmp_path), "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "1",
        "KVBM_DISK_BOUNCE_MB": "1",
    }  # fmt: skip
    first = serve(RANDOM, env=disk, blocks=24)
    check(RANDOM, first)
    assert sum(counts(first).moved_blocks.values()) > 50
    # The next engine finds them.
    second = serve(RANDOM, faults=faults, env=disk, blocks=24)
    check(RANDOM, second)
    assert counts(second).onboarded_blocks[DISK] > 20
    assert second["reused_tokens"] + counts(second).matched_tokens > first["reused_tokens"]


def test_stores_that_fail_are_not_found():
    result = serve(SHORT, faults="store:rank=3:every=2")
    check(SHORT, result)
    assert counts(result).failed_store_blocks > 10


def test_the_ranks_that_live_go_on_without_one_that_was_killed():
    result = serve(SHORT, faults="slow:rank=1", kill=(1, 20))
    check(SHORT, result)
    assert result["lost_ranks"] == result["kvbm"]["lost"] == [1]
    assert result["kvbm"]["faults"]["rank 1: lost"] == 1
    assert result["loaded_requests"]


def test_a_rank_that_hangs_is_caught_by_the_watchdog():
    with pytest.raises(SimulationError):
        serve(SHORT, ranks=2, hang=1, timeout=4)


def test_lora_adapters_do_not_share_blocks():
    work = replace(SHORT, loras=6, prefixes=1)
    result = serve(work, blocks=24)
    check(work, result)
    assert onboarded(result) > 100


def test_salts_do_not_share_blocks():
    """The same conversations, once all of one tenant, once each of a tenant of its own."""
    shared = replace(SHORT, cancel=0.0, prefixes=1, salts=1)
    apart = replace(shared, salts=shared.conversations)
    one, many = (serve(work, generation="1.3", ranks=2) for work in (shared, apart))
    check(shared, one)
    check(apart, many)
    assert counts(many).offloaded_blocks > 1.2 * counts(one).offloaded_blocks


def test_blocks_of_low_priority_are_not_kept():
    work = replace(SHORT, cancel=0.0, priority=20)
    threshold = {"DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": "30"}
    assert counts(serve(work, ranks=2, generation="1.3", env=threshold)).offloaded_blocks == 0
    # Without a wish of the request's, the engine's default holds, which is 35.
    assert counts(serve(replace(work, priority=None), ranks=2, generation="1.3", env=threshold)).offloaded_blocks > 50


def test_blocks_that_decoding_fills_are_kept_unless_told_otherwise():
    work = Work(requests=24, conversations=2, turn_tokens=2, answer_tokens=16, seed=6)
    kept, less = (serve(work, ranks=2, env={"KVBM_OFFLOAD_DECODE": switch}) for switch in ("1", "0"))
    check(work, kept)
    check(work, less)
    assert counts(kept).offloaded_blocks > counts(less).offloaded_blocks


@pytest.mark.long  # goes by times; test_trtllm_lifecycle.py checks the decision itself
@pytest.mark.parametrize(("pace", "loads"), [((0.0, 0.003), True), ((0.02, 0.0), False)], ids=["tokens", "steps"])
def test_left_to_itself_it_loads_what_it_expects_to_gain_from(pace, loads):
    """A load costs a request one step more, so it pays where tokens take longer than that."""
    work = Work(requests=72, conversations=6, seed=2)
    result = serve(work, ranks=2, env={"KVBM_LOAD": "auto"}, pace=pace, blocks=24)
    check(work, result)
    # Where steps cost all, a busy machine may make every load look dear.
    if loads:
        assert onboarded(result) > 100
    # At first it knows nothing of the engine; and prompts that would take two steps are always worth a load.
    assert (sum(counts(result).refused_load_blocks.values()) < 60) == loads


@pytest.mark.parametrize("name", ["kvbm_llm_api_config.yaml", "kvbm_llm_api_config_older.yaml"])
def test_the_guides_configuration_serves(name):
    connector = yaml.safe_load((ROOT / "examples/trtllm" / name).read_text())["kv_connector_config"]
    result = run(Options(ranks=2, connector=connector, env=dict(HOST)), SHORT)
    check(SHORT, result)
    assert onboarded(result) > 50


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 22))
def test_many_random_workloads(seed):
    """Everything at once: faults on every kind of copy, cancellation, all generations in turn."""
    work = Work(requests=300, cancel=0.25, seed=seed, prefixes=5, conversations=20, loras=seed % 3)
    result = serve(
        work,
        faults="load:rank=1:every=11,store:rank=0:every=13,slow:every=7,slow-store:every=5",
        generation=("1.0", "1.2", "1.3")[seed % 3],
        overlap=seed % 2 == 0,
        chunked=seed % 5 != 0,
        partial_reuse=seed % 4 == 0,
        blocks=(24, 32, 48)[seed % 3],
        load_delay=0.02,
        store_delay=0.05,
        timeout=150,
    )
    check(work, result)
    assert onboarded(result) > 50
    assert counts(result).failed_load_blocks > 0
