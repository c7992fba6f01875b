"""vLLM gives the same tokens with KVBM as without, wherever the blocks of a prompt come from."""

from __future__ import annotations

import pytest
from engines import do, generate, prompt

pytestmark = pytest.mark.engine

MODES = ("sync", "async", "auto")
CACHE = {"cpu_cache_override_num_blocks": 512}

PROMPT = prompt(1, 400)  # 12 full blocks
HALF = PROMPT[:208] + prompt(2, 192)  # shares the first 6 of them
ANSWER = 40  # with the prompt 439 computed tokens: one more full block
CHUNKS = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}


@pytest.fixture(scope="module")
def expected(baseline):
    """Tokens of vLLM alone; the third prompt is the conversation's next turn."""
    first = baseline([PROMPT], ANSWER)[0]
    turn = PROMPT + first + prompt(3, 10)
    return turn, dict(zip(("prompt", "half", "turn"), baseline([PROMPT, HALF, turn], ANSWER), strict=True))


@pytest.fixture(scope="module", params=MODES)
def story(request, run_scenario, expected):
    """One engine through all the places a prompt may be found in."""
    turn, _ = expected
    steps = [
        generate(PROMPT, name="cold", max_tokens=ANSWER),
        do("drain"),
        do("state", "after cold"),
        generate(PROMPT, name="engine hit", max_tokens=ANSWER),
        do("state", "after engine hit"),
        do("reset", "reset"),
        generate(PROMPT, name="host hit", max_tokens=ANSWER),
        do("state", "after host hit"),
        do("reset"),
        generate(HALF, name="half", max_tokens=ANSWER),
        do("state", "after half"),
        do("reset"),
        generate(turn, name="turn", max_tokens=ANSWER),
        do("state", "after turn"),
        do("drain"),
        do("state", "end"),
    ]
    return run_scenario(steps, {**CACHE, "onboard": request.param})


def test_a_prompt_nobody_has_seen_is_computed_and_kept(story, expected):
    assert story.tokens("cold") == [expected[1]["prompt"]]
    assert story["after cold"]["onboarded"] == 0
    assert story["after cold"]["published"] == story["after cold"]["offloaded"] == 13  # 12 of the prompt, 1 decoded


def test_a_hit_in_the_engine_is_left_to_the_engine(story, expected):
    assert story.tokens("engine hit") == [expected[1]["prompt"]]
    assert story["engine hit"]["cached"] == [384]
    assert story["after engine hit"]["onboarded"] == 0


def test_a_prompt_the_engine_has_forgotten_comes_back_from_host_memory(story, expected):
    assert story["reset"] is True
    assert story.tokens("host hit") == [expected[1]["prompt"]]
    assert story["host hit"]["cached"] == [384]
    assert story["after host hit"]["onboarded"] == 12


def test_a_half_shared_prompt_brings_back_its_half(story, expected):
    assert story.tokens("half") == [expected[1]["half"]]
    assert story["after half"]["onboarded"] - story["after host hit"]["onboarded"] == 6


def test_the_next_turn_of_a_conversation_finds_what_was_decoded(story, expected):
    assert story.tokens("turn") == [expected[1]["turn"]]
    assert story["after turn"]["onboarded"] - story["after half"]["onboarded"] == 13


