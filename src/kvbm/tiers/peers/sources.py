"""The sources that a leader knows, numbered, in memory that each of its ranks maps.

A plan names the source of a block by its number. The leader enters a source before the first plan that names it. The
ranks count there what came from each source, for the leader's choice and its metrics. Each rank makes a table of its
own, so no two processes write the same word.
"""

from __future__ import annotations

import mmap
import struct
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
_MIN_MEASURED_BYTES = 4 << 20  # a smaller read measures the latency


class SourceTable:
    def __init__(self, file: int) -> None:
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

    def add(self, number: int, blocks: int, size: int, seconds: float, failures: list[str], is_mapped: bool) -> None:
        """A read is over: ``blocks`` of ``size`` bytes in all have come, and each of the failures is a kind."""
        row: Any = self._counts[number]
        row[BLOCKS] += np.uint64(blocks)
        row[BYTES] += np.uint64(size)
        row[MAPPED_BLOCKS] += np.uint64(blocks if is_mapped else 0)
        row[FAILED_BLOCKS] += np.uint64(len(failures))
        row[FAILED_READS] += np.uint64(bool(failures) and not blocks)
        for kind in failures:
            row[_FIRST_KIND + KINDS.index(kind if kind in KINDS else "other")] += np.uint64(1)
        if size >= _MIN_MEASURED_BYTES and seconds > 0:
            rate, before = size / seconds, int(row[RATE])
            row[RATE] = np.uint64(rate if not before else before + _SMOOTHING * (rate - before))

    def close(self) -> None:
        del self._counts
        self._map.close()


def refusals(counts: list[int]) -> dict[str, int]:
    return {kind: counts[_FIRST_KIND + i] for i, kind in enumerate(KINDS) if counts[_FIRST_KIND + i]}
