"""A real vLLM on a GPU: the same tokens wherever a prompt's blocks come from, whatever happens meanwhile.

Starting an engine takes longer than all that is asked of it. So there are few, each goes through one long story, and
every test looks at a part of it. The models have random weights, and numbers of 16 bits: the same prompt has the same
tokens only where the same numbers are computed in batches of the same shape. One prompt at a time is therefore compared
token by token with itself while its prefix was still on the GPU. Where requests share batches, they choose between two
tokens each time, and are compared with themselves alone for as long as the choice was clear; see `agree`.
"""

from __future__ import annotations

import random

import pytest
from devices import ON_CUDA
from engines import do, generate, parting

pytestmark = pytest.mark.gpu

ANSWER = 16
LONG_ANSWER = 64
# With 16 bits two ways to compute the same scores differ by less than a fifth of this.
CLEAR = 0.5
CHOICE = {"allowed_token_ids": [100, 200], "logprobs": 2}

KINDS = {
    "eager": ("dense", 16 if ON_CUDA else 32, {"enforce_eager": True}),
    "graphs": ("dense", 16, {"enforce_eager": False}),
    "mla": ("mla", 64 if ON_CUDA else 16, {"enforce_eager": not ON_CUDA}),
}
# The others pack their blocks, because the measurement at start says so.
ENVIRONMENT = {"eager": {"KVBM_PACK": "off"}}


def prompt(seed: int, tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(300, 4000) for _ in range(tokens)]


