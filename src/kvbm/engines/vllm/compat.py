"""What differs between vLLM releases, in one place.

The other modules use only interfaces that all supported releases share. KVBM runs on a release that is not in the list
below and logs a warning: most releases change nothing that KVBM uses.
"""

from __future__ import annotations

import logging
import re
import weakref
from typing import Any

import vllm
import vllm.distributed.kv_transfer as kv_transfer
import vllm.envs as envs
import vllm.v1.core.kv_cache_utils as kv_cache_utils
import vllm.v1.kv_cache_interface as kv_cache_interface
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.platforms import current_platform

from kvbm.engines import supported
from kvbm.engines.vllm.groups import STATE, Offer

logger = logging.getLogger(__name__)

TESTED = supported.RELEASES["vllm"]

# Every method and property of the base class that KVBM implements or leaves alone on purpose. A test compares it with
# the installed release: a name that is not here is a change of the contract that needs a review.
KNOWN_MEMBERS = frozenset({
    "bind_connector_metadata", "bind_gpu_block_pool", "bind_kv_cache_manager", "build_connector_meta",
    "build_connector_worker_meta", "build_kv_connector_stats", "build_prom_metrics", "clear_connector_metadata",
    "finish_forward", "get_block_ids_with_load_errors", "get_external_cache_hit_sources", "get_finished",
    "get_finished_count", "get_handshake_metadata", "get_kv_connector_kv_cache_events", "get_kv_connector_stats",
    "get_loaded_kv_cache_group_ids", "get_mem_pool_context", "get_num_new_matched_tokens",
    "get_required_kvcache_layout", "get_transfer_results", "handle_preemptions", "has_connector_metadata",
    "has_pending_block_frees",
    "has_pending_push_work", "on_new_request", "prefer_cross_layer_blocks", "register_cross_layers_kv_cache",
    "register_finished_partial_tail", "register_kv_caches", "request_finished", "requires_kv_delivery",
    "requires_piecewise_for_cudagraph", "reset_cache", "reset_capture_state", "role", "save_kv_layer",
    "set_host_xfer_buffer_ops", "set_xfer_handshake_metadata", "set_xfer_handshake_metadata_pp_aware", "shutdown",
    "start_load_kv", "supports_divergent_local_hybrid_hits", "take_events", "update_connector_output",
    "update_state_after_alloc", "wait_for_layer_load", "wait_for_save",
})  # fmt: skip


def release() -> tuple[int, int]:
    """(major, minor) of the installed vLLM; (0, 0) for a build that does not say."""
    found = re.match(r"(\d+)\.(\d+)", str(getattr(vllm, "__version__", "")))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def is_on_cpu() -> bool:
    return bool(current_platform.is_cpu())


def unknown_members() -> set[str]:
    """Members of the installed base class that are not in ``KNOWN_MEMBERS``."""
    return {name for name in vars(base.KVConnectorBase_V1) if not name.startswith("_")} - KNOWN_MEMBERS


def is_tested() -> bool:
    return "{}.{}".format(*release()) in TESTED


def warn_if_untested() -> None:
    if is_tested():
        return
    new = sorted(unknown_members())
    logger.warning(
        "KVBM has not been tested with vLLM %s (tested: %s). It will run and may miss what is new%s.",
        getattr(vllm, "__version__", "of unknown version"),
        ", ".join(TESTED),
        f": {', '.join(new)}" if new else "",
    )


def hashes_are_stable(environ: dict[str, str]) -> bool:
    """Whether vLLM's block hashes mean the same in the next process. Before 0.29 their seed was random by default."""
    return "PYTHONHASHSEED" in environ or release() >= (0, 29)


def hashes_follow_sessions() -> bool:
    """Whether the hashes of a streaming-input session are right. Before 0.32 vLLM keeps the hash of a block whose last
    token it has taken back, so the refilled block has a wrong hash."""
    return release() >= (0, 32)


def fails_whole_requests() -> bool:
    """Whether a failed load can be reported for a whole request, since 0.30. Failed blocks can be reported only where
    vLLM has a single group."""
    return hasattr(base, "KVConnectorTransferResults")


