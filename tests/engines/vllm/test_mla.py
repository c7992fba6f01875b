"""Multi-head latent attention on two ranks: both have the same KV, it is kept once, and both get it back.

vLLM's MLA for CPUs cannot go on with a prompt that is partly computed, but it can decode. So the prompts end one token
behind a block: all blocks are loaded, and the last token is computed as in decoding. KVBM offers no other hit there.
"""

from __future__ import annotations

import sys

import pytest
from engines import PROJECT, do, generate, prompt

sys.path.insert(0, str(PROJECT / "scripts"))

from random_models import Latent, model_folder

pytestmark = pytest.mark.engine

MODEL = Latent("mla", 3, 256, 16, 512, 4096, "float32")
BLOCK = 16  # the CPU kernel knows no other
BYTES = MODEL.layers * BLOCK * (MODEL.compressed + MODEL.rope) * 4  # of a block
FIRST, SECOND = ([token % MODEL.vocab for token in prompt(i, 10 * i * BLOCK + 1)] for i in (1, 2))
# The fifth load puts zeros in place of the blocks and claims success: that must be seen in the answer.
SETTINGS = {"cpu_cache_gb": 128.5 * BYTES / 1e9, "inject_faults": "zeros:every=5"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return {
        "model": str(model_folder(MODEL, tmp_path_factory.mktemp("models"))),
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 2,
        "block_size": BLOCK,
        "attention_backend": "CPU_MLA",
    }


@pytest.fixture(
    scope="module", params=["shared-sync", pytest.param("broadcast-sync", marks=pytest.mark.long), "broadcast-async"]
)
def way(request):
    return request.param


@pytest.fixture(scope="module")
def story(way, run_scenario, engine):
    kept, onboard = way.split("-")
    steps = [
        generate(FIRST, name="cold 1"),
        generate(SECOND, name="cold 2"),
        do("drain"),
        *(generate(tokens, name=f"{again} {i}") for again in "abc" for i, tokens in ((1, FIRST), (2, SECOND))),
        do("drain"),
        do("state", "end"),
    ]
    kvbm = {**SETTINGS, "onboard": onboard, "nccl_mla_mode": kept == "broadcast"}
    return run_scenario(steps, kvbm, engine, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"})


def test_both_ranks_go_on_from_what_was_kept_once(story):
    for i in (1, 2):
        assert story.tokens(f"a {i}") == story.tokens(f"b {i}") == story.tokens(f"cold {i}")
    assert story["end"]["onboarded"] == 3 * 30


def test_wrong_blocks_would_be_seen(story):
    assert story.tokens("c 1") != story.tokens("cold 1")
    assert story.tokens("c 2") == story.tokens("cold 2")


def test_the_budget_counts_once(story, way):
    assert story["end"]["size"] == 128
    assert len(story.said("over 2 ranks, which keep their common KV once")) == 1
    lines = [line for line in story.output.splitlines() if " host slots, " in line]
    slots = sorted(int(line.partition(" host slots")[0].split()[-1]) for line in lines)
    assert slots == ([128, 128] if way == "shared-sync" else [1, 128])


def test_nothing_is_left_under_way(story):
    end = story["end"]
    assert (end["requests"], end["pinned"], end["writing"], end["busy"], end["faults"]) == (0, 0, 0, False, {})


def test_no_hit_leaves_more_than_one_token_to_compute(run_scenario, engine):
    """vLLM's MLA for CPUs computes a whole prompt in one step, or decodes."""
    longer = FIRST + FIRST[:7]
    steps = [generate(longer, name="cold"), do("drain"), generate(longer, name="again"), generate(FIRST, name="one")]
    story = run_scenario(steps, SETTINGS, {**engine, "tensor_parallel_size": 1})
    assert story.tokens("again") == story.tokens("cold")
    assert (story["again"]["cached"], story["one"]["cached"]) == ([0], [len(FIRST) - 1])