class Story:
    """The steps of one engine; what came of them is read by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model, self.block, engine = KINDS[kind]
        # vLLM computes this kind of attention on a CPU only from the first token on, or for a single token.
        self.one_token_only = self.model == "mla" and not ON_CUDA
        self.known = 384 // self.block  # blocks of each prompt that come back
        self.prompts = {"one token left": prompt(2, 384 + 1)}
        if not self.one_token_only:
            self.prompts |= {"half a block left": prompt(1, 384 + self.block // 2), "whole blocks": prompt(3, 384)}
        self.crowd = [prompt(10 + i, 220 + 10 * i) for i in range(8)]
        self.fillers = [prompt(30, 700), prompt(31, 690)]
        self.engine = {
            **engine, "block_size": self.block, "num_gpu_blocks_override": 1600 // self.block, "max_model_len": 1024,
            "logprobs_mode": "processed_logprobs",
        }  # fmt: skip

    def loaded(self, name: str) -> int:
        """Blocks of a prompt that come back: the last token is always computed."""
        return (len(self.prompts[name]) - 1) // self.block

    def steps(self) -> list[dict]:
        steps = [do("layers"), do("graphs", "graphs"), *self.hits()]
        if not self.one_token_only:
            steps += [*self.together(), *self.aborts(), *self.resets(), *self.preemptions()]
        steps += [*self.control(), do("drain"), do("reset", "last reset"), do("state", "end"), do("metrics", "metrics")]
        names = [step["name"] for step in steps if step["name"] is not None]
        assert len(names) == len(set(names))
        return steps

    def hits(self) -> list[dict]:
        steps = []
        for name, tokens in self.prompts.items():
            steps += [generate(tokens, name=f"cold {name}", max_tokens=ANSWER), do("drain")]
            if self.one_token_only:
                steps.append(do("reset", connector=True))  # vLLM has no prefix cache then: it is computed once more
            steps += [generate(tokens, name=f"reference {name}", max_tokens=ANSWER), do("drain")]
        steps.append(do("state", "kept"))
        for mode in ("sync", "async"):
            steps.append(do("onboard", mode=mode))
            for name, tokens in self.prompts.items():
                steps += [do("reset"), do("state", f"before {mode} {name}")]
                steps += [generate(tokens, name=f"{mode} {name}", max_tokens=ANSWER), do("drain")]
                steps += [do("state", f"after {mode} {name}")]
            steps += [do("reset"), do("layers")]
            steps += [generate(self.prompts["one token left"], name=f"{mode} one token", max_tokens=1)]
            steps += [do("layers", f"{mode} layers"), do("drain")]
        return [*steps, do("onboard", mode="auto")]

    def together(self) -> list[dict]:
        prompts = [*self.prompts.values(), *self.fillers]
        steps = [do("reset")]
        for i, tokens in enumerate(prompts):
            steps += [generate(tokens, name=f"alone {i}", max_tokens=ANSWER, **CHOICE), do("drain"), do("reset")]
        steps += [do("state", "before together")]
        steps += [generate(*prompts, name="together", max_tokens=ANSWER, **CHOICE), do("drain")]
        return [*steps, do("state", "after together")]

    def aborts(self) -> list[dict]:
        tokens = self.prompts["half a block left"]
        return [
            do("onboard", mode="async"),
            do("faults", rules="slow"),
            do("reset"),
            do("add", names=["loading"], prompts=[tokens]),
            do("step"),
            do("state", "loading"),
            do("abort", names=["loading"]),
            do("state", "load aborted"),
            generate(*self.fillers, name="beside the load", max_tokens=ANSWER, **CHOICE),
            do("drain"),
            do("faults", rules=""),
            do("reset", "reset after abort"),
            do("state", "load over"),
            generate(tokens, name="after the load", max_tokens=ANSWER),
            do("drain"),
            do("onboard", mode="auto"),
            do("reset", connector=True),
            do("faults", rules="slow-store"),
            do("add", names=["storing"], prompts=[tokens]),
            do("step", times=2),
            do("state", "storing"),
            do("abort", names=["storing"]),
            generate(*self.fillers, name="over the store", max_tokens=ANSWER, **CHOICE),
            do("drain"),
            do("faults", rules=""),
            do("reset"),
            do("state", "store over"),
            generate(tokens, name="after the store", max_tokens=ANSWER),
            do("drain"),
            do("state", "end of aborts"),
        ]

    def resets(self) -> list[dict]:
        tokens = self.prompts["half a block left"]
        store_late = [
            do("reset", connector=True),
            do("faults", rules="slow-store"),
            generate(tokens, max_tokens=1),
        ]
        return [
            *store_late,
            do("state", "reset while storing"),
            do("reset", "reset succeeds"),
            generate(*self.fillers, name="over the reset", max_tokens=ANSWER, **CHOICE),
            do("drain"),
            do("faults", rules=""),
            do("reset"),
            do("state", "before reset store"),
            generate(tokens, name="after a reset", max_tokens=ANSWER),
            do("drain"),
            do("state", "after reset store"),
            *store_late,
            do("state", "all reset while storing"),
            do("reset", "all reset succeeds", connector=True),
            do("drain"),
            do("state", "all forgotten"),
            do("faults", rules=""),
            generate(tokens, name="after all is forgotten", max_tokens=ANSWER),
            do("drain"),
            do("faults", rules="slow-store:every=2"),
            do("add", names=["a", "b"], prompts=self.fillers, max_tokens=ANSWER, **CHOICE),
            do("step", times=6),
            do("reset", "reset under requests", running=True, connector=True),
            do("finish", "answers"),
            do("drain"),
            do("faults", rules=""),
            do("reset", "reset after requests"),
            do("state", "end of resets"),
        ]

    def preemptions(self) -> list[dict]:
        """Room for half of the crowd. What is kept of it was stored while blocks changed hands."""
        steps = [
            do("onboard", mode="auto"),
            do("reset", connector=True),
            do("faults", rules="slow-store:every=2"),
            do("metrics", "before the crowd"),
            generate(*self.crowd, name="crowd", max_tokens=LONG_ANSWER, **CHOICE),
            do("metrics", "after the crowd"),
            do("drain"),
            do("faults", rules=""),
            do("reset", "reset after the crowd"),
            do("state", "before the crowd's return"),
            generate(*self.crowd, name="crowd again", max_tokens=LONG_ANSWER, **CHOICE),
            do("drain"),
            do("state", "after the crowd's return"),
            do("reset", connector=True),
        ]
        for i, tokens in enumerate(self.crowd):
            steps += [generate(tokens, name=f"lone {i}", max_tokens=LONG_ANSWER, **CHOICE), do("drain")]
        return steps

    def control(self) -> list[dict]:
        """Last, because what is computed on zeros is kept."""
        steps = [do("onboard", mode="sync"), do("reset", connector=True)]
        for name, tokens in self.prompts.items():
            steps += [generate(tokens, max_tokens=1), do("drain"), do("faults", rules="zeros"), do("reset")]
            steps += [generate(tokens, name=f"zeros {name}", max_tokens=ANSWER), do("drain"), do("faults", rules="")]
        return steps


@pytest.fixture(scope="module", params=KINDS)
def told(request, run_engine):
    """(story, what came of it) of each engine."""
    if request.param == "graphs" and not ON_CUDA:
        pytest.skip("there are no CUDA graphs on a CPU")
    story = Story(request.param)
    return story, run_engine(story.kind, story.model, story.steps(), story.engine, ENVIRONMENT.get(story.kind))


@pytest.fixture
def story(told):
    return told[0]


@pytest.fixture
def outcome(told):
    return told[1]


@pytest.fixture
def full_story(told):
    if told[0].one_token_only:
        pytest.skip("vLLM computes this attention on a CPU only from the first token on")
    return told[0]


def agree(outcome, answers: dict[str, list[int]]) -> None:
    """Answers from a shared batch are those of the same prompts alone. Where they part, the choice was not clear, and
    what follows cannot be compared; in all that is so for the smaller part of the tokens."""
    compared = total = 0
    for alone, tokens in answers.items():
        same, margin = parting(outcome[alone], tokens)
        assert margin < CLEAR, f"token {same} differs from {alone!r}, where the choice was clear by {margin}"
        compared += same
        total += len(tokens)
    assert compared > total / 2, f"only {compared} of {total} tokens could be compared"


def is_idle(state: dict) -> bool:
    return (state["requests"], state["engine_requests"], state["pinned"], state["writing"], state["busy"]) == (
        0, 0, 0, 0, False,
    )  # fmt: skip


def together(story: Story, outcome, name: str) -> dict[str, list[int]]:
    """What was said of all prompts at once, by the name of what was said of each alone."""
    alone = [f"alone {i}" for i in range(len(story.prompts) + len(story.fillers))]
    answers = outcome.tokens(name)
    return dict(zip(alone[-len(answers) :], answers, strict=True))


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_the_engine_runs_as_its_name_says(story, outcome):
    wanted = "FULL_AND_PIECEWISE" if ON_CUDA and not story.engine["enforce_eager"] else "NONE"
    assert outcome["graphs"] == wanted


def test_blocks_are_packed_where_the_measurement_at_start_says_so(story, outcome):
    is_packed = ON_CUDA and story.kind not in ENVIRONMENT
    ratio = outcome["metrics"]["kvbm_packed_ratio"]
    assert 0.7 < ratio < 0.77 if is_packed else ratio == 1
    assert outcome["metrics"]["kvbm_unpackable_blocks"] == 0


def test_a_reference_comes_from_the_gpu_itself(story, outcome):
    for name in story.prompts:
        cached = 0 if story.one_token_only else story.loaded(name) * story.block
        assert outcome[f"reference {name}"]["cached"] == [cached]
    assert outcome["kept"]["onboarded"] == 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_the_gpu_has_forgotten_comes_back_with_the_same_tokens(mode, story, outcome):
    for name in story.prompts:
        assert outcome.tokens(f"{mode} {name}") == outcome.tokens(f"reference {name}"), name
        before, after = (outcome[f"{when} {mode} {name}"] for when in ("before", "after"))
        assert after["onboarded"] - before["onboarded"] == story.loaded(name) > 0, name
        assert outcome[f"{mode} {name}"]["cached"] == [story.loaded(name) * story.block]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_single_token_after_a_load_is_right_although_no_layer_asks(mode, story, outcome):
    """All but one token of the prompt are loaded: a step like that of a decode, which is replayed from a full graph."""
    wanted = outcome.tokens("reference one token left")[0][:1]
    assert outcome.tokens(f"{mode} one token") == [wanted]
    assert outcome[f"{mode} one token"]["cached"] == [story.known * story.block]
    replayed = outcome["graphs"] != "NONE"
    assert (outcome[f"{mode} layers"] == 0) is replayed


def test_references_differ_from_each_other(full_story, outcome):
    answers = {tuple(outcome.tokens(f"reference {name}")[0]) for name in full_story.prompts}
    assert len(answers) == len(full_story.prompts)


def test_the_comparison_sees_wrong_kv(story, outcome):
    """The control: loads that bring zeros and claim success."""
    for name in story.prompts:
        assert outcome[f"zeros {name}"]["cached"] == [story.loaded(name) * story.block]
        assert outcome.tokens(f"zeros {name}") != outcome.tokens(f"reference {name}")


def test_prompts_that_come_back_together_are_right(full_story, outcome):
    agree(outcome, together(full_story, outcome, "together"))
    before, after = outcome["before together"], outcome["after together"]
    assert after["onboarded"] - before["onboarded"] >= 3 * full_story.known


def test_nothing_is_held_and_nothing_has_failed_at_the_end(story, outcome):
    end = outcome["end"]
    assert is_idle(end)
    assert end["faults"] == {}
    assert end["failed_load_blocks"] == end["failed_store_blocks"] == 0
    assert end["free"] + end["published"] == end["size"]
    assert outcome["last reset"] is True
    assert end["engine_blocks_free"] == story.engine["num_gpu_blocks_override"] - 1


# -- while blocks are under way ---------------------------------------------------------------------------------------


def test_an_abort_while_a_load_runs_leaves_no_trace(full_story, outcome):
    """Its blocks are still being written when it goes; whoever needs them waits, and finds its own KV in them."""
    assert outcome["loading"]["pinned"] == outcome["load aborted"]["pinned"] == full_story.known
    assert outcome["load aborted"]["requests"] == 0
    agree(outcome, together(full_story, outcome, "beside the load"))
    assert outcome["reset after abort"] is True
    assert is_idle(outcome["load over"])
    assert outcome.tokens("after the load") == outcome.tokens("reference half a block left")


def test_an_abort_while_a_store_runs_loses_no_block(full_story, outcome):
    """Its blocks go to others at once. They are read first, and kept."""
    assert outcome["storing"]["writing"] >= full_story.known
    agree(outcome, together(full_story, outcome, "over the store"))
    assert outcome.tokens("after the store") == outcome.tokens("reference half a block left")
    onboarded = outcome["end of aborts"]["onboarded"] - outcome["store over"]["onboarded"]
    assert onboarded == full_story.known
    assert is_idle(outcome["end of aborts"])


def test_a_reset_while_a_store_runs_succeeds_and_loses_no_block(full_story, outcome):
    assert outcome["reset while storing"]["writing"] >= full_story.known
    assert outcome["reset succeeds"] is True
    agree(outcome, together(full_story, outcome, "over the reset"))
    assert outcome.tokens("after a reset") == outcome.tokens("reference half a block left")
    assert outcome["after reset store"]["onboarded"] - outcome["before reset store"]["onboarded"] == full_story.known


def test_a_reset_of_all_tiers_forgets_what_is_still_being_written(full_story, outcome):
    assert outcome["all reset while storing"]["writing"] >= full_story.known
    assert outcome["all reset succeeds"] is True
    assert (outcome["all forgotten"]["published"], outcome["all forgotten"]["writing"]) == (0, 0)
    assert outcome["after all is forgotten"]["cached"] == [0]
    assert outcome.tokens("after all is forgotten") == outcome.tokens("cold half a block left")


def test_requests_survive_a_reset_under_them(full_story, outcome):
    wanted = together(full_story, outcome, "over the reset")
    agree(outcome, dict(zip(wanted, (outcome["answers"][name] for name in ("a", "b")), strict=True)))
    assert outcome["reset after requests"] is True
    assert is_idle(outcome["end of resets"])


def test_preempted_requests_come_back_with_their_own_blocks(full_story, outcome):
    before, after = outcome["before the crowd"], outcome["after the crowd"]
    assert after["vllm:num_preemptions"] > before["vllm:num_preemptions"]
    loads = [outcome[f"{when} the crowd's return"]["onboarded"] for when in ("before", "after")]
    prompts = sum((len(tokens) - 1) // full_story.block for tokens in full_story.crowd)
    assert loads[1] - loads[0] >= prompts
    for name in ("crowd", "crowd again"):
        agree(outcome, {f"lone {i}": tokens for i, tokens in enumerate(outcome.tokens(name))})
    assert outcome["reset after the crowd"] is True
