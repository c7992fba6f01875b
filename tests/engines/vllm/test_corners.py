"""Requests and engines out of the ordinary: the tokens are those of vLLM alone, and nothing is left behind."""

from __future__ import annotations

import pytest
from engines import do, generate, prompt

pytestmark = pytest.mark.engine

CACHE = {"cpu_cache_override_num_blocks": 512}
PROMPT = prompt(1, 400)
MODES = ("sync", "async")


def is_clean(end: dict) -> bool:
    return (end["requests"], end["engine_requests"], end["pinned"], end["writing"], end["busy"]) == (0, 0, 0, 0, False)


@pytest.mark.parametrize("mode", MODES)
def test_prompts_of_every_length_around_a_block(mode, run_scenario, baseline):
    """At least one token is left to compute, so a prompt that is known to its end does without its last block."""
    lengths = {1: 0, 31: 0, 32: 0, 33: 1, 63: 1, 64: 1, 65: 2, 96: 2}
    prompts = [prompt(200 + length, length) for length in lengths]
    wanted = baseline(prompts, 1)
    steps = [generate(*prompts, name="cold", max_tokens=1), do("drain"), do("reset")]
    steps += [generate(tokens, name=str(len(tokens)), max_tokens=1) for tokens in prompts]
    steps += [do("reset"), generate(*prompts, name="together", max_tokens=1), do("drain"), do("state", "end")]
    story = run_scenario(steps, {**CACHE, "onboard": mode})
    assert story.tokens("cold") == story.tokens("together") == wanted
    for (length, blocks), tokens in zip(lengths.items(), wanted, strict=True):
        assert story.tokens(str(length)) == [tokens]
        assert story[str(length)]["cached"] == [blocks * 32], length
    assert story["end"]["onboarded"] == 2 * sum(lengths.values())
    assert is_clean(story["end"])


@pytest.mark.parametrize("mode", MODES)
def test_equal_prompts_in_one_batch(mode, run_scenario, baseline):
    wanted = baseline([PROMPT]) * 5
    steps = [
        generate(*[PROMPT] * 5, name="cold"),
        do("drain"),
        do("state", "kept"),
        do("reset"),
        generate(*[PROMPT] * 5, name="host hit"),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, {**CACHE, "onboard": mode})
    assert story.tokens("cold") == story.tokens("host hit") == wanted
    assert story["kept"]["published"] == story["kept"]["offloaded"] == 12
    assert story["end"]["onboarded"] >= 12
    assert is_clean(story["end"])


def test_several_samples_of_one_prompt(run_scenario):
    options = {"n": 3, "temperature": 0.7, "seed": 5}
    steps = [generate(PROMPT, name="cold", **options), do("reset"), generate(PROMPT, name="host hit", **options)]
    alone = run_scenario(steps)
    story = run_scenario([*steps, do("drain"), do("state", "end")], CACHE)
    assert len({tuple(sample) for sample in alone["cold"]["tokens"][0]}) == 3
    assert story["cold"]["tokens"] == story["host hit"]["tokens"] == alone["cold"]["tokens"]
    assert story["end"]["onboarded"] >= 12
    assert is_clean(story["end"])


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.long), "async"])
def test_prompt_logprobs_are_computed_for_every_token(mode, run_scenario):
    """They cannot be brought back, so nothing of such a prompt is."""
    steps = [
        generate(PROMPT, name="cold", prompt_logprobs=1),
        do("reset"),
        generate(PROMPT, name="again", prompt_logprobs=1),
        do("reset"),
        generate(PROMPT, name="without"),
    ]
    alone = run_scenario(steps)
    story = run_scenario([*steps, do("drain"), do("state", "end")], {**CACHE, "onboard": mode})
    logprobs = story["again"]["prompt_logprobs"]
    assert [len(logprobs[0]), logprobs[0].count(None)] == [400, 1]
    assert logprobs == story["cold"]["prompt_logprobs"] == alone["cold"]["prompt_logprobs"]
    assert story.tokens("again") == story.tokens("without") == alone.tokens("cold")
    assert (story["again"]["cached"], story["without"]["cached"]) == ([0], [384])
    assert is_clean(story["end"])


