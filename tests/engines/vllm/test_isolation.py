"""Requests that must not share KV never do: other salt, other adapter; and those that may share do."""

from __future__ import annotations

import pytest
from adapter_files import write_adapter
from engines import do, generate, prompt

pytestmark = pytest.mark.engine

CACHE = {"cpu_cache_override_num_blocks": 512}
PROMPT = prompt(1, 400)
BLOCKS = 12


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_requests_share_blocks_exactly_when_their_salts_are_equal(algorithm, run_scenario, baseline):
    """With vLLM's own hashes as keys, and with KVBM's where vLLM's could be made to collide."""
    wanted = baseline([PROMPT])
    steps = [
        generate(PROMPT, name="red", salts=["red"]),
        do("reset"),
        do("state", "before"),
        generate(PROMPT, name="blue", salts=["blue"]),
        do("reset"),
        generate(PROMPT, name="plain"),
        do("state", "others"),
        do("reset"),
        generate(PROMPT, name="red again", salts=["red"]),
        do("state", "same"),
        do("held", "held", prompts=[PROMPT] * 4, salts=["red", "blue", None, "green"]),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, CACHE, {"prefix_caching_hash_algo": algorithm})
    assert story["before"]["engine_hashes"] is (algorithm == "sha256")
    for name, cached in (("red", 0), ("blue", 0), ("plain", 0), ("red again", BLOCKS * 32)):
        assert story.tokens(name) == wanted
        assert story[name]["cached"] == [cached], name
    assert story["others"]["onboarded"] == story["before"]["onboarded"] == 0
    assert story["same"]["onboarded"] == BLOCKS
    assert [sum(blocks) for blocks in story["held"]] == [BLOCKS, BLOCKS, BLOCKS, 0]
    assert (story["end"]["requests"], story["end"]["chains"]) == (0, 0)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two LoRA adapters with random weights."""
    return [write_adapter(tmp_path_factory.mktemp("adapter"), seed) for seed in (1, 2)]


def test_two_adapters_never_share_a_block(adapters, run_scenario, baseline):
    first, second = ["first", 1, adapters[0]], ["second", 2, adapters[1]]
    engine = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    wanted = {
        name: baseline([PROMPT], 16, engine, lora=[adapter])
        for name, adapter in (("first", first), ("second", second), ("none", None))
    }
    assert wanted["first"] != wanted["second"] != wanted["none"] != wanted["first"]
    steps = [
        generate(PROMPT, name="first", lora=[first]),
        do("reset"),
        generate(PROMPT, name="second", lora=[second]),
        do("reset"),
        generate(PROMPT, name="none"),
        do("state", "others"),
        do("reset"),
        generate(PROMPT, PROMPT, name="both", lora=[second, first]),
        do("state", "same"),
    ]
    story = run_scenario(steps, CACHE, engine)
    for name in ("first", "second", "none"):
        assert story.tokens(name) == wanted[name]
        assert story[name]["cached"] == [0]
    assert story["others"]["onboarded"] == 0
    assert story.tokens("both") == wanted["second"] + wanted["first"]
    assert story["same"]["onboarded"] == 2 * BLOCKS