def windows(vllm_config: Any, kv_cache_config: Any) -> list[int] | None:
    """How many tokens the layers of each KV cache group see, the next one included; 0 for all of them, STATE for layers
    that keep a state. None if KVBM cannot store the groups' blocks (:mod:`~kvbm.engines.vllm.groups`): blocks of unlike
    size, states of which vLLM saves none or whose model has no attention, states beside guessed tokens, latent vectors,
    draft models, hashes of less than a block, and releases to which a failed load cannot be reported.
    """
    groups, size = kv_cache_config.kv_cache_groups, vllm_config.cache_config.block_size
    if not groups or not fails_whole_requests() or _has_draft_model(vllm_config):
        return None
    found = []
    for group in groups:
        spec = group.kv_cache_spec
        if (
            type(spec) not in _KEPT
            or getattr(spec, "mamba_cache_mode", "align") != "align"
            or spec.block_size != size
            or spec.page_size_bytes != groups[0].kv_cache_spec.page_size_bytes
            or not getattr(group, "enable_kv_transfer", True)
            or any(getattr(spec, name, 0) for name in ("non_causal", "extra_retained_tokens", "prefix_replay_tokens"))
        ):
            return None
        found.append(_window(spec))
    precisions = {getattr(group.kv_cache_spec, "dtype", None) for group in groups} - {None}
    if len(precisions) != 1 or hashed_tokens(vllm_config, kv_cache_config) != size:
        return None
    if clears_blocks(kv_cache_config) and STATE not in found:
        return None
    if STATE in found and getattr(vllm_config, "speculative_config", None) is not None:
        return None  # their tables have a block for each guess as well
    return found


def _has_draft_model(vllm_config: Any) -> bool:
    """Whether tokens are guessed by layers, which have blocks of their own, and not by looking at earlier tokens."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return speculative is not None and getattr(speculative, "method", None) not in ("ngram", "ngram_gpu", "suffix")


_KEPT = (kv_cache_interface.FullAttentionSpec, kv_cache_interface.SlidingWindowSpec, kv_cache_interface.MambaSpec)


def _window(spec: Any) -> int:
    if type(spec) is kv_cache_interface.MambaSpec:
        return STATE
    # Full attention has a window as well where the layers look no farther, but their blocks are kept.
    return int(spec.sliding_window) if type(spec) is kv_cache_interface.SlidingWindowSpec else 0


def unsaved_states(kv_cache_config: Any) -> str | None:
    """The mode in which vLLM keeps states, if it saves none that a later request could go on from."""
    modes = [getattr(group.kv_cache_spec, "mamba_cache_mode", "align") for group in kv_cache_config.kv_cache_groups]
    return next((mode for mode in modes if mode != "align"), None)


def offered_states(output: Any) -> dict[str, list[Offer]]:
    """Blocks with the states that vLLM saves in a step, by request. They are valid when the step has been computed, and
    until another request gets them."""
    state = getattr(output, "kv_connector_block_state", None)
    offers = getattr(state, "boundary_state_offloads", None) or {}
    return {request: [Offer(*offer) for offer in offered] for request, offered in offers.items()}


def hashed_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """How many tokens each of vLLM's hashes adds to the one before. Since 0.32 the cache says so; until then, with
    several groups, it is what the user has asked for."""
    cache, told = vllm_config.cache_config, getattr(kv_cache_config, "hash_block_size", None)
    if told is None and len(kv_cache_config.kv_cache_groups) > 1:
        told = getattr(cache, "prefix_match_unit", None)
    return int(told or cache.block_size)


def clears_blocks(kv_cache_config: Any) -> bool:
    """Whether vLLM fills blocks with zeros before their first use, as it does where layers keep a state, or groups keep
    KV in different precisions."""
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))


def is_alone(connector: Any) -> bool:
    """Whether vLLM calls this worker's connector itself. A wrapper (MultiConnector, PdConnector) calls it beside
    others, with a configuration of its own that does not show them."""
    return bool(kv_transfer.has_kv_transfer_group() and kv_transfer.get_kv_transfer_group() is connector)


def steps_ahead(vllm_config: Any, kv_cache_config: Any) -> float:
    """See :class:`kvbm.runtime.announcements.Announcements`. Where steps overlap, vLLM takes in a report after it has
    submitted one more step. 0 where vLLM itself writes to blocks without regard to the order of steps."""
    overlaps = bool(getattr(vllm_config.scheduler_config, "async_scheduling", False))
    if not overlaps or clears_blocks(kv_cache_config) or len(kv_cache_config.kv_cache_groups) > 1:
        return 0.0
    return 0.9


def clears_before_fences(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether vLLM does so before it calls the connector: a store may then still be reading those blocks. That is the
    second model runner."""
    return clears_blocks(kv_cache_config) and bool(getattr(vllm_config, "use_v2_model_runner", False))


def unsupported_attention(kv_cache_group: Any) -> str | None:
    """Why KVBM cannot store the blocks of the only group, as the end of a sentence; None if it can.

    Only full causal attention writes every block of a prompt once and for all. With a sliding window vLLM lets go of
    blocks and puts its null block in their place; with attention that looks ahead a block depends on what follows it.
    """
    spec = kv_cache_group.kv_cache_spec
    for layer in getattr(spec, "kv_cache_specs", {"": spec}).values():
        if not isinstance(layer, kv_cache_interface.FullAttentionSpec) or getattr(layer, "rswa_window", None):
            return f"its attention keeps only part of the KV cache ({type(layer).__name__})"
        if getattr(layer, "non_causal", False):
            return "its attention is not causal"
    return None


