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
from kvbm.runtime.leader import Leader


def take_hint(leader: Leader | None, request: Any) -> Hint | None:
    """The hint of a request that has just arrived; None where there is none to follow."""
    envelope, params = getattr(request, "kv_hints", None), getattr(request, "kv_transfer_params", None)
    if leader is None or (envelope is None and not params):
        return None
    if not any(catalog.takes_hints for catalog in leader.manager.catalogs.values()):
        return None
    found = parse_transfer_params(params) if envelope is None else parse_envelope(envelope, request.block_hashes)
    if found is None:
        return None
    add(leader.counts.hints, found if isinstance(found, str) else TAKEN, 1)
    return None if isinstance(found, str) else found
