"""Tokens to block keys.

A key names the KV of one block: it stands for every token up to and including that block and for everything else that
changes the numbers: the *namespace* (model, dtype, layout, block size, parallel degree: fixed for an engine) and the
request's *scope* (LoRA adapter, cache salt, multimodal inputs). Equal keys mean equal KV, so the hash must resist
collisions even when a tenant chooses the tokens: SHA-256, one running hasher a request, one digest a block. That costs
3 ms for 131,072 tokens; hashing each block with its parent's digest as vLLM does costs more than three times that
(benchmarks/core.py).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import chain
from struct import Struct, iter_unpack

import msgspec

Key = bytes
KEY_BYTES = 32
# Which function makes the keys, and its version: keys of different schemes must not meet.
SCHEME = "kvbm-sha256-1"
_MANY_KEYS = Struct(f"{KEY_BYTES}s" * 64)


class Namespace(msgspec.Struct, frozen=True):
    """What all blocks of one engine have in common. Two engines whose namespaces differ never share a block."""

    model: str
    dtype: str
    # How one block's bytes are arranged, as the storage layer describes it; bytes are only exchangeable between equals.
    layout: str
    block_size: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    scheme: str = SCHEME

    def digest(self) -> bytes:
        """Names a cache that outlives the process, and seeds the hasher."""
        return hashlib.sha256(b"kvbm namespace\0" + msgspec.msgpack.encode(self)).digest()


class Scope(msgspec.Struct, frozen=True):
    """What sets a request apart from others with the same tokens."""

    lora: str | None = None
    cache_salt: str | None = None
    # (first token position, content hash) of every multimodal input, in order of position.
    multimodal: tuple[tuple[int, str], ...] = ()


class KeyChain:
    """The keys of one growing token sequence.

    ``extend`` is incremental: only blocks that have become full since the last call are hashed. An image counts in
    every block from the one it begins in, so a prefix that ends before it is shared between requests with different
    images.
    """

    def __init__(self, namespace: Namespace, scope: Scope | None = None) -> None:
        scope = scope or Scope()
        self.block_size = namespace.block_size
        self.keys: list[Key] = []
        # msgpack is self-delimiting and tells None from "": no two scopes give the same bytes.
        self._hasher = hashlib.sha256(namespace.digest() + msgspec.msgpack.encode((scope.lora, scope.cache_salt)))
        self._multimodal = list(scope.multimodal)

    def extend(self, tokens: Sequence[int]) -> list[Key]:
        """Take the whole sequence so far and return the keys of all its full blocks.

        Tokens that have been hashed already must not change; they are not looked at again.
        """
        size, keys, images = self.block_size, self.keys, self._multimodal
        hashed = len(keys) * size
        full = len(tokens) // size * size
        if full <= hashed:
            return keys
        fresh = array("I", tokens if full - hashed == len(tokens) else tokens[hashed:full])
        update, digest = self._hasher.update, self._hasher.digest
        for (block,) in iter_unpack(f"{size * fresh.itemsize}s", fresh):
            if images and images[0][0] < (len(keys) + 1) * size:
                self._enter_images((len(keys) + 1) * size)
                update, digest = self._hasher.update, self._hasher.digest
            update(block)
            keys.append(digest())
        return keys

    def _enter_images(self, end: int) -> None:
        # A new hasher, seeded by the old one's digest: were the image's bytes simply fed in between the tokens, a
        # caller who names images freely could make them look like tokens.
        while self._multimodal and self._multimodal[0][0] < end:
            image = msgspec.msgpack.encode(self._multimodal.pop(0))
            self._hasher = hashlib.sha256(b"kvbm image\0" + self._hasher.digest() + image)


def in_group(keys: Sequence[Key], group: int) -> list[Key]:
    """The keys of the same tokens in one of several groups of layers, which keep a block each.

    They differ in the last byte. It is changed in all of them at once: one by one takes five times as long.
    """
    joined = bytearray(b"".join(keys))
    joined[KEY_BYTES - 1 :: KEY_BYTES] = joined[KEY_BYTES - 1 :: KEY_BYTES].translate(_changed_bytes(group + 1))
    view, whole = memoryview(joined), len(joined) // _MANY_KEYS.size * _MANY_KEYS.size
    found: list[Key] = list(chain.from_iterable(_MANY_KEYS.iter_unpack(view[:whole])))
    found += [key for (key,) in iter_unpack(f"{KEY_BYTES}s", view[whole:])]
    return found


@cache
def _changed_bytes(mask: int) -> bytes:
    return bytes(value ^ mask for value in range(256))
