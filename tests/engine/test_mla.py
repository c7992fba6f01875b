"""Multi-head latent attention on two ranks: both have the same KV, it is kept once, and both get it back.

vLLM's MLA for CPUs cannot go on with a prompt that is partly computed, but it can decode. So what is asked for here is
the prompt together with the first tokens of its answer, up to one token behind a block: all blocks are loaded, the
last token is computed as it was when the answer was given, and the rest of the answer must come out again. One request
at a time, as vLLM's answers with this attention change with the company.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from engines import PROJECT, do, prompt

pytestmark = pytest.mark.engine

BLOCK = 16  # the CPU kernel knows no other
FIRST, SECOND = prompt(1, 20 * BLOCK - 8), prompt(2, 10 * BLOCK - 8)
KNOWN = 9  # tokens of the answer that are asked for again
ANSWER = 24
BYTES = 3 * BLOCK * 576 * 4  # of a block: layers, tokens, floats of the latent vector
# The fifth load puts zeros in place of the blocks and claims success: that must be seen in the answer.
SETTINGS = {"cpu_cache_gb": 128.5 * BYTES / 1e9, "inject_faults": "zeros:every=5"}


@pytest.fixture(scope="module")
def engine():
    command = [sys.executable, str(PROJECT / "scripts" / "models.py"), "mla"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert not made.returncode, made.stderr
    return {
        "model": made.stdout.strip(),
        "tensor_parallel_size": 2,
        "block_size": BLOCK,
        "attention_backend": "CPU_MLA",
    }


@pytest.fixture(scope="module", params=["shared-sync", "broadcast-sync", "broadcast-async"])
def way(request):
    return request.param


@pytest.fixture(scope="module")
def story(way, run_scenario, engine):
    kept, onboard = way.split("-")
    steps = [
        do("repeat", "again", prompts=[FIRST, SECOND], known=KNOWN, max_tokens=ANSWER, rounds=3),
        do("drain"),
        do("state", "end"),
    ]
    kvbm = {**SETTINGS, "onboard": onboard, "nccl_mla_mode": kept == "broadcast"}
    return run_scenario(steps, kvbm, engine, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"})


def test_both_ranks_go_on_from_what_was_kept_once(story):
    first, second, zeros = story["again"]["tokens"]
    assert first == second == story["again"]["wanted"]
    assert zeros[0] != first[0]
    assert zeros[1] == first[1]
    assert story["end"]["onboarded"] == 3 * 30


def test_the_budget_counts_once(story, way):
    assert story["end"]["size"] == 128
    assert len(story.said("over 2 ranks, which keep their common KV once")) == 1
    lines = [line.partition("rank.py")[2] for line in story.output.splitlines() if " host slots, " in line]
    slots = sorted(int(line.split(" host slots")[0].split()[-1]) for line in lines)
    assert slots == ([128, 128] if way == "shared-sync" else [1, 128])


def test_nothing_is_left_under_way(story):
    end = story["end"]
    assert (end["requests"], end["pinned"], end["writing"], end["busy"], end["faults"]) == (0, 0, 0, False, {})
