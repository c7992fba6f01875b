"""An engine in a process of its own, forked from one that has not used CUDA yet, as `vllm serve` may start it.

There the scheduler works while requests come and go; the engines of test_engines.py take one step after the other.
"""

from __future__ import annotations

import random

import pytest
from devices import ON_CUDA
from engines import do, generate

pytestmark = pytest.mark.gpu

BLOCK = 16 if ON_CUDA else 32
ANSWER = 16


def prompt(seed: int, tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(300, 4000) for _ in range(tokens)]


PROMPT = prompt(1, 384 + BLOCK // 2)
# Each takes back a prompt that is being brought back and one that is being computed, a little later than the last.
ROUNDS = [[i / 2000, [PROMPT, prompt(100 + i, 400)]] for i in range(16)]


@pytest.fixture(scope="module")
def outcome(run_engine):
    steps = [
        generate(PROMPT, name="cold", max_tokens=ANSWER),
        generate(PROMPT, name="reference", max_tokens=ANSWER),
        do("empty", "emptied"),
        do("metrics", "before"),
        generate(PROMPT, name="host hit", max_tokens=ANSWER),
        do("metrics", "after"),
        do("race", "race", rounds=ROUNDS),
        do("empty", "emptied after the race"),
        generate(PROMPT, name="after the race", max_tokens=ANSWER),
        do("metrics", "end"),
    ]
    engine = {"enforce_eager": True, "block_size": BLOCK, "num_gpu_blocks_override": 1600 // BLOCK}
    # On a CPU vLLM always starts it as a new program.
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    return run_engine("fork", "dense", steps, engine, env)


def test_the_engine_is_forked(outcome):
    assert "(EngineCore" in outcome.output  # what another process says begins with its name
    assert "must use the `spawn`" not in outcome.output


def test_a_forked_engine_brings_back_what_it_has_forgotten(outcome):
    assert outcome["emptied"] is True
    assert outcome["reference"]["cached"] == outcome["host hit"]["cached"] == [384]
    assert outcome.tokens("host hit") == outcome.tokens("reference")
    onboarded = [outcome[name]["kvbm_onboard_blocks_h2d"] for name in ("before", "after")]
    assert onboarded[1] - onboarded[0] == 384 // BLOCK


def test_requests_taken_back_at_any_moment_leave_no_block_behind(outcome):
    """vLLM's prefix cache can be reset only when nobody holds a block."""
    assert outcome["race"] == [True] * len(ROUNDS)
    assert outcome["emptied after the race"] is True
    assert outcome["after the race"]["cached"] == [384]
    assert outcome.tokens("after the race") == outcome.tokens("reference")
    assert outcome["end"]["kvbm_onboard_blocks_h2d"] > outcome["after"]["kvbm_onboard_blocks_h2d"]
