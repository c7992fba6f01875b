"""Models and requests for which vLLM computes every token of a prompt: a hit would end the engine or cut the answer."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from engines import do, generate, prompt

pytestmark = pytest.mark.engine

CACHE = {"cpu_cache_override_num_blocks": 512}
PROMPT, OTHER = prompt(1, 400), prompt(2, 200)
WHOLE = 12 * 32  # tokens of the prompt that come back at most


class Pooling(NamedTuple):
    """One way to pool, and what KVBM does about it."""

    task: str
    pooler: Mapping[str, Any] = MappingProxyType({})
    engine: Mapping[str, Any] = MappingProxyType({})
    out: str = ""  # part of the sentence with which KVBM stays out of the engine
    cached: int = 0  # tokens that come back for a prompt that vLLM has dropped


POOLING = {
    "MEAN": Pooling("embed", {"seq_pooling_type": "MEAN"}, out="seq_pooling_type is MEAN"),
    "CLS": Pooling("embed", {"seq_pooling_type": "CLS"}, out="seq_pooling_type is CLS"),
    "LAST": Pooling("embed", {"seq_pooling_type": "LAST"}, cached=WHOLE),
    "ALL": Pooling("token_embed", {"tok_pooling_type": "ALL"}),
    "STEP": Pooling("token_embed", {"tok_pooling_type": "STEP", "step_tag_id": PROMPT[5]}, out="is STEP"),
    "classify": Pooling("classify", engine={"model": "classifier"}, cached=WHOLE),
    "token_classify": Pooling("token_classify", engine={"model": "classifier"}),
    "bidirectional": Pooling("embed", engine={"hf_overrides": {"is_causal": False}}, out="encoder_only attention"),
}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory, model):
    """A random Qwen3 with a head for three labels and the tokenizer of the usual model."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(model, num_labels=3, pad_token_id=2, initializer_range=0.3)
    transformers.Qwen3ForSequenceClassification(config).save_pretrained(folder)
    for file in Path(model).glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)


def ask(task: str) -> list[dict]:
    """A prompt that is new, known, known beside another one, and known after vLLM has dropped it."""
    return [
        do("pool", "new", prompts=[PROMPT], task=task),
        do("drain"),
        do("pool", "known", prompts=[PROMPT], task=task),
        do("pool", "both", prompts=[OTHER, PROMPT], task=task),
        do("drain"),
        do("reset"),
        do("pool", "dropped", prompts=[PROMPT], task=task),
        do("drain"),
    ]


# Of the others test_whole_prompts.py checks what KVBM decides.
FAST = ("LAST", "ALL", "classify")


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.long) for kind in POOLING]
)
def test_pooling_gives_what_vllm_gives(kind, run_scenario, classifier):
    task, pooler, engine, out, cached = POOLING[kind]
    engine = {"runner": "pooling", "enable_prefix_caching": None, **engine, "pooler_config": {"task": task, **pooler}}
    if engine.get("model") == "classifier":
        engine["model"] = classifier
    alone = run_scenario(ask(task), None, engine)
    story = run_scenario([*ask(task), do("state", "end")], CACHE, engine)
    for step in ("new", "known", "both", "dropped"):
        for ours, vllms in zip(story[step]["data"], alone[step]["data"], strict=True):
            assert flat(ours) == pytest.approx(flat(vllms), abs=1e-4), step
    assert story["dropped"]["cached"] == [cached]
    assert story["end"]["bypassed"] is bool(out)
    said = story.said("KVBM stays out of the way")
    assert len(said) == bool(out)
    assert all(out in sentence for sentence in said)


def flat(data: list) -> list[float]:
    return [number for row in data for number in row] if data and isinstance(data[0], list) else data


@pytest.mark.matrix
def test_mean_pooling_keeps_kvbm_out(run_scenario):
    engine = {"runner": "pooling", "enable_prefix_caching": None, "pooler_config": {"pooling_type": "MEAN"}}
    alone = run_scenario(ask("embed"), None, engine)
    story = run_scenario([*ask("embed"), do("state", "end")], CACHE, engine)
    for step in ("new", "known", "both", "dropped"):
        assert story[step]["data"] == alone[step]["data"]
    assert story["end"]["bypassed"]
    (sentence,) = story.said("KVBM stays out of the way")
    assert "seq_pooling_type is MEAN" in sentence


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_requests_that_read_no_prefix_cache_get_no_hit(mode, run_scenario):
    """Even where a request asks for prompt log-probabilities and a hit: the hit would leave some of them out."""
    asked = {
        "logprobs": {"prompt_logprobs": 2},
        "logprobs and a hit": {"prompt_logprobs": 2, "skip_reading_prefix_cache": False},
        "no hit": {"skip_reading_prefix_cache": True},
        "a hit": {"skip_reading_prefix_cache": False},
    }
    steps = [generate(PROMPT, name="cold"), do("drain")]
    for name, params in asked.items():
        steps += [do("reset"), generate(PROMPT, name=name, **params), do("drain")]
    steps += [generate(PROMPT, name="on device", prompt_logprobs=2), do("drain")]
    alone = run_scenario(steps)
    story = run_scenario([*steps, do("state", "end")], {**CACHE, "onboard": mode})
    for name in ("cold", *asked, "on device"):
        assert story.tokens(name) == alone.tokens(name), name
    for name in ("logprobs", "logprobs and a hit", "on device"):
        assert story[name]["prompt_logprobs"] == alone[name]["prompt_logprobs"], name
        assert len(story[name]["prompt_logprobs"][0]) == len(PROMPT)
    assert [story[name]["cached"] for name in asked] == [[0], [0], [0], [WHOLE]]
    assert story["end"]["onboarded"] == 12
    assert story["end"]["faults"] == {}


def test_the_last_block_of_a_hit_is_computed_where_vllm_does_so(run_scenario, baseline):
    """For draft models that read hidden states. Beside another request KVBM adds no last block either."""
    exact, other = PROMPT[: 12 * 32], prompt(4, 40)
    steps = [
        generate(PROMPT, name="cold"),
        do("drain"),
        do("reset"),
        generate(PROMPT, name="dropped"),
        do("reset"),
        do("add", names=["other"], prompts=[other], max_tokens=60),
        do("step", times=3),
        do("add", names=["exact"], prompts=[exact]),
        do("finish", "together"),
        do("state", "end"),
    ]
    patch = {"kvbm.engines.vllm.compat:drops_last_block": {"returns": True}}
    story = run_scenario(steps, {**CACHE, "onboard": "async"}, patch=patch)
    assert story.tokens("cold") == story.tokens("dropped") == baseline([PROMPT])
    assert story["dropped"]["cached"] == [WHOLE - 32]
    assert story["together"]["exact"] == baseline([exact])[0]
    assert story["end"]["onboarded"] == 11 + 10
