"""The fingerprint of a vLLM engine's KV: the name under which a cache outlives the engine.

The leader and each worker compute it independently, so it holds only values that all of them have. The digest of the
weights is added later: the workers hash the loaded weights and report to the leader. Every value that changes the
numbers in a block or the meaning of a key belongs in here. A missing entry would serve KV of a different engine
configuration; a superfluous entry only costs a warm start.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Sequence
from typing import Any

import torch

from kvbm.core.keys import SCHEME, Namespace
from kvbm.engines.model_files import digest_of_files, folder_of
from kvbm.engines.vllm import compat
from kvbm.engines.weights import digest
from kvbm.plans import Hello
from kvbm.tiers.base import Fingerprint

logger = logging.getLogger("kvbm")

_COLLISION_RESISTANT = ("sha256", "sha256_cbor")


def reuses_engine_hashes(vllm_config: Any, kv_cache_config: Any, persistent: bool) -> bool:
    """Whether vLLM's own block hashes can be our keys: they resist collisions, count the same blocks as we do and, for
    a cache that outlives the process, mean the same in the next one."""
    cache = vllm_config.cache_config
    whole_blocks = compat.hashed_tokens(vllm_config, kv_cache_config) == cache.block_size
    resistant = cache.prefix_caching_hash_algo in _COLLISION_RESISTANT
    return resistant and whole_blocks and (not persistent or compat.hashes_are_stable(dict(os.environ)))


def namespace(vllm_config: Any, hellos: Sequence[Hello]) -> Namespace:
    """The common part of all keys of an engine, where KVBM hashes tokens itself."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    return Namespace(
        model=f"{model.model}@{getattr(model, 'revision', None) or ''}",
        dtype=f"{model.dtype}/{cache.cache_dtype}",
        layout=" ".join(sorted({hello.layout for hello in hellos})),
        block_size=cache.block_size,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
    )


def describe(vllm_config: Any, kv_cache_config: Any) -> Fingerprint | None:
    """Everything but the weights, and the layout of a block, which is known when the engine has made its cache. None,
    with a sentence, when no other engine could read its blocks."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    if getattr(cache, "calculate_kv_scales", False):
        logger.warning("Persistence is off: --calculate-kv-scales gives every start scales of its own")
        return None
    try:
        processing = _processing(model)
    except OSError as error:
        logger.warning("Persistence is off: KVBM cannot read how this model prepares images and sound: %s", error)
        return None
    reuses = reuses_engine_hashes(vllm_config, kv_cache_config, persistent=True)
    draft = getattr(vllm_config, "speculative_config", None)
    config = _json(model.hf_config)
    return {
        "engine": "vllm {}.{}".format(*compat.release()),
        "model": str(model.model),
        "config": digest(config + _length(config, model)),
        "draft": "" if draft is None else digest(str(draft)),
        "dtype": f"{model.dtype}/{cache.cache_dtype}/{model.quantization or ''}",
        "attention": _attention(vllm_config),
        "block_size": cache.block_size,
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        # Engines side by side that share their requests have a cache each.
        "replica": getattr(parallel, "data_parallel_rank", 0) or 0,
        "keys": f"vllm-{cache.prefix_caching_hash_algo}" if reuses else SCHEME,
        **_groups(kv_cache_config),
        **processing,
    }


def _attention(vllm_config: Any) -> str:
    """The attention backend determines the order of numbers inside a block, and the tensor's shape does not show all
    of it. So: the configured backend and, on a CPU, the instruction set, for which vLLM packs keys."""
    config = getattr(vllm_config, "attention_config", None)
    asked = f"{getattr(config, 'backend', None)} {getattr(config, 'backend_per_kind', None) or ''}".strip()
    if getattr(getattr(vllm_config, "device_config", None), "device_type", "") != "cpu":
        return asked
    tiles, wide = (getattr(torch.cpu, name, bool)() for name in ("_is_amx_tile_supported", "_is_avx512_supported"))
    return f"{asked} on {platform.machine()}{' amx' if tiles else ''}{' avx512' if wide else ''}"


def _length(config: str, model: Any) -> str:
    """The longest prompt that the engine takes, where that changes the numbers in every block: it decides between the
    factors of a long and a short rope, and whether Llama 4 tunes the temperature of its queries."""
    return f" {model.max_model_len}" if '"longrope"' in config or '"llama4' in config else ""


def _groups(kv_cache_config: Any) -> Fingerprint:
    """What kinds of layers are kept apart, where not all are together. Which layers those are follows from the rest,
    and from how they are spread over a pipeline, of which a rank knows its own part only."""
    kinds = [str(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    stages = os.environ.get("VLLM_PP_LAYER_PARTITION", "")
    return {"groups": digest(json.dumps([*kinds, stages]))} if len(kinds) > 1 else {}


def _processing(model: Any) -> Fingerprint:
    """The settings of a multimodal model's processor, and the code that a user trusts: vLLM's hashes cover neither.
    Raises OSError when they cannot be read."""
    processor, code = bool(model.is_multimodal_model), bool(getattr(model, "trust_remote_code", False))
    if not (processor or code):
        return {}
    folder = folder_of(str(model.model), getattr(model, "revision", None))
    if folder is None:
        raise FileNotFoundError(f"{model.model} is neither a folder nor in the cache of the Hugging Face hub")
    found = digest_of_files(folder, processor=processor, code=code)
    return {"processing": found} if found else {}


def _json(config: Any) -> str:
    try:
        return json.dumps(config.to_dict(), sort_keys=True, default=str)
    except Exception:
        return str(config)
