"""Keys for TensorRT-LLM's requests.

The engine's own block hashes (``block_hashes``) are 64 bits wide and made to be fast, so KVBM does not use
them and hashes the tokens itself. All other inputs that change a block's KV go into the request's scope.
"""

from __future__ import annotations

import os
from typing import Any

from kvbm.core.keys import Scope
from kvbm.engines.trtllm import compat

# An adapter's number and path do not identify its weights. TensorRT-LLM keeps to the weights that it has read first for
# a number, but the next process may read others: no other process finds blocks of an adapter.
_PROCESS = os.urandom(8).hex()


def scope_of(request: Any) -> Scope | None:
    """What sets a request apart from others with the same tokens; None when its KV does not follow from tokens."""
    if getattr(request, "prompt_embedding_table", None) is not None:
        return None
    images = _images(request)
    salted = hasattr(request, "cache_salt") or hasattr(request, "cache_salt_id")
    if images is None or (compat.HAS_SALTS and not salted):
        return None
    return Scope(lora=_lora(request), cache_salt=_salt(request), multimodal=images)


def _lora(request: Any) -> str | None:
    number = getattr(request, "lora_task_id", None)
    if number is None:
        return None
    return f"{number}:{getattr(request, 'py_lora_path', None)}@{_PROCESS}"


def _salt(request: Any) -> str | None:
    salt = getattr(request, "cache_salt", None)
    if salt is not None:
        return f"salt:{salt}"
    number = getattr(request, "cache_salt_id", None)  # 1.1 and 1.2 hash the salt first
    return None if number is None else f"id:{number}"


def _images(request: Any) -> tuple[tuple[int, str], ...] | None:
    positions = getattr(request, "multimodal_positions", None) or ()
    hashes = getattr(request, "multimodal_hashes", None) or ()
    if len(positions) != len(hashes) or (not positions and getattr(request, "multimodal_embedding", None) is not None):
        return None  # there is an image, and we cannot tell which
    return tuple(sorted((int(at), repr(list(digest))) for at, digest in zip(positions, hashes, strict=True)))
