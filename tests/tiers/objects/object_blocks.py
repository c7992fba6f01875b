"""Blocks in memory, and stores that write and read them."""

from __future__ import annotations

import ctypes
import mmap
import os

from kvbm.core.keys import KeyChain, Namespace, Scope
from kvbm.tiers.base import Operation
from kvbm.tiers.objects.client import Client
from kvbm.tiers.objects.format import Codec, Names, group_bits, object_id, place_of
from kvbm.tiers.objects.settings import ObjectSettings
from kvbm.tiers.objects.store import ObjectStore

BLOCK = 64 << 10
WAIT_SECONDS = 120.0  # for a machine that is busy


class Blocks:
    """Memory for a number of blocks, random at first."""

    def __init__(self, count: int, size: int = BLOCK) -> None:
        self._map = mmap.mmap(-1, count * size)
        self._map.write(os.urandom(count * size))
        self.size = size
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.addresses = [first + i * size for i in range(count)]

    def __getitem__(self, index: int) -> bytes:
        return self._map[index * self.size : (index + 1) * self.size]

    def clear(self) -> None:
        self._map.seek(0)
        self._map.write(bytes(len(self._map)))


def keys_of(tokens: list[int], salt: str | None = None) -> list[bytes]:
    """The keys of a prompt, of one token a block."""
    namespace = Namespace(model="m", dtype="bf16", layout="x", block_size=1)
    return KeyChain(namespace, Scope(cache_salt=salt)).extend(tokens)


def random_keys(count: int) -> list[bytes]:
    return keys_of([int.from_bytes(os.urandom(3), "big") for _ in range(count)])


def single_places(keys: list[bytes]) -> list[int]:
    return [place_of(object_id(key, 0), 0) for key in keys]


def group_places(keys: list[bytes], size: int = BLOCK) -> list[int]:
    """All keys in whole groups."""
    bits = group_bits(size)
    group = 1 << bits
    return [place_of(object_id(keys[i // group * group + group - 1], bits), i % group) for i in range(len(keys))]


def new_names(secret: str = "") -> Names:
    """Of a cache that no other test has."""
    return Names({"model": "m", "test": os.urandom(8).hex()}, secret)


def open_store(settings: ObjectSettings, names: Names, rank: int = 0, size: int = BLOCK) -> ObjectStore:
    codec = Codec(names.scope, settings.encryption_secret)
    return ObjectStore(Client(settings), names, codec, rank, size)


def ended(operation: Operation) -> Operation:
    assert operation.wait(WAIT_SECONDS), "the operation hangs"
    return operation
