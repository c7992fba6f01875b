"""The sources that a leader knows, numbered, in memory that each of its ranks maps.

A plan names the source of a block by its number. The leader enters a source before the first plan that names it. The
ranks count there what came from each source, for the leader's choice and its metrics. Each rank makes a table of its
own, so no two processes write the same word.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from typing import Any

import msgspec
import numpy as np

from kvbm.tiers.peers.finder import Source

MAX_SOURCES = 512
_ROW = 1024
_ENTRY = 640
_LENGTH = struct.Struct("<I")
TABLE_BYTES = MAX_SOURCES * _ROW
BLOCKS, BYTES, FAILED_BLOCKS, FAILED_READS, RATE, MAPPED_BLOCKS = range(6)
# Kinds of refusals, one word each.
KINDS = ("damaged", "withdrawn", "late", "gone", "secret", "fingerprint", "malformed", "version", "abandoned", "other")
_FIRST_KIND = 8
_SMOOTHING = 0.3
_MIN_MEASURED_BYTES = 4 << 20  # fewer measure the latency
_MAX_MEASURED_SECONDS = 1.0


class _Flow:
    """Reads from one source that are under way at a time."""

    reads = 0
    since = 0.0
    size = 0  # bytes that have come since then


class SourceTable:
    def __init__(self, file: int) -> None:
        self._flows: dict[int, _Flow] = {}
        self._lock = threading.Lock()
        self._map = mmap.mmap(file, TABLE_BYTES)
        words = np.frombuffer(self._map, np.uint64).reshape(MAX_SOURCES, _ROW // 8)
        self._counts = words[:, _ENTRY // 8 :]

    # -- the leader ---------------------------------------------------------------------------------------------------

    def enter(self, number: int, source: Source) -> None:
        data = msgspec.msgpack.encode(source)
        if len(data) > _ENTRY - _LENGTH.size:
            raise ValueError(f"the description of a source takes {len(data)} bytes")
        at = number * _ROW
        self._map[at : at + _LENGTH.size + len(data)] = _LENGTH.pack(len(data)) + data
        self._counts[number] = 0

    def counts(self, number: int) -> list[int]:
        return [int(count) for count in self._counts[number]]

    # -- the rank -----------------------------------------------------------------------------------------------------

    def source(self, number: int) -> Source | None:
        at = number * _ROW
        (length,) = _LENGTH.unpack(self._map[at : at + _LENGTH.size])
        if not 0 < length <= _ENTRY - _LENGTH.size:
            return None
        return msgspec.msgpack.decode(self._map[at + _LENGTH.size : at + _LENGTH.size + length], type=Source)

    def begin_read(self, number: int) -> None:
        with self._lock:
            flow = self._flows.setdefault(number, _Flow())
            if not flow.reads:
                flow.since, flow.size = time.monotonic(), 0
            flow.reads += 1

    def end_read(self, number: int, size: int) -> None:
        """Several threads read from a source at a time, so its rate is that of all their reads together."""
        with self._lock:
            flow, now = self._flows[number], time.monotonic()
            flow.reads -= 1
            flow.size += size
            if flow.reads and now < flow.since + _MAX_MEASURED_SECONDS:
                return
            row: Any = self._counts[number]
            if flow.size >= _MIN_MEASURED_BYTES and now > flow.since:
                rate, before = flow.size / (now - flow.since), int(row[RATE])
                row[RATE] = np.uint64(rate if not before else before + _SMOOTHING * (rate - before))
            flow.since, flow.size = now, 0

    # -- both ---------------------------------------------------------------------------------------------------------

    def add(self, number: int, blocks: int, size: int, failures: list[str], is_mapped: bool) -> None:
        """``blocks`` of ``size`` bytes in all have come, and each of the failures is a kind."""
        with self._lock:
            row: Any = self._counts[number]
            row[BLOCKS] += np.uint64(blocks)
            row[BYTES] += np.uint64(size)
            row[MAPPED_BLOCKS] += np.uint64(blocks if is_mapped else 0)
            row[FAILED_BLOCKS] += np.uint64(len(failures))
            row[FAILED_READS] += np.uint64(bool(failures) and not blocks)
            for kind in failures:
                row[_FIRST_KIND + KINDS.index(kind if kind in KINDS else "other")] += np.uint64(1)

    def close(self) -> None:
        del self._counts
        self._map.close()


def refusals(counts: list[int]) -> dict[str, int]:
    return {kind: counts[_FIRST_KIND + i] for i, kind in enumerate(KINDS) if counts[_FIRST_KIND + i]}