def needs_whole_prompts(vllm_config: Any) -> str | None:
    """Why vLLM must compute every prompt of this engine from its first token, as a clause; None where it need not.

    vLLM turns its own prefix cache off for these models and features, because a hit ends the engine or changes its
    output. A user can turn the prefix cache off as well, and KVBM still serves that engine. So each condition is read
    where vLLM reads it, and never from ``enable_prefix_caching`` alone.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if getattr(vllm_config, "is_mm_encoder_only", False):  # since 0.29
        return "mm_encoder_only is on, and an encoder has no KV cache"
    if not model.is_prefix_caching_supported:
        return _lacks_prefix_caching(model)
    aux_output = getattr(vllm_config, "aux_output_config", None)  # since 0.31; before, vLLM refuses every connector
    if getattr(aux_output, "enabled", False):
        return "enable_return_routed_experts is on, and vLLM holds the experts of its own cached blocks only"
    if getattr(envs, "VLLM_BATCH_INVARIANT", False) and not cache.enable_prefix_caching:
        backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
        if backend is None or backend.name in ("FLASHINFER", "TRITON_MLA"):
            name = "automatic" if backend is None else backend.name
            return f"VLLM_BATCH_INVARIANT is on without prefix caching (attention backend: {name})"
    return None


def _lacks_prefix_caching(model_config: Any) -> str:
    """Which property of a model keeps vLLM from caching its prefixes."""
    attention, pooler = model_config.attn_type, getattr(model_config, "pooler_config", None)
    if attention == "decoder" and pooler is not None:
        if pooler.tok_pooling_type == "STEP":
            return "tok_pooling_type is STEP, and this pooling needs the hidden states of every token"
        return f"seq_pooling_type is {pooler.seq_pooling_type}, and this pooling needs the hidden states of every token"
    return f"vLLM does not support prefix caching for models with {attention} attention"


# Pooling tasks that need the last token's hidden state only. Every other task, of a plugin say, may need them all.
LAST_TOKEN_TASKS = ("embed", "classify")


def needs_every_token(request: Any) -> bool:
    """Whether every token of a request's prompt must be computed, however much of it a cache holds.

    Since 0.31 vLLM drops a connector's hit where ``skip_reading_prefix_cache`` is set; until then it leaves that to the
    connector. A user can clear that flag. vLLM then returns uninitialised memory as the log-probabilities of a hit's
    tokens, so the request's own parameters count as well.
    """
    if getattr(request, "skip_reading_prefix_cache", False):
        return True
    sampling, pooling = getattr(request, "sampling_params", None), getattr(request, "pooling_params", None)
    if pooling is not None:
        return pooling.task not in LAST_TOKEN_TASKS
    return any(getattr(sampling, name, None) is not None for name in ("prompt_logprobs", "prompt_logprob_token_ids"))


def prefills_whole_prompts(vllm_config: Any) -> bool:
    """Whether vLLM computes a prompt in one step from its first token, and can only decode on top of a hit. That is its
    MLA for CPUs, for which it turns prefix caching and chunked prefill off."""
    chunked = vllm_config.scheduler_config.enable_chunked_prefill
    return bool(current_platform.is_cpu() and vllm_config.model_config.use_mla and not chunked)


def drops_last_block(vllm_config: Any) -> bool:
    """Whether vLLM computes the last block of every hit again, for a draft model that reads hidden states (EAGLE, MTP):
    the draft model's KV of a block's last token depends on the token after it, which the block's hash leaves out.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return False
    drops = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)  # a setting since 0.31
    return bool(drops())


def same_on_all_ranks(kv_cache_group: Any) -> bool:
    """Whether every rank of a tensor-parallel group has the same KV: the latent vectors of MLA belong to no head.

    With other attention and fewer KV heads than ranks some ranks have the same heads too. But releases do not say which
    layers have how many heads, draft models have others than their targets, and a guess here would be wrong KV.
    """
    spec = kv_cache_group.kv_cache_spec
    mla = getattr(kv_cache_interface, "MLAAttentionSpec", ())
    return all(isinstance(layer, mla) for layer in getattr(spec, "kv_cache_specs", {"": spec}).values())


def tensor_parallel_group() -> Any:
    """The group of torch.distributed, over CPUs, of the ranks that compute the same layers as this one."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group


def speak_like_vllm() -> None:
    """Let KVBM's log lines go where vLLM's go: vLLM sets up its own logger only, so KVBM's would show only warnings."""
    ours, theirs = logging.getLogger("kvbm"), logging.getLogger("vllm")
    if logging.getLogger().handlers or not theirs.handlers:
        return  # the user has set up logging
    for handler in theirs.handlers:
        if handler not in ours.handlers:
            ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.level)


