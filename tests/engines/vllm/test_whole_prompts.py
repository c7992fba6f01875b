"""Which engines and which requests get no hit, because vLLM computes every token of their prompts."""

from __future__ import annotations

from types import SimpleNamespace as Config

import pytest

pytest.importorskip("vllm")

from vllm import PoolingParams, SamplingParams

from kvbm.engines.vllm import compat, connector


def pooling(attention="decoder", seq="LAST", tok="ALL"):
    supported = attention == "decoder" and seq == "LAST" and tok == "ALL"
    pooler = Config(seq_pooling_type=seq, tok_pooling_type=tok)
    return Config(is_prefix_caching_supported=supported, attn_type=attention, pooler_config=pooler, use_mla=False)


def generating(attention="decoder", supported=True, use_mla=False):
    return Config(is_prefix_caching_supported=supported, attn_type=attention, pooler_config=None, use_mla=use_mla)


def engine(model=None, caching=True, **more):
    """What vLLM's configuration says, as far as these rules read it."""
    return Config(
        model_config=model or generating(),
        cache_config=Config(enable_prefix_caching=caching),
        scheduler_config=Config(enable_chunked_prefill=True),
        parallel_config=Config(),
        **more,
    )


OUT = {
    "seq_pooling_type is MEAN": engine(pooling(seq="MEAN"), False),
    "seq_pooling_type is CLS": engine(pooling(seq="CLS"), False),
    "tok_pooling_type is STEP": engine(pooling(tok="STEP"), False),
    "models with encoder_only attention": engine(pooling("encoder_only"), False),
    "models with hybrid attention": engine(pooling("hybrid"), False),
    "models with encoder_decoder attention": engine(generating("encoder_decoder", False), False),
    "models with attention_free attention": engine(generating("attention_free", False), False),
    "mm_encoder_only is on": engine(is_mm_encoder_only=True),
    "enable_return_routed_experts is on": engine(aux_output_config=Config(enabled=True)),
}


@pytest.mark.parametrize("reason", OUT)
def test_each_condition_is_named(reason):
    assert reason in compat.needs_whole_prompts(OUT[reason])
    assert reason in connector._groups(OUT[reason], Config(kv_cache_groups=[]))


def test_prefix_caching_that_the_user_turns_off_is_no_reason():
    assert compat.needs_whole_prompts(engine(caching=False)) is None
    assert compat.needs_whole_prompts(engine(pooling(), caching=False)) is None
    assert compat.needs_whole_prompts(engine(aux_output_config=Config(enabled=False))) is None


@pytest.mark.parametrize(("backend", "caching", "out"), [
    (None, False, True), ("FLASHINFER", False, True), ("TRITON_MLA", False, True),
    ("FLASH_ATTN", False, False), (None, True, False), ("FLASHINFER", True, False),
])  # fmt: skip
def test_batch_invariance_without_prefix_caching(backend, caching, out, monkeypatch):
    chosen = Config(backend=None if backend is None else Config(name=backend))
    config = engine(caching=caching, attention_config=chosen)
    assert compat.needs_whole_prompts(config) is None
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert ("VLLM_BATCH_INVARIANT is on" in (compat.needs_whole_prompts(config) or "")) is out


@pytest.mark.parametrize(("mla", "chunked", "cpu", "only_decodes"), [
    (True, False, True, True), (False, False, True, False), (True, True, True, False), (True, False, False, False),
])  # fmt: skip
def test_mla_on_a_cpu_only_decodes_on_top_of_a_hit(mla, chunked, cpu, only_decodes, monkeypatch):
    monkeypatch.setattr(compat, "current_platform", Config(is_cpu=lambda: cpu))
    config = engine(generating(use_mla=mla), caching=False)
    config.scheduler_config.enable_chunked_prefill = chunked
    assert compat.prefills_whole_prompts(config) is only_decodes


def asked(sampling=None, pooling=None, skip=False):
    return Config(sampling_params=sampling, pooling_params=pooling, skip_reading_prefix_cache=skip)


@pytest.mark.parametrize(("request_", "every_token"), [
    (asked(SamplingParams()), False),
    (asked(SamplingParams(logprobs=3)), False),
    (asked(SamplingParams(), skip=True), True),
    (asked(SamplingParams(prompt_logprobs=0)), True),
    (asked(SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False)), True),
    (asked(Config(prompt_logprobs=None, prompt_logprob_token_ids=[7])), True),
    (asked(pooling=PoolingParams(task="embed")), False),
    (asked(pooling=PoolingParams(task="classify")), False),
    (asked(pooling=PoolingParams(task="embed"), skip=True), True),
    (asked(pooling=PoolingParams(task="token_embed", skip_reading_prefix_cache=False)), True),
    (asked(pooling=PoolingParams(task="token_classify")), True),
    (asked(pooling=PoolingParams(task="plugin")), True),
    (asked(pooling=PoolingParams()), True),
    (Config(), False),
])  # fmt: skip
def test_requests_that_need_every_token(request_, every_token):
    assert compat.needs_every_token(request_) is every_token


def test_draft_models_that_read_hidden_states():
    assert not compat.drops_last_block(Config(speculative_config=None))
    assert compat.drops_last_block(Config(speculative_config=Config(use_eagle=lambda: True)))
    assert not compat.drops_last_block(Config(speculative_config=Config(use_eagle=lambda: False)))
    kept = Config(use_eagle=lambda: True, use_eagle_block_drop=lambda: False)
    assert not compat.drops_last_block(Config(speculative_config=kept))
