"""Traces: the requests that a simulation replays.

A trace is a file of JSON lines, or a directory of such files, whose requests are merged by time. Two kinds of files are
understood:

- Mooncake's format: ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in tokens, and ``hash_ids``,
  one number for each block of the prompt. Equal numbers mean equal blocks with equal blocks before them.
- KVBM's own record (DYN_KVBM_ENABLE_RECORD, :mod:`kvbm.observe.record`), which also has the order in which the engine
  asked, stored and ended, and the speeds that it measured.

Optional fields of a request: ``cache_salt`` (the tenant), ``session_id``, ``final`` (the session ends with this
request), ``priority`` and ``ttl`` (seconds).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvbm.core.cost import Terms
from kvbm.core.keys import KEY_BYTES, Key
from kvbm.observe.record import HintsLine, LookupLine, StoreLine, seconds
from kvbm.plans import TierName

MOONCAKE_BLOCK_TOKENS = 512
_MAX_TOKENS = 1 << 31  # a longer prompt is a damaged line


class TraceError(ValueError):
    """A file that is no trace; the text names the line and the reason."""


class Request(NamedTuple):
    """``keys``: of the full blocks of the prompt and, in a record, of the answer."""

    at: float  # seconds
    tokens: int  # of the prompt
    output_tokens: int
    keys: list[Key]
    tenant: str = ""
    session: str = ""
    final: bool = False
    priority: int | None = None
    ttl: float | None = None
    hints: HintsLine | None = None  # those of a record, in place of the last four
    lookups: Sequence[LookupLine] = ()  # those of a record, in the order of the engine
    stores: Sequence[StoreLine] = ()
    ended: int = 0
    ended_at: float = 0.0


class Transfer(NamedTuple):
    """The end of a transfer in a record: its place in the order, and whether it went well. Also the planning of moves,
    and a reset."""

    order: int
    at: float
    plan: int
    kind: str  # "load", "store", "move", "moves" or "reset"
    ok: bool
    lost: Sequence[int] = ()  # positions of a load that did not arrive


class Trace(msgspec.Struct, frozen=True):
    """``block_bytes`` and ``slots`` are 0 and empty unless a record has them."""

    name: str
    requests: list[Request]  # in the order of time
    block_tokens: int
    block_bytes: int = 0
    slots: dict[TierName, int] = {}
    engine_blocks: int = 0  # of the engine's own cache
    settings: dict[str, str] = {}
    terms: Terms | None = None
    transfers: Sequence[Transfer] = ()
    is_exact: bool = False  # one complete record: every operation has its place in the order
    whole_blocks: bool = False  # every block of a prompt counts as full

    @property
    def blocks(self) -> int:
        """Of all prompts, with the last ones that are not full."""
        return sum(self.blocks_of(request.tokens) for request in self.requests)

    def blocks_of(self, tokens: int) -> int:
        # With whole blocks a prompt has one more token, so that all of them can be found.
        return tokens // self.block_tokens if self.whole_blocks else -(-tokens // self.block_tokens)

    @property
    def seconds(self) -> float:
        return self.requests[-1].at - self.requests[0].at


class _Line(msgspec.Struct):
    """A line of either kind. Other fields are ignored."""

    event: str = "request"
    at: float = 0.0
    timestamp: float = 0.0
    input_length: int = 0
    output_length: int = 0
    hash_ids: list[int] | None = None
    cache_salt: str | int | None = None
    session_id: str | int | None = None
    final: bool = False
    priority: int | None = None
    ttl: float | None = None
    hints: HintsLine | None = None
    lookups: list[LookupLine] = []
    stores: list[StoreLine] = []
    ended: int = 0
    # of the first line of a record
    time: float = 0.0
    block_size: int = 0
    block_bytes: int = 0
    slots: dict[str, int] = {}
    engine_blocks: int = 0
    settings: dict[str, str] = {}
    terms: Terms | None = None
    # of transfers
    plan: int = 0
    order: int = 0
    ok: bool = True
    lost: list[int] = []
    dropped: int = 0
    why: str = ""


_decode = msgspec.json.Decoder(_Line).decode


class _File(NamedTuple):
    start: _Line | None
    requests: list[_Line]
    transfers: list[Transfer]
    is_complete: bool


def read(paths: Sequence[Path], block_tokens: int = 0, whole_blocks: bool = False, limit: int | None = None) -> Trace:
    """The requests of all files. ``block_tokens``: of a hash id, where the file does not say (512). ``whole_blocks``:
    counts the last block of a prompt as full, as simulators of other caches do. ``limit``: only so many requests."""
    files = [_read_file(path, limit) for path in _files(paths)]
    starts = [file.start for file in files if file.start is not None]
    sizes = {start.block_size for start in starts if start.block_size > 0}
    if not block_tokens:
        if len(sizes) > 1:
            raise TraceError(f"records with blocks of {sorted(sizes)} tokens cannot be merged; give one of them")
        block_tokens = sizes.pop() if sizes else MOONCAKE_BLOCK_TOKENS
    epoch = min((start.time for start in starts), default=0.0)
    requests: list[Request] = []
    keys: dict[tuple[str, int], Key] = {}
    for file in files:
        shift = file.start.time - epoch if file.start is not None else 0.0
        make = partial(_request, shift=shift, block_tokens=block_tokens, whole=whole_blocks, known=keys)
        requests += map(make, file.requests)
    if not requests:
        raise TraceError(f"{', '.join(map(str, paths))}: no request in it")
    requests.sort(key=lambda request: request.at)
    first = starts[0] if starts else _Line()
    alone = len(files) == 1 and bool(starts) and files[0].is_complete and limit is None and not whole_blocks
    return Trace(
        name=", ".join(path.name for path in paths),
        requests=requests[:limit],
        block_tokens=block_tokens,
        block_bytes=max((start.block_bytes for start in starts), default=0),
        slots=first.slots,
        engine_blocks=first.engine_blocks,
        settings=first.settings,
        terms=first.terms,
        transfers=files[0].transfers if alone else (),
        is_exact=alone and all(request.ended for request in requests),
        whole_blocks=whole_blocks,
    )


def _files(paths: Sequence[Path]) -> Iterable[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        inside = sorted(path.glob("*.jsonl"))
        if not inside:
            raise TraceError(f"{path}: a directory without *.jsonl files; expected traces or records")
        yield from inside


def _read_file(path: Path, limit: int | None) -> _File:
    start: _Line | None = None
    requests: list[_Line] = []
    transfers: list[Transfer] = []
    is_complete = False
    number = 0
    try:
        with path.open("rb") as file:
            for text in file:
                number += 1
                if not text.strip():
                    continue
                line = _decode(text)
                match line.event:
                    case "request":
                        _check(line)
                        requests.append(line)
                    case "start":
                        start = line
                    case "load" | "store" | "move" | "moves" | "reset":
                        transfers.append(_transfer(line))
                    case "end":
                        is_complete = line.why == "stopped" and not line.dropped
                if len(requests) == limit:
                    break
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise TraceError(
            f"{path}, line {number}: {error}; expected a JSON object with timestamp (in ms), input_length, "
            "output_length and hash_ids, as in a Mooncake trace, or a line of a KVBM record"
        ) from error
    return _File(start, requests, transfers, is_complete)


def _transfer(line: _Line) -> Transfer:
    return Transfer(line.order, seconds(line.at), line.plan, line.event, line.ok, line.lost)


def _check(line: _Line) -> None:
    if line.hash_ids is None:
        raise ValueError("a request without hash_ids")
    for name, value, least in (
        ("input_length", line.input_length, 1),
        ("output_length", line.output_length, 0),
        ("timestamp", line.timestamp, 0),
    ):
        if not least <= value < _MAX_TOKENS * (1000 if name == "timestamp" else 1):
            raise ValueError(f"{name} is {value:g}, expected a number of at least {least}")


def _request(line: _Line, shift: float, block_tokens: int, whole: bool, known: dict[tuple[str, int], Key]) -> Request:
    ids = line.hash_ids or []
    tokens = line.input_length
    if whole:
        tokens = max(len(ids) * block_tokens + 1, 1)
    elif not line.ended:
        ids = ids[: tokens // block_tokens]  # the last one of a Mooncake trace may name a block that is not full
    tenant = "" if line.cache_salt is None else str(line.cache_salt)
    keys = []
    for number in ids:
        key = known.get((tenant, number))
        if key is None:
            key = known[tenant, number] = key_of(tenant, number)
        keys.append(key)
    return Request(
        at=line.timestamp / 1e3 + shift,
        tokens=tokens,
        output_tokens=line.output_length,
        keys=keys,
        tenant=tenant,
        session="" if line.session_id is None else str(line.session_id),
        final=line.final,
        priority=line.priority,
        ttl=line.ttl,
        hints=line.hints,
        lookups=line.lookups,
        stores=line.stores,
        ended=line.ended,
        ended_at=seconds(line.at),
    )


def key_of(tenant: str, number: int) -> Key:
    """A key as an engine's are: evenly distributed, and never that of another tenant's block."""
    return hashlib.blake2b(f"{tenant}\0{number}".encode(), digest_size=KEY_BYTES).digest()