def test_speculative_decoding_keeps_only_what_was_accepted(run_scenario, baseline):
    """Drafts that are rejected have been written into blocks as well; under no key may they be found."""
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    engine = {"speculative_config": speculation}
    first = prompt(3, 40) * 5
    options = {"allowed_token_ids": first[:40]}  # whatever is said has been said before: there is always a draft
    wanted = baseline([first], 120, **options)  # greedy speculation changes no token
    turn = first + wanted[0] + prompt(5, 5)
    wanted += baseline([turn], 60, **options)
    steps = [
        generate(first, name="cold", max_tokens=120, **options),
        do("metrics", "metrics"),
        do("drain"),
        do("reset"),
        generate(turn, name="turn", max_tokens=60, **options),
        do("drain"),
        do("reset"),
        generate(first, name="again", max_tokens=120, **options),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, CACHE, engine)
    drafted, accepted = (story["metrics"][f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert drafted > accepted > 0
    assert [story.tokens(name)[0] for name in ("cold", "turn", "again")] == [wanted[0], wanted[1], wanted[0]]
    assert story["turn"]["cached"][0] >= 9 * 32  # the answer's blocks, too
    assert is_clean(story["end"])


def test_an_engine_without_a_prefix_cache_of_its_own_is_served(run_scenario, baseline):
    engine = {"enable_prefix_caching": False}
    steps = [generate(PROMPT, name="cold"), do("drain"), generate(PROMPT, name="host hit"), do("state", "end")]
    story = run_scenario(steps, CACHE, engine)
    assert story.tokens("cold") == story.tokens("host hit") == baseline([PROMPT], 16, engine)
    assert story["end"]["onboarded"] == 12


def test_decoded_blocks_are_left_out_when_that_is_asked_for(run_scenario, baseline):
    steps = [generate(PROMPT, name="cold", max_tokens=100), do("drain"), do("state", "end")]
    story = run_scenario(steps, {**CACHE, "offload_decode": False})
    assert story.tokens("cold") == baseline([PROMPT], 100)
    assert story["end"]["published"] == 12


def test_a_host_tier_of_a_few_blocks_evicts_and_stays_right(run_scenario, baseline):
    prompts = [prompt(30 + i, 300) for i in range(6)]
    wanted = baseline(prompts)
    steps = []
    for i, tokens in enumerate(prompts):
        steps += [generate(tokens, name=f"cold {i}"), do("drain")]
    steps += [do("reset"), generate(*prompts, name="together"), do("reset")]
    steps += [generate(*reversed(prompts), name="backwards"), do("drain"), do("state", "end")]
    story = run_scenario(steps, {"cpu_cache_override_num_blocks": 20})
    assert [story.tokens(f"cold {i}")[0] for i in range(6)] == wanted
    assert story.tokens("together") == story.tokens("backwards")[::-1] == wanted
    assert story["end"]["evictions"] > 0
    assert story["end"]["onboarded"] > 0
    assert is_clean(story["end"])


@pytest.mark.parametrize("mode", MODES)
def test_running_requests_survive_a_reset(mode, run_scenario, baseline):
    """As after new weights: vLLM puts its requests back into the queue, and KVBM forgets what it has."""
    prompts = [PROMPT, prompt(2, 200)]
    wanted = baseline(prompts, 40)
    steps = [
        do("add", names=["a", "b"], prompts=prompts, max_tokens=40),
        do("step", times=15),
        do("reset", "reset", running=True, connector=True),
        do("state", "reset"),
        do("finish", "answers"),
        do("drain"),
        do("reset"),
        generate(*prompts, name="host hit", max_tokens=40),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, {**CACHE, "onboard": mode})
    assert story["reset"]["published"] == 0
    assert story["answers"] == {"a": wanted[0], "b": wanted[1]}
    assert story.tokens("host hit") == wanted
    assert story["host hit"]["cached"] == [384, 192]
    assert is_clean(story["end"])


def test_a_paused_engine_goes_on_where_it_was(run_scenario, baseline):
    steps = [
        generate(PROMPT),
        do("drain"),
        do("reset"),
        do("add", names=["a"], prompts=[PROMPT]),
        do("step"),  # its load is under way
        do("pause", state="PAUSED_ALL"),
        do("step", times=3),
        do("pause", state="UNPAUSED"),
        do("finish", "answers"),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, {**CACHE, "onboard": "async", "inject_faults": "slow"})
    assert story["answers"] == {"a": baseline([PROMPT])[0]}
    assert story["end"]["onboarded"] == 12
    assert is_clean(story["end"])


def test_a_prioritised_request_pushes_others_out_and_they_come_back(run_scenario, baseline):
    """The victim may be taken out of a batch it was already in."""
    engine = {"num_gpu_blocks_override": 36, "max_model_len": 512, "scheduling_policy": "priority"}
    prompts = [prompt(10 + i, 220 + 10 * i) for i in range(8)]
    priority = [3, 1, 2, 0, 7, 5, 6, 4]
    wanted = baseline(prompts, 64, engine)
    steps = [
        generate(*prompts, name="cold", max_tokens=64, priority=priority),
        generate(*prompts, name="again", max_tokens=64, priority=priority[::-1]),
        do("metrics", "metrics"),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, {**CACHE, "inject_faults": "slow-store:every=2"}, engine)
    assert story.tokens("cold") == story.tokens("again") == wanted
    assert story["metrics"]["vllm:num_preemptions"] > 0
    assert is_clean(story["end"])
