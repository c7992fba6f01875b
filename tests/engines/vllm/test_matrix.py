"""Save, reset, load: what every supported vLLM release has to pass. `make test-matrix` runs it with each of them."""

from __future__ import annotations

import pytest
from engines import do, generate, prompt

pytestmark = pytest.mark.matrix

CACHE = {"cpu_cache_override_num_blocks": 512}
PROMPT, OTHER = prompt(1, 400), prompt(2, 200)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_the_engine_has_forgotten_comes_back(mode, run_scenario, baseline):
    wanted = baseline([PROMPT, OTHER])
    steps = [
        generate(PROMPT, name="cold"),
        do("drain"),
        do("reset", "reset"),
        generate(PROMPT, OTHER, name="host hit"),
        do("drain"),
        do("state", "loaded"),
        do("reset"),
        generate(PROMPT, name="logprobs", prompt_logprobs=0),
        do("reset"),
        do("add", names=["doomed"], prompts=[PROMPT]),
        do("step"),
        do("abort", names=["doomed"]),
        generate(OTHER, name="other"),
        do("drain"),
        do("reset", "reset at the end", connector=True),
        do("state", "end"),
        do("metrics", "metrics"),
    ]
    story = run_scenario(steps, {**CACHE, "onboard": mode})
    assert story["reset"] is True
    assert story.tokens("cold") == story.tokens("logprobs") == wanted[:1]
    assert story.tokens("host hit") == wanted
    assert story["loaded"]["onboarded"] == 12
    assert [len(logprobs) for logprobs in story["logprobs"]["prompt_logprobs"]] == [400]
    assert story.tokens("other") == wanted[1:]
    assert story["reset at the end"] is True
    end = story["end"]
    assert (end["published"], end["requests"], end["pinned"], end["writing"], end["busy"]) == (0, 0, 0, 0, False)
    assert end["faults"] == {}
    assert story["metrics"]["kvbm_onboard_blocks_h2d"] >= 12
    assert not [message for level, message in story.log if level != "INFO"]


def test_a_lost_load_is_computed_again(run_scenario, baseline):
    steps = [
        generate(PROMPT),
        do("drain"),
        do("reset"),
        generate(PROMPT, OTHER, name="lost"),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, {**CACHE, "inject_faults": "load:every=5"})
    assert story.tokens("lost") == baseline([PROMPT, OTHER])
    assert story["end"]["failed_load_blocks"] == 2


def test_every_method_of_the_base_class_has_been_read():
    compat = pytest.importorskip("kvbm.engines.vllm.compat")
    assert compat.unknown_members() == set()
    assert "{}.{}".format(*compat.release()) in compat.TESTED


def test_beside_others_a_prompt_that_ends_with_a_block_comes_back_whole(run_scenario, baseline):
    """vLLM computes its last token once more."""
    exact, other = prompt(3, 12 * 32), prompt(4, 40)
    steps = [
        generate(exact, name="cold"),
        do("drain"),
        do("reset"),
        do("add", names=["other"], prompts=[other], max_tokens=60),
        do("step", times=3),
        do("add", names=["exact"], prompts=[exact]),
        do("finish", "together"),
        do("state", "end"),
    ]
    story = run_scenario(steps, {**CACHE, "onboard": "async"})
    assert [story.tokens("cold")[0], story["together"]["exact"]] == baseline([exact]) * 2
    assert story["together"]["other"] == baseline([other], 60)[0]
    assert story["end"]["onboarded"] == 12


def test_prompts_get_the_names_that_this_release_gives():
    import vllm.v1.core.kv_cache_utils as kv_cache_utils
    from vllm.utils.hashing import sha256

    from kvbm.engines.vllm.shortcuts import hashing

    kv_cache_utils.init_none_hash(sha256)
    own = kv_cache_utils.get_request_block_hasher(16, sha256)
    assert hashing.quick(own, 16, sha256) is not own  # which it would be, had they been seen to differ


def test_blocks_are_taken_and_named_as_this_release_does_it(monkeypatch):
    import vllm.v1.worker.gpu.buffer_utils as buffers
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from kvbm.engines.vllm.shortcuts import blocks, tokens

    places = [
        (BlockPool, "get_new_blocks"),
        (BlockPool, "cache_full_blocks"),
        (KVCacheManager, "estimate_cached_tokens"),
        (buffers, "async_tensor_h2d"),
    ]
    for place, name in places:
        function = getattr(place, name)
        monkeypatch.setattr(place, name, getattr(function, "__wrapped__", function))
    assert blocks.install()
    assert tokens.install()
    # They would not be there, had the two been seen to differ.
    assert all(hasattr(getattr(place, name), "__wrapped__") for place, name in places)
