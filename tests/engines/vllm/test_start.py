"""What KVBM refuses, what it stays out of, and what it says at start."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from engines import do, generate, prompt

pytestmark = pytest.mark.engine

CACHE = {"cpu_cache_override_num_blocks": 512}
PROMPT, OTHER = prompt(1, 400), prompt(2, 400)


def test_no_tier_is_refused_and_the_settings_are_named(run_scenario):
    story = run_scenario([], {}, refused=True)
    for name in ("DYN_KVBM_CPU_CACHE_GB", "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", "DYN_KVBM_DISK_CACHE_GB"):
        assert name in story.refused


def test_a_wrong_value_is_refused_by_name(run_scenario):
    story = run_scenario([], {"cpu_cache_gb": "plenty"}, refused=True)
    assert "cpu_cache_gb='plenty'" in story.refused


def test_more_memory_than_there_is_is_refused_with_what_would_fit(run_scenario):
    story = run_scenario([], {"cpu_cache_gb": 100_000}, refused=True)
    assert "DYN_KVBM_CPU_CACHE_GB" in story.refused
    fits = re.search(r"up to ([\d.]+) GB", story.refused)
    assert fits is not None, story.refused
    assert 0 < float(fits[1]) < 100_000


def test_settings_come_from_the_environment_too(run_scenario):
    env = {"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "300", "DYN_CONNECTOR": "kvbm"}
    story = run_scenario([do("state", "state")], {}, env=env)
    assert story["state"]["size"] == 300
    assert story.said("DYN_CONNECTOR is set but not used: ")
    assert story.said("KVBM is ready: 300 host blocks of 32 tokens")
    # Where vLLM's own lines go, and at its level.
    assert "KVBM is ready: 300 host blocks" in story.output


def test_everything_worth_a_warning_is_said_once(run_scenario):
    kvbm = {"cpu_cache_override_num_blocks": 100, "kv_load_failure_policy": "fail"}
    story = run_scenario([], kvbm, patch={"vllm:__version__": "0.99.1"})
    (policy,) = story.said("kv_load_failure_policy is 'fail'")
    assert '"kv_load_failure_policy": "recompute"' in policy
    (small,) = story.said("is smaller than vLLM's own cache")
    assert "100 blocks" in small
    assert "256 blocks" in small
    (version,) = story.said("has not been tested with vLLM 0.99.1")
    assert "tested: 0.26" in version


def test_an_ordinary_start_warns_of_nothing(run_scenario):
    story = run_scenario([], CACHE)
    assert [message for level, message in story.log if level != "INFO"] == []


def test_an_engine_whose_workers_take_no_part_runs_without_kvbm(run_scenario, baseline):
    """vLLM changes some settings in its workers' processes only, so they may stay out where the scheduler would not."""
    patch = {"kvbm.engines.vllm.connector:WorkerHello": {"returns": None}}
    steps = [generate(PROMPT, name="first"), do("reset"), generate(PROMPT, name="again"), do("state", "end")]
    story = run_scenario(steps, CACHE, patch=patch)
    assert story.tokens("first") == story.tokens("again") == baseline([PROMPT])
    assert story["end"]["bypassed"]
    (sentence,) = story.said("KVBM stays out of the way")
    assert "no worker takes part" in sentence


@pytest.fixture(scope="module")
def make_model(tmp_path_factory, model):
    """Makes other tiny models whose tokens depend on their KV, with the tokenizer of the usual one."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def make(kind: str, **settings: object) -> str:
        folder = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        shape = {"vocab_size": 49152, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.3}
        tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": False}
        config = getattr(transformers, f"{kind}Config".replace("Gemma3C", "Gemma3TextC"))
        config = config(**{**shape, **heads, **tokens, "max_position_embeddings": 8192, **settings})
        getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (Path(model) / name).exists():
                shutil.copy(Path(model) / name, folder)
        return str(folder)

    return make


@pytest.mark.parametrize("served", [True, False], ids=["served", "left alone"])
def test_a_model_that_lets_go_of_blocks_gets_none_that_it_has_let_go_of(served, make_model, run_scenario, baseline):
    """A sliding window: vLLM puts its null block in the place of blocks that have left it. What was kept from there
    would be found under a good key by the next prompt."""
    if served and not pytest.importorskip("kvbm.engines.vllm.compat").fails_whole_requests():
        pytest.skip("this release of vLLM cannot be told of a load that has failed")
    engine = {"model": make_model("Mistral", sliding_window=128)}
    half = PROMPT[:160] + prompt(3, 100)
    wanted = baseline([PROMPT, OTHER, half], 16, engine)
    steps = [
        generate(PROMPT, name="first"),
        generate(OTHER),  # pushes the first out of the host tier
        generate(PROMPT),  # an engine hit that has only the window's blocks
        do("reset", "reset"),
        generate(half, name="half"),
        do("reset"),
        generate(PROMPT, name="again"),
        do("state", "state"),
    ]
    patch = {} if served else {"kvbm.engines.vllm.compat:windows": {"returns": None}}
    story = run_scenario(steps, {"cpu_cache_override_num_blocks": 13}, engine, patch=patch)
    assert (story.tokens("first"), story.tokens("half"), story.tokens("again")) == (wanted[:1], wanted[2:], wanted[:1])
    assert story["state"]["bypassed"] is not served
    if not served:
        (sentence,) = story.said("KVBM stays out of the way")
        assert "SlidingWindowSpec" in sentence
        assert "vLLM runs as if it were not configured" in sentence
