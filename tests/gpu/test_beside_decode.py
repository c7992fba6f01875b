"""Long prompts return from host memory while other requests decode and steps overlap. vLLM hears of a load before its
blocks are there, so the steps that need them have to wait on the device. See :mod:`kvbm.runtime.announcements`.

One engine runs eagerly with raw blocks, the other with CUDA graphs and packed ones.

The model has as many layers, and as much KV a token, as one of 8B parameters: a load takes as long as a step or two.
"""

from __future__ import annotations

import pytest
from devices import ON_CUDA
from engines import do, generate
from test_engines import ANSWER, CHOICE, agree, is_idle, prompt

pytestmark = pytest.mark.gpu

LENGTH = 8000 if ON_CUDA else 600
BLOCK = 16 if ON_CUDA else 32
ENGINE = {
    "block_size": BLOCK, "num_gpu_blocks_override": 4 * LENGTH // BLOCK,
    "max_model_len": LENGTH + 1000, "logprobs_mode": "processed_logprobs",
}  # fmt: skip
# Of whole decode steps, without torch.compile, which takes a minute.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8]}
KINDS = {
    "raw": ("off", {"enforce_eager": True}),
    "packed": ("on", {"compilation_config": GRAPHS} if ON_CUDA else {"enforce_eager": True}),
}
PROMPTS = {str(i): prompt(50 + i, LENGTH + BLOCK // 2) for i in range(4)}
OTHERS = [prompt(60 + i, 40) for i in range(6)]


@pytest.fixture(scope="module", params=KINDS)
def outcome(request, run_engine):
    pack, engine = KINDS[request.param]

    def bring_back(name, **options):
        arguments = {"prompts": PROMPTS, "others": OTHERS, "tokens": ANSWER, **options, **CHOICE}
        return do("call", name, target="gpu.beside:bring_back", **arguments)

    steps = [do("onboard", mode="async")]
    for tokens in PROMPTS.values():
        steps += [generate(tokens, max_tokens=1), do("drain")]
    for name, tokens in PROMPTS.items():
        steps += [do("reset"), generate(tokens, name=f"alone {name}", max_tokens=ANSWER, **CHOICE), do("drain")]
    steps += [bring_back("in time"), bring_back("again"), bring_back("late", late=ON_CUDA), do("state", "end")]
    steps += [bring_back("control", late=ON_CUDA, hold=False)]  # last, because what is computed on it is kept
    kvbm = {"cpu_cache_override_num_blocks": 6 * LENGTH // BLOCK}
    return run_engine(f"beside-{request.param}", "deep", steps, {**ENGINE, **engine}, {"KVBM_PACK": pack}, kvbm=kvbm)


def answers(outcome, name):
    return {f"alone {prompt}": tokens for prompt, tokens in outcome[name]["answers"].items()}


@pytest.mark.parametrize("name", ["in time", "again", "late"])
def test_answers_beside_others_are_those_alone(name, outcome):
    agree(outcome, answers(outcome, name))


def test_loads_are_announced_and_steps_wait_for_them(outcome, figure):
    names = ("in time", "again", "late")
    announced = [outcome[name].get("announced", 0) for name in names]
    held = [outcome[name].get("held", 0) for name in names]
    assert all(outcome[name]["outside of steps"] >= len(PROMPTS) for name in names)
    figure(f"loads beside decoding requests: {announced} announced of {len(PROMPTS)} each, {held} held a step")
    if ON_CUDA:
        # In time, a load may also be over before the report in which it would have been announced.
        assert announced[0] + announced[1]
        assert announced[2]
        assert held[2]


def test_the_comparison_sees_a_step_that_does_not_wait(outcome):
    if not ON_CUDA:
        pytest.skip("only a device can be made to wait")
    with pytest.raises(AssertionError, match="differs from"):
        agree(outcome, answers(outcome, "control"))


def test_nothing_is_held_at_the_end(outcome):
    assert is_idle(outcome["end"])
    assert not outcome["end"]["faults"]
