"""What makes the KV of a vLLM engine what it is: the name under which a cache outlives the engine.

Leader and workers each work it out for themselves, so it holds only what all of them know. Whatever changes the numbers
in a block, or what a key means, belongs in here: what is missing would serve another engine's KV as if it were ours,
what is too much only costs a warm start.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from kvbm.core.keys import Namespace
from kvbm.engines.vllm import compat
from kvbm.storage.index import Fingerprint

_COLLISION_RESISTANT = ("sha256", "sha256_cbor")


def reuses_engine_hashes(vllm_config: Any, kv_cache_config: Any, persistent: bool) -> bool:
    """Whether vLLM's own block hashes can be our keys: they resist collisions, count the same blocks as we do and, for
    a cache that outlives the process, mean the same in the next one."""
    cache = vllm_config.cache_config
    size = getattr(kv_cache_config, "hash_block_size", None) or cache.block_size
    resistant = cache.prefix_caching_hash_algo in _COLLISION_RESISTANT
    return resistant and size == cache.block_size and (not persistent or compat.hashes_are_stable(dict(os.environ)))


def describe(vllm_config: Any, kv_cache_config: Any) -> Fingerprint:
    """Everything but the layout of a block, which is known when the engine has made its cache."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    reuses = reuses_engine_hashes(vllm_config, kv_cache_config, persistent=True)
    draft = getattr(vllm_config, "speculative_config", None)
    return {
        "engine": "vllm {}.{}".format(*compat.release()),
        "model": str(model.model),
        "weights": weights(str(model.model), getattr(model, "revision", None), vllm_config),
        "config": _digest(_json(model.hf_config)),
        "draft": "" if draft is None else _digest(str(draft)),
        "dtype": f"{model.dtype}/{cache.cache_dtype}/{model.quantization or ''}",
        "block_size": cache.block_size,
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        # Engines side by side that share their requests have a cache each.
        "replica": getattr(parallel, "data_parallel_rank", 0) or 0,
        "keys": f"vllm-{cache.prefix_caching_hash_algo}" if reuses else _own_scheme(),
    }


def weights(name: str, revision: str | None, vllm_config: Any) -> str:
    """Which weights a model has: the commit they were published with, or what can be seen of their files.

    A folder whose files have been replaced is another model, whatever its name.
    """
    load_format = str(getattr(getattr(vllm_config, "load_config", None), "load_format", "auto"))
    path = Path(name)
    if not path.exists():
        path = _in_hub_cache(name, revision) or path
    if commit := re.search(r"/snapshots/([0-9a-f]{40})(/|$)", str(path.resolve()) if path.exists() else ""):
        return f"{load_format} commit {commit[1]}"
    return f"{load_format} {revision or ''} {files(path)}"


def files(path: Path) -> str:
    """Names, sizes and times of a folder's files, or of one file, as a digest; empty when there is none."""
    try:
        found = sorted(path.iterdir()) if path.is_dir() else [path]
        seen = [(file.name, status.st_size, status.st_mtime_ns) for file in found for status in [file.stat()]]
    except OSError:
        return ""
    return _digest(repr(seen))


def _in_hub_cache(name: str, revision: str | None) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except Exception:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _own_scheme() -> str:
    return Namespace("", "", "", 1).scheme


def _json(config: Any) -> str:
    try:
        return json.dumps(config.to_dict(), sort_keys=True, default=str)
    except Exception:
        return str(config)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