def test_nothing_stays_behind_when_the_requests_are_done(story):
    end = story["end"]
    assert (end["requests"], end["engine_requests"], end["pinned"], end["writing"], end["busy"]) == (0, 0, 0, 0, False)
    assert end["faults"] == {}
    assert end["free"] + end["published"] == end["size"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_chunked_prefill_keeps_and_brings_back_the_same_blocks(mode, run_scenario, baseline):
    wanted = baseline([PROMPT, HALF], ANSWER, CHUNKS)
    steps = [
        generate(PROMPT, name="cold", max_tokens=ANSWER),
        do("reset"),
        generate(PROMPT, name="host hit", max_tokens=ANSWER),
        do("state", "after host hit"),
        do("reset"),
        generate(HALF, PROMPT, name="together", max_tokens=ANSWER),
        do("state", "after together"),
    ]
    story = run_scenario(steps, {**CACHE, "onboard": mode}, CHUNKS)
    assert story.tokens("cold") == story.tokens("host hit") == wanted[:1]
    assert story["after host hit"]["onboarded"] == 12
    assert story.tokens("together") == [wanted[1], wanted[0]]
    assert story["after together"]["onboarded"] > 12


@pytest.mark.parametrize("mode", MODES)
def test_requests_that_do_not_fit_the_engine_are_preempted_and_come_back(mode, run_scenario, baseline):
    """Eight requests, and room in the engine for three: what a preempted request had computed is brought back."""
    small = {"num_gpu_blocks_override": 36, "max_model_len": 512}
    prompts = [prompt(10 + i, 220 + 10 * i) for i in range(8)]
    wanted = baseline(prompts, 64, small)
    steps = [
        generate(*prompts, name="cold", max_tokens=64),
        do("metrics", "metrics"),
        generate(*prompts, name="again", max_tokens=64),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, {**CACHE, "onboard": mode}, small)
    assert story.tokens("cold") == wanted
    assert story["metrics"]["vllm:num_preemptions"] > 0
    assert story["metrics"]["kvbm_onboard_blocks_h2d"] > 0
    assert story.tokens("again") == wanted
    end = story["end"]
    assert (end["requests"], end["pinned"], end["writing"], end["busy"], end["faults"]) == (0, 0, 0, False, {})
    assert end["engine_blocks_free"] == 35  # all but the one that vLLM keeps for itself


def test_a_request_aborted_while_it_loads_leaves_no_trace(run_scenario, baseline):
    """Its blocks are still being written when it goes; nobody may get them before that is over."""
    small = {"num_gpu_blocks_override": 40}  # the next request needs the blocks of the aborted one
    other = prompt(4, 700)
    wanted = baseline([PROMPT, other], 16, small)
    steps = [
        generate(PROMPT, name="cold"),
        do("drain"),
        do("reset"),
        do("add", names=["doomed"], prompts=[PROMPT]),
        do("step"),
        do("state", "loading"),
        do("abort", names=["doomed"]),
        do("state", "aborted"),
        generate(other, name="other"),
        do("drain"),
        do("state", "after"),
        do("reset", "reset"),
        generate(PROMPT, name="again"),
        do("state", "end"),
    ]
    story = run_scenario(steps, {**CACHE, "onboard": "async", "inject_faults": "slow"}, small)
    assert story["loading"]["pinned"] == story["aborted"]["pinned"] == 12
    assert story["aborted"]["requests"] == 0
    assert story.tokens("other") == wanted[1:]
    after = story["after"]
    assert (after["pinned"], after["busy"], after["engine_requests"], after["engine_blocks_free"]) == (0, False, 0, 39)
    assert story["reset"] is True
    assert story.tokens("again") == wanted[:1]
    assert story["end"]["onboarded"] - after["onboarded"] == 12


@pytest.mark.parametrize(
    "engine",
    [{"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"}],
    ids=["bfloat16", "fp8_e4m3", "fp8_e5m2"],
)
def test_blocks_of_every_dtype_come_back_as_they_were(engine, run_scenario, baseline):
    wanted = baseline([PROMPT], ANSWER, engine)
    steps = [
        generate(PROMPT, name="cold", max_tokens=ANSWER),
        do("reset"),
        generate(PROMPT, name="host hit", max_tokens=ANSWER),
        do("state", "end"),
    ]
    story = run_scenario(steps, CACHE, engine)
    assert story.tokens("cold") == story.tokens("host hit") == wanted
    assert story["end"]["onboarded"] == 12


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_comparison_sees_wrong_kv(mode, run_scenario, baseline):
    """The control for everything above: loads that bring zeros and claim success must change the tokens."""
    steps = [generate(PROMPT, name="cold"), do("reset"), generate(PROMPT, name="host hit"), do("state", "end")]
    story = run_scenario(steps, {**CACHE, "onboard": mode, "inject_faults": "zeros"})
    wanted = baseline([PROMPT])
    assert story.tokens("cold") == wanted
    assert story["end"]["onboarded"] == 12
    assert story.tokens("host hit") != wanted
