"""The bytes and the names of objects.

An object holds one block, or an aligned group of blocks of one prefix where single blocks are small::

    head      magic, version, flags, number of blocks, bytes of a tag, bytes of a block, random salt
    table     for each block its tag and its checksum; encrypted where a secret is set
    digest    of head and table
    payloads  in the order of the table; encrypted one by one where a secret is set

A tag is the block's key, plus the engine's generation where it has one. The checksum covers payload and tag, so a block
answers only to its own tag: a truncated object, a flipped bit and an object of another block are all refused, each with
a reason.

With a secret (KVBM_OBJECT_ENCRYPTION_SECRET) each object has an AES-256-GCM key of its own: HKDF derives it from the
secret, the fingerprint and a random salt in the head. The names are keyed too (HMAC), because a key is a plain hash of
tokens: a reader of the bucket could otherwise confirm a guess of a prompt. Keys of blocks include the cache salt, so
two salts never share an object name or an encryption key.

A *place* is the catalog's handle of a block. It says which object holds the block and where, in one integer that fits a
plan: 53 bits of a hash of the object's last key, the size of the group as a power of two, and the index in the group.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from kvbm.core.keys import KEY_BYTES

MAGIC = b"KVBMobj\n"
VERSION = 1
MIN_OBJECT_BYTES = 2_000_000  # blocks are grouped to at least this size
MAX_GROUP_BITS = 6
_PAGE = 4096
ROOT = "kvbm-1"
DESCRIPTION = "/cache"  # after the root of a cache: its fingerprint, for the tools

_HEAD = struct.Struct("<8sHHIIQ16s")
_SUM = struct.Struct("<Q")
_ENCRYPTED = 1
_GCM_TAG = 16
_TABLE_NONCE = (2**32 - 1).to_bytes(12, "big")
_MAX_BLOCKS = 1 << MAX_GROUP_BITS
_MAX_TAG = 255
_INDEX_BITS, _SIZE_BITS, _ID_BITS = 6, 3, 53

Buffer = bytes | bytearray | memoryview


class RefusedError(Exception):
    """An object, or one block of it, is not the one that was asked for; the text says why."""


class DamagedError(RefusedError):
    """The bytes are not those that were written."""


# ---------------------------------------------------------------------------------------------------------------------
# Places and names


def group_bits(block_bytes: int) -> int:
    """Blocks of an object as a power of two: the smallest group of at least MIN_OBJECT_BYTES. The same for a block and
    for a slot, which has whole pages: the engine knows the one, and `kvbm cache push` the other."""
    bits, block_bytes = 0, -(-block_bytes // _PAGE) * _PAGE
    while block_bytes << bits < MIN_OBJECT_BYTES and bits < MAX_GROUP_BITS:
        bits += 1
    return bits


def object_id(last_key: bytes, bits: int) -> int:
    """Names an object by its last key and its size: keys are chained, so the last key decides all of them.

    Hashed once more: keys of different groups of layers differ in the last byte only. A collision costs a hit, because
    a read verifies the whole tag.
    """
    return (xxhash.xxh3_64_intdigest(last_key) >> (64 - _ID_BITS)) << _SIZE_BITS | bits


def place_of(identifier: int, index: int) -> int:
    return identifier << _INDEX_BITS | index


def object_of(place: int) -> int:
    return place >> _INDEX_BITS


def split_place(place: int) -> tuple[int, int]:
    """(identifier of the object, index in it)"""
    return place >> _INDEX_BITS, place & (1 << _INDEX_BITS) - 1


def blocks_in(identifier: int) -> int:
    return 1 << (identifier & (1 << _SIZE_BITS) - 1)


def object_with(tags: Sequence[bytes]) -> int:
    """The identifier of the object that holds the blocks of these tags."""
    return object_id(tags[-1][:KEY_BYTES], len(tags).bit_length() - 1)


class Names:
    """Names of the objects of one cache. ``fingerprint`` names the cache; engines with equal ones share blocks."""

    def __init__(self, fingerprint: Mapping[str, str | int], secret: str = "") -> None:
        # A disk cache adds the version of its own format.
        parts = {name: value for name, value in fingerprint.items() if name != "format"}
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()
        self.scope = digest  # also separates the encryption keys of caches
        self._key = _derive(secret, digest, b"kvbm object names") if secret else b""
        if self._key:
            digest = hmac.digest(self._key, b"root", "sha256")
        self.root = f"{ROOT}/{digest.hex()[:32]}"

    def of(self, rank: int, identifier: int) -> str:
        """The same on every rank after its prefix. The number of blocks stays readable: the capacity bound counts the
        blocks of a listing."""
        name = f"{identifier >> _SIZE_BITS:014x}"
        if self._key:
            name = hmac.digest(self._key, str(identifier).encode(), "sha256").hex()[:32]
        return f"{self.prefix(rank)}{name}-{blocks_in(identifier)}"

    def prefix(self, rank: int) -> str:
        return f"{self.root}/{rank}/"

    @property
    def lease(self) -> str:
        return f"{self.root}/lease"

    @property
    def probe(self) -> str:
        """A name of its own at every call."""
        return f"{self.root}/probe/{os.urandom(8).hex()}"

    @property
    def description(self) -> str:
        return self.root + DESCRIPTION


def blocks_of_name(name: str) -> int:
    """How many blocks the object of this name holds; 0 for other objects."""
    count = name.rpartition("-")[2]
    return int(count) if count.isdecimal() and 0 < int(count) <= _MAX_BLOCKS else 0


# ---------------------------------------------------------------------------------------------------------------------
# Bytes


class Contents(NamedTuple):
    """The verified head and table of an object, and where its payloads lie."""

    tags: list[bytes]
    checksums: list[int]
    block_bytes: int
    payloads: list[memoryview]
    head: bytes
    cipher: Any  # AESGCM; None for a plain object


class Codec:
    """Encodes and decodes objects, with one secret or without. Threads may share it."""

    def __init__(self, scope: bytes, secret: str = "") -> None:
        self._scope = scope
        # HKDF's first step once, so that an object costs one short derivation.
        self._key = _derive(secret, scope, b"kvbm objects") if secret else b""

    @property
    def encrypts(self) -> bool:
        return bool(self._key)

    def size(self, blocks: int, tag_bytes: int, block_bytes: int) -> int:
        extra = _GCM_TAG if self._key else 0
        return _HEAD.size + blocks * (tag_bytes + _SUM.size) + extra + _SUM.size + blocks * (block_bytes + extra)

    def encode(self, tags: Sequence[bytes], payloads: Sequence[Buffer]) -> list[Buffer]:
        """The object, in pieces. Without a secret the payloads are not copied."""
        block_bytes, tag_bytes = len(payloads[0]), len(tags[0])
        if len({len(payload) for payload in payloads}) > 1 or len({len(tag) for tag in tags}) > 1:
            raise ValueError("the blocks of an object have one size, and their tags too")
        salt = os.urandom(16) if self._key else bytes(16)
        head = _HEAD.pack(MAGIC, VERSION, _ENCRYPTED if self._key else 0, len(tags), tag_bytes, block_bytes, salt)
        table = b"".join(tag + _SUM.pack(checksum(payload, tag)) for tag, payload in zip(tags, payloads, strict=True))
        if not self._key:
            return [head + table + _SUM.pack(xxhash.xxh3_64_intdigest(head + table)), *payloads]
        cipher = self._cipher(salt)
        table = cipher.encrypt(_TABLE_NONCE, table, head)
        pieces: list[Buffer] = [head + table + _SUM.pack(xxhash.xxh3_64_intdigest(head + table))]
        for index, (tag, payload) in enumerate(zip(tags, payloads, strict=True)):
            sealed = bytearray(block_bytes + _GCM_TAG)
            cipher.encrypt_into(_nonce(index), payload, head + tag, sealed)
            pieces.append(memoryview(sealed))
        return pieces

    def open(self, data: Buffer) -> Contents:
        """Verify head and table. Raises :class:`RefusedError`. :meth:`read_block` verifies the payloads."""
        view = memoryview(data)
        if len(view) < _HEAD.size:
            raise DamagedError(f"the object is truncated: it has {len(view)} bytes")
        head = bytes(view[: _HEAD.size])
        magic, version, flags, blocks, tag_bytes, block_bytes, salt = _HEAD.unpack(head)
        if magic != MAGIC:
            raise DamagedError("the object was not written by KVBM")
        if version != VERSION:
            raise RefusedError(f"the object has format version {version}; this release reads version {VERSION}")
        if bool(flags & _ENCRYPTED) != bool(self._key):
            state = "encrypted, and no secret is set" if flags & _ENCRYPTED else "not encrypted, and a secret is set"
            raise RefusedError(f"the object is {state} (KVBM_OBJECT_ENCRYPTION_SECRET)")
        if not 0 < blocks <= _MAX_BLOCKS or not 0 < tag_bytes <= _MAX_TAG:
            raise DamagedError("the head of the object is damaged")
        expected = self.size(blocks, tag_bytes, block_bytes)
        if len(view) != expected:
            raise DamagedError(f"the object has {len(view)} bytes instead of {expected}: truncated or damaged")
        extra = _GCM_TAG if self._key else 0
        at = _HEAD.size + blocks * (tag_bytes + _SUM.size) + extra
        if _SUM.unpack_from(view, at)[0] != xxhash.xxh3_64_intdigest(view[:at]):
            raise DamagedError("the head of the object is damaged: checksum mismatch")
        table, cipher = bytes(view[_HEAD.size : at]), None
        if self._key:
            from cryptography.exceptions import InvalidTag

            cipher = self._cipher(salt)
            try:
                table = cipher.decrypt(_TABLE_NONCE, table, head)
            except InvalidTag:
                raise RefusedError("the object does not decrypt: it was written with another secret") from None
        row = tag_bytes + _SUM.size
        tags = [table[row * i : row * i + tag_bytes] for i in range(blocks)]
        sums = [_SUM.unpack_from(table, row * i + tag_bytes)[0] for i in range(blocks)]
        first, stride = at + _SUM.size, block_bytes + extra
        payloads = [view[first + stride * i : first + stride * (i + 1)] for i in range(blocks)]
        return Contents(tags, sums, block_bytes, payloads, head, cipher)

    def read_block(self, contents: Contents, index: int, tag: bytes, target: Any) -> None:
        """Copy one block to ``target``, a writable buffer of its size. Raises :class:`RefusedError`; the target holds
        nothing of use then."""
        if not 0 <= index < len(contents.tags) or contents.tags[index] != tag:
            raise RefusedError("the object holds another block")
        if contents.block_bytes != len(target):
            raise RefusedError(f"the object holds blocks of {contents.block_bytes} bytes, expected {len(target)}")
        payload = contents.payloads[index]
        if contents.cipher is None:
            copy_into(target, payload)
        else:
            from cryptography.exceptions import InvalidTag

            try:
                contents.cipher.decrypt_into(_nonce(index), payload, contents.head + tag, target)
            except InvalidTag:
                raise DamagedError("the block does not decrypt: it was altered") from None
        if checksum(target, tag) != contents.checksums[index]:
            raise DamagedError("checksum mismatch")

    def _cipher(self, salt: bytes) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(hmac.digest(self._key, b"object" + salt, "sha256"))


def checksum(payload: Any, tag: bytes) -> int:
    """The tag seeds it: the same payload under another tag has another checksum."""
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(tag))


def copy_into(target: Any, source: memoryview) -> None:
    """One memcpy without the interpreter lock; slicing a memoryview would hold the lock for its length."""
    size = len(source)
    ctypes.memmove(_address(target), _address(source), size)


def _address(buffer: Any) -> int:
    import numpy as np  # the one way to the address of a read-only buffer without a copy

    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def seal_text(data: bytes, secret: str) -> bytes:
    """A short text, encrypted where a secret is set."""
    if not secret:
        return data
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = os.urandom(12)
    return nonce + AESGCM(_derive(secret, b"", b"kvbm object texts")).encrypt(nonce, data, None)


def open_text(data: bytes, secret: str) -> bytes:
    """Raises :class:`RefusedError` when it was sealed with another secret, or none."""
    if not secret:
        return data
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(_derive(secret, b"", b"kvbm object texts")).decrypt(data[:12], data[12:], None)
    except (InvalidTag, ValueError):
        raise RefusedError("does not decrypt: it was written with another secret") from None


def _nonce(index: int) -> bytes:
    return index.to_bytes(12, "big")  # the encryption key is used for one object only


def _derive(secret: str, salt: bytes, info: bytes) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(hashes.SHA256(), 32, salt, info).derive(secret.encode())
