"""The checksum of a block that a neighbour copies, seeded by the key of the block."""

from __future__ import annotations

import ctypes

import xxhash

from kvbm.core.keys import Key

# Bytes copied, then hashed while they are in the core's cache: a block as a whole leaves it before it is hashed.
_PIECE = 512 << 10


def checksum(payload: memoryview, key: Key) -> int:
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(key)) or 1  # 0 stands for none


def copy_and_sum(target: int, source: int, size: int, key: Key) -> int:
    """Copy ``size`` bytes between two addresses; the checksum is of the bytes that arrived."""
    hasher = xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(key))
    arrived = memoryview((ctypes.c_char * size).from_address(target)).cast("B")
    at = 0
    while at < size:
        piece = min(_PIECE, size - at)
        ctypes.memmove(target + at, source + at, piece)
        hasher.update(arrived[at : at + piece])
        at += piece
    return hasher.intdigest() or 1
