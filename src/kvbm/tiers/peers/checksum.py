"""The checksum of a block that a neighbour copies, seeded by the key of the block."""

from __future__ import annotations

import ctypes

import xxhash

from kvbm.core.keys import Key

# Bytes copied, then hashed. Below 1 MiB the C library copies through the cache, which takes twice as long: 0.17 CPU
# seconds a GB with the hash instead of 0.10 (and 0.08 without).
_PIECE = 2 << 20
_MIN_PIECE = 1 << 20


def checksum(payload: memoryview, key: Key) -> int:
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(key)) or 1  # 0 stands for none


def copy_and_sum(target: int, source: int, size: int, key: Key) -> int:
    """Copy ``size`` bytes between two addresses; the checksum is of the bytes that arrived."""
    hasher = xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(key))
    arrived = memoryview((ctypes.c_char * size).from_address(target)).cast("B")
    at = 0
    while at < size:
        piece = size - at if size - at < _PIECE + _MIN_PIECE else _PIECE  # a short rest goes with the last piece
        ctypes.memmove(target + at, source + at, piece)
        hasher.update(arrived[at : at + piece])
        at += piece
    return hasher.intdigest() or 1
