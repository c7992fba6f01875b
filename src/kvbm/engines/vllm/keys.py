"""Keys for vLLM's requests.

vLLM hashes every request itself, and its hash covers whatever it takes to tell two blocks apart: tokens, parent, LoRA,
cache salt, multimodal inputs, prompt embeddings, and whatever a later release adds. Where that hash resists collisions
we take it as it is: it costs nothing and cannot be less careful than vLLM's own prefix cache. Otherwise (xxhash, or a
granularity that is not the block) we hash the tokens ourselves. So we do for requests with an adapter where blocks
outlive the engine: vLLM knows an adapter by name and path, and its files may be others by the next start. And with
releases that know it by its name alone: another may be loaded under that name while the engine runs.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbm.core.keys import Key, KeyChain, Namespace, Scope
from kvbm.engines.vllm import compat
from kvbm.engines.weights import files


class RequestKeys:
    """Gives the keys of a request's full blocks, as far as its tokens are known."""

    def __init__(self, namespace: Namespace, reuses_engine_hashes: bool, persistent: bool = False) -> None:
        self.namespace = namespace
        self.reuses_engine_hashes = reuses_engine_hashes
        self._hashes_adapters = persistent or compat.release() < (0, 31)
        self._chains: dict[str, KeyChain] = {}

    def of(self, request: Any) -> Sequence[Key]:
        if getattr(request, "resumable", False) and not (self.reuses_engine_hashes and compat.hashes_follow_sessions()):
            return ()  # a session takes tokens back and adds images later on, and a running hash can do neither
        if self.reuses_engine_hashes and not (self._hashes_adapters and getattr(request, "lora_request", None)):
            return request.block_hashes  # type: ignore[no-any-return]
        chain = self._chains.get(request.request_id)
        if chain is None:
            if getattr(request, "prompt_embeds", None) is not None:
                return ()  # no tokens to hash
            chain = self._chains[request.request_id] = KeyChain(self.namespace, scope_of(request))
        return chain.extend(request.all_token_ids)

    def forget(self, request_id: str) -> None:
        self._chains.pop(request_id, None)


def scope_of(request: Any) -> Scope:
    lora = getattr(request, "lora_request", None)
    images = []
    for feature in getattr(request, "mm_features", None) or ():
        identifier = getattr(feature, "identifier", None) or hashlib.sha256(repr(feature).encode()).hexdigest()
        images.append((feature.mm_position.offset, str(identifier)))
    return Scope(
        lora=None if lora is None else adapter_name(lora),
        cache_salt=getattr(request, "cache_salt", None),
        multimodal=tuple(sorted(images)),
    )


_first_seen: dict[tuple[int, str, str], str] = {}  # adapter -> its files when a request first asked for it
_this_process = secrets.token_hex(16)


def adapter_name(lora: Any) -> str:
    """What tells an adapter's KV from all other, in this engine and in those after it.

    vLLM reads the files once, and again when it has dropped the adapter meanwhile. Once they are no longer what they
    were, nobody can tell which ones a block was computed with: then no other engine finds it.
    """
    path = getattr(lora, "lora_path", "")
    now = files(Path(path))
    first = _first_seen.setdefault((lora.lora_int_id, lora.lora_name, path), now)
    return f"{lora.lora_name}\0{path}\0{now}" + ("" if now == first else f"\0{_this_process}")
