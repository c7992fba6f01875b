"""What a router or a client says about where a request's prefix lies, before the engine looks for it.

Two forms reach an engine:

- an *envelope* of versioned actions (``kv.fetch`` 1.x: one source, and the 64-bit hash of each of the request's blocks
  that the source holds, from the first block on). Dynamo's router makes it;
- *transfer parameters* of the request with ``remote_kv_source``: one source and no hashes. A client can set these.

A hint is advice. It may be of another protocol, malformed, out of date or wrong, and then it costs the hit: the parsers
here return a reason and never raise. A hint says nothing about the bytes: those are verified as for any other source.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from kvbm.core.catalog import Hint

PROTOCOL_MAJOR = "0"
FETCH, FETCH_MAJOR = "kv.fetch", "1"
MAX_ACTIONS = 64
MAX_HASHES = 1 << 20
MAX_HOST = 253  # of a DNS name
_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?):([0-9]{1,5})")

# What becomes of a hint, as values of a metric's label: why it is ignored, or that it is not.
UNKNOWN = "unknown"  # another protocol, action, version or mode
MALFORMED = "malformed"
STALE = "stale"  # the hashes are not those of the request's first blocks
TAKEN = "taken"  # not a reason: the tier looks where the hint says


class _Fetch(msgspec.Struct):
    source_control_endpoint: str
    block_hashes: list[int]
    mode: str = "copy"
    no_retain: bool = False


def parse_envelope(envelope: object, names: Sequence[bytes]) -> Hint | str:
    """The first action that KVBM knows, or the reason why there is none.

    ``names``: the engine's own hashes of the request's full blocks, whose last eight bytes are the hashes of a hint.
    """
    try:
        return _parse_envelope(envelope, names)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return MALFORMED  # a wrong type where no check of its own stands


def _parse_envelope(envelope: object, names: Sequence[bytes]) -> Hint | str:
    version, actions = _field(envelope, "protocol_version"), _field(envelope, "actions")
    if not isinstance(version, str) or not isinstance(actions, Sequence) or isinstance(actions, (str, bytes)):
        return MALFORMED
    if version.partition(".")[0] != PROTOCOL_MAJOR:
        return UNKNOWN
    reason = UNKNOWN
    for action in actions[:MAX_ACTIONS]:
        kind, action_version = _field(action, "action_type"), _field(action, "action_version")
        if not isinstance(kind, str) or not isinstance(action_version, str):
            return MALFORMED
        if kind == FETCH and action_version.partition(".")[0] == FETCH_MAJOR:
            found = _parse_fetch(_field(action, "payload"), names)
            if isinstance(found, Hint):
                return found
            reason = found
    return reason


def _field(source: object, name: str) -> Any:
    return source[name] if isinstance(source, Mapping) else getattr(source, name)


def _parse_fetch(payload: object, names: Sequence[bytes]) -> Hint | str:
    fetch = msgspec.convert(payload, _Fetch)
    if fetch.mode != "copy" or fetch.no_retain:
        return UNKNOWN
    address = parse_endpoint(fetch.source_control_endpoint)
    if address is None or not 0 < len(fetch.block_hashes) <= MAX_HASHES:
        return MALFORMED
    blocks = leading(fetch.block_hashes, names)
    return Hint(address, blocks) if blocks else STALE


def leading(hashes: Sequence[int], names: Sequence[bytes]) -> int:
    """How many of the hashes, from the first on, are those of the request's blocks. Raises OverflowError for a number
    that has more than 64 bits or a sign."""
    told = np.array(hashes, np.uint64)
    count = min(len(told), len(names))
    ends = b"".join([name[-8:] for name in names[:count]])
    wrong = np.flatnonzero(np.frombuffer(ends, ">u8") != told[:count])
    return int(wrong[0]) if len(wrong) else count


def parse_transfer_params(params: object) -> Hint | str | None:
    """The source in ``remote_kv_source``; None when the parameters name none."""
    if not isinstance(params, Mapping) or params.get("remote_kv_source") is None:
        return None
    source = params["remote_kv_source"]
    if not isinstance(source, Mapping):
        return MALFORMED
    host, port = source.get("remote_host"), source.get("remote_port")
    if not isinstance(host, str) or not isinstance(port, int) or isinstance(port, bool):
        return MALFORMED
    address = parse_endpoint(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
    return MALFORMED if address is None else Hint(address, introduces=False)


def parse_endpoint(endpoint: str) -> str | None:
    """The ``host:port`` of ``tcp://host:port``, with an IPv6 address in brackets; None for anything else, and for an
    address that is not one host's."""
    if len(endpoint) > MAX_HOST + 20 or (match := _ENDPOINT.fullmatch(endpoint)) is None:
        return None
    host, port = match[1].strip("[]"), int(match[3])
    if not 0 < port <= 65535:
        return None
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None if match[1].startswith("[") else f"{host.lower()}:{port}"
    if address.is_unspecified or address.is_multicast:
        return None
    return f"[{address.compressed}]:{port}" if address.version == 6 else f"{address.compressed}:{port}"
