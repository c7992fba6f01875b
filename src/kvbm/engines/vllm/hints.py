"""Hints that come with vLLM's requests: where a router, or a client, says that a prompt's prefix lies.

vLLM 0.31 and newer hand on the envelope of a router (``Request.kv_hints``); the parameters of a client
(``kv_transfer_params.remote_kv_source``) reach every release. vLLM queues a request first and asks for its blocks when
it schedules it, so a lookup that begins with the hint is often over by then.
"""

from __future__ import annotations

from typing import Any

from kvbm.core.catalog import Hint
from kvbm.core.counts import add
from kvbm.core.hints import TAKEN, parse_envelope, parse_transfer_params
from kvbm.engines.session import Session
from kvbm.engines.vllm import compat
from kvbm.engines.vllm.keys import RequestKeys


class Hints:
    """``apart``: the model's blocks are in several groups, whose lookups begin when vLLM asks."""

    def __init__(self, session: Session, keys: RequestKeys, block_size: int, apart: bool) -> None:
        self._session = session
        self._keys = keys
        self._block_size = block_size
        self._apart = apart

    def take(self, request: Any, block_pool: Any) -> Hint | None:
        """The hint of a request that has just arrived; None where there is none to follow. Starts the lookup."""
        envelope, params = getattr(request, "kv_hints", None), getattr(request, "kv_transfer_params", None)
        leader = self._session.leader
        if (envelope is None and not params) or leader is None:
            return None
        if not any(catalog.takes_hints for catalog in leader.manager.catalogs.values()):
            return None
        found = parse_transfer_params(params) if envelope is None else parse_envelope(envelope, request.block_hashes)
        if found is None:
            return None
        add(self._session.counts.hints, found if isinstance(found, str) else TAKEN, 1)
        if isinstance(found, str):
            return None
        if not self._apart and not compat.needs_every_token(request):
            keys = self._keys.of(request)
            limit = min((request.num_tokens - 1) // self._block_size, len(keys))
            start = 0
            while start < limit and compat.is_on_device(block_pool, request.block_hashes[start]):
                start += 1
            if start < limit:
                leader.manager.expect(keys, start, limit, found)
        return found
