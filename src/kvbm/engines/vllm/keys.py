"""Keys for vLLM's requests.

vLLM hashes every request itself, and its hash covers every input that tells two blocks apart: tokens, parent, cache
salt, multimodal inputs, prompt embeddings, and inputs that a later release adds. Where that hash resists collisions
KVBM takes it as it is: it costs nothing and cannot be less careful than vLLM's own prefix cache. Otherwise (xxhash, or
a granularity that is not the block) KVBM hashes the tokens. Requests with a LoRA adapter always get KVBM's own keys:
vLLM's hash covers the adapter's name and path, which do not identify its weights. Such a request has keys only
while all ranks are known to have the weights that it started with (:mod:`~kvbm.engines.vllm.adapters`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from kvbm.core.keys import Key, KeyChain, Namespace, Scope
from kvbm.engines.vllm import compat
from kvbm.engines.vllm.adapters import Adapters, Weights


class RequestKeys:
    """Gives the keys of a request's full blocks, as far as its tokens are known."""

    def __init__(self, namespace: Namespace, reuses_engine_hashes: bool, adapters: Adapters) -> None:
        self.namespace = namespace
        self.reuses_engine_hashes = reuses_engine_hashes
        self._adapters = adapters
        self._chains: dict[str, KeyChain] = {}
        self._bound: dict[str, Weights] = {}  # request -> its adapter's weights

    def of(self, request: Any) -> Sequence[Key]:
        lora = getattr(request, "lora_request", None)
        reuses = self.reuses_engine_hashes and lora is None
        if getattr(request, "resumable", False) and not (reuses and compat.hashes_follow_sessions()):
            return ()  # a session takes tokens back and adds images later on, and a running hash can do neither
        if reuses:
            return request.block_hashes  # type: ignore[no-any-return]
        weights = None if lora is None else self.weights(request)
        if lora is not None and weights is None:
            return ()
        chain = self._chains.get(request.request_id)
        if chain is None:
            if getattr(request, "prompt_embeds", None) is not None:
                return ()  # no tokens to hash
            scope = scope_of(request, None if weights is None else weights.digest)
            chain = self._chains[request.request_id] = KeyChain(self.namespace, scope)
        return chain.extend(request.all_token_ids)

    def bind(self, request: Any) -> Weights | None:
        """vLLM is about to compute a request with an adapter from its beginning: its keys stand for the weights that
        the adapter has now, or there are none."""
        weights = self._adapters.weights(request.lora_request)
        if weights is not self._bound.get(request.request_id):
            self.forget(request.request_id)
            if weights is not None:
                self._bound[request.request_id] = weights
        return weights

    def weights(self, request: Any) -> Weights | None:
        """Of the adapter that a request was bound to; None when they have changed since."""
        bound = self._bound.get(request.request_id)
        return bound if bound is not None and bound is self._adapters.weights(request.lora_request) else None

    def bound_weights(self, request: Any) -> Weights | None:
        """Of the adapter that a request was bound to, whether they have changed or not."""
        return self._bound.get(request.request_id)

    def forget(self, request_id: str) -> None:
        self._chains.pop(request_id, None)
        self._bound.pop(request_id, None)


def scope_of(request: Any, adapter: str | None = None) -> Scope:
    images = []
    for feature in getattr(request, "mm_features", None) or ():
        identifier = getattr(feature, "identifier", None) or hashlib.sha256(repr(feature).encode()).hexdigest()
        images.append((feature.mm_position.offset, str(identifier)))
    return Scope(
        lora=adapter,
        cache_salt=getattr(request, "cache_salt", None),
        multimodal=tuple(sorted(images)),
    )