def recovers_exactly(vllm_config: Any) -> bool:
    """Whether vLLM computes again exactly what it has lost when a load that a step was waiting for fails.

    With overlapping steps it accepts the token of the next step, which was computed on missing KV; its
    second model runner goes on at the wrong position (vllm-project/vllm issues 45138 and 49250, open with 0.32).
    """
    overlapping = getattr(vllm_config.scheduler_config, "async_scheduling", False)
    return not overlapping and not getattr(vllm_config, "use_v2_model_runner", False)


def resumed_requests(cached: Any) -> set[str]:
    """Requests of a step that come back from preemption with a new block table."""
    return set(getattr(cached, "resumed_req_ids", ()) or ())


def tokens_left(request: Any) -> int:
    """Tokens that a request may still be given."""
    return int(request.max_tokens - request.num_output_tokens)


def has_its_last_token(request: Any) -> bool:
    """Whether a step that is under way computes a request's last token, so that no further one will have it.

    vLLM's scheduler makes the same check when steps overlap. Without overlap this is never true.
    """
    guessed = getattr(request, "num_output_placeholders", 0)
    computed = request.num_computed_tokens + 2 - guessed
    return bool(guessed and computed >= request.num_prompt_tokens + request.max_tokens)


def layer_hooks(vllm_config: Any) -> tuple[int, bool]:
    """(tokens a request has at most in a decode step, whether every attention layer calls KVBM in all other steps).

    In a full CUDA graph none does. By default only decode steps are replayed from full graphs; a step that brings a
    request with more tokens than a decode has is not one of them. A draft model's layers run after the step has been
    judged, so with a draft model KVBM does not load by layer.
    """
    speculative = getattr(vllm_config, "num_speculative_tokens", 0) or 0
    mode = getattr(getattr(vllm_config, "compilation_config", None), "cudagraph_mode", None)
    mixed = mode.mixed_mode() if mode is not None and hasattr(mode, "mixed_mode") else None
    has_draft = getattr(vllm_config, "speculative_config", None) is not None
    return 1 + speculative, getattr(mixed, "name", "NONE") != "FULL" and not has_draft


def is_on_device(block_pool: Any, block_hash: bytes) -> bool:
    """Whether vLLM's own prefix cache holds a block. True as well when it cannot be asked: then nothing is fetched."""
    try:
        return bool(block_pool.get_cached_block(block_hash, [0]))
    except Exception:
        return True


def forget_on_device(block_pool: Any, blocks: set[int]) -> None:
    """Let vLLM's own prefix cache forget these blocks. Requests that hold them keep them."""
    if block_pool is not None:
        block_pool.evict_blocks(blocks)


def adapter_name(lora: Any) -> tuple[str, ...]:
    """What vLLM's own prefix cache tells LoRA adapters apart by. Before 0.31 that was the name alone."""
    return (lora.lora_name, lora.lora_path) if release() >= (0, 31) else (lora.lora_name,)


def prefix_cache_generation(block_pool: Any) -> Any:
    """Another object after every reset of vLLM's own prefix cache; None where that cannot be seen. vLLM resets it only
    while no request holds a block."""
    found = getattr(block_pool, "cached_block_hash_to_block", None)
    return None if found is None else weakref.ref(found)


def loads_adapters_in_any_step(vllm_config: Any) -> bool:
    """Whether a connector is called in each step before vLLM chooses the adapters that the step computes with. The
    second model runner calls it afterwards."""
    return not getattr(vllm_config, "use_v2_model_runner", False)


def engine_blocks(block_pool: Any) -> tuple[int, int]:
    """(all, free) blocks of vLLM's own cache; free ones may still hold what its prefix cache knows."""
    return (block_pool.num_gpu_blocks, block_pool.get_num_free_blocks()) if block_pool is not None else (0, 0)


def event_group(kv_cache_config: Any, group: int) -> dict[str, Any]:
    """What vLLM's events say of the group that blocks belong to."""
    kind = kv_cache_interface.get_kv_cache_spec_kind(kv_cache_config.kv_cache_groups[group].kv_cache_spec)
    return {"group_idx": group, "kv_cache_spec_kind": kind.value}


def event_extra_keys(request: Any, first: int, end: int, block_size: int) -> list[Any] | None:
    """What else vLLM's hash of each block covers, as its events say it; None when that is nothing."""
    plain = request.lora_request is None and not request.cache_salt and not request.mm_features
    if plain and request.prompt_embeds is None:
        return None
    keys: list[Any] = []
    image = 0
    for block in range(first, end):
        at = block * block_size
        found, image = kv_cache_utils.generate_block_hash_extra_keys(request, at, at + block_size, image)
        keys.append(found)
    untag = getattr(kv_cache_utils, "to_event_extra_keys", None)  # since 0.31
    return keys if untag is None else untag(keys)  # type: ignore[no-any-return]
