"""The checksum of a block that a neighbour copies, seeded by the key of the block."""

from __future__ import annotations

import ctypes

import xxhash

from kvbm.core.keys import Key

_PIECE = 256 << 10  # copied and hashed while it is in the processor's cache: hashing costs a tenth of the copy then


def checksum(payload: memoryview, key: Key) -> int:
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(key)) or 1  # 0 stands for none


def copy_and_sum(target: int, source: int, size: int, key: Key) -> int:
    """Copy ``size`` bytes between two addresses; the checksum is of the bytes that arrived."""
    hasher = xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(key))
    for at in range(0, size, _PIECE):
        piece = min(_PIECE, size - at)
        ctypes.memmove(target + at, source + at, piece)
        hasher.update((ctypes.c_char * piece).from_address(target + at))
    return hasher.intdigest() or 1
