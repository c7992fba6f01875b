"""A rank's store of the toy tier."""

from __future__ import annotations

import ctypes

import xxhash

from kvbm.core.rate import Rate
from kvbm.tiers.base import Operation, Store
from kvbm.tiers.bounded import DaemonThreads

_SUM_BYTES = 8


class ToyStore(Store):
    """Addresses blocks by their tags; the places are handles of the catalog and mean nothing here."""

    identity = "toy server"
    stall_seconds = 60.0

    def __init__(self, server, rank, slot_bytes) -> None:
        self._server, self._rank, self._slot_bytes = server, rank, slot_bytes
        self._threads = DaemonThreads(1, "kvbm-toy")

    def read(self, slots, addresses, tags):
        return self._submit(Operation("read", slots, addresses, tags, self._slot_bytes), self._get)

    def write(self, slots, addresses, tags):
        return self._submit(Operation("write", slots, addresses, tags, self._slot_bytes), self._put)

    def _submit(self, operation, move):
        operation.parts_left = 1
        self._threads.submit(self._run, operation, move)
        return operation

    def _run(self, operation, move) -> None:
        operation.begin_part()
        bad, reason = [], ""
        for i, (address, tag) in enumerate(zip(operation.addresses, operation.tags, strict=True)):
            try:
                if operation.cancelled:
                    raise TimeoutError("cancelled")
                if operation.kind in self._server.fails:
                    raise ConnectionError(f"the toy server refuses to {operation.kind}")
                move(address, tag)
            except Exception as error:
                bad.append(i)
                reason = reason or str(error)
        operation.end_part(bad, reason)

    def _put(self, address, tag) -> None:
        payload = ctypes.string_at(address, self._slot_bytes)
        self._server.blocks[self._rank, tag] = _sum(payload, tag) + payload

    def _get(self, address, tag) -> None:
        content = self._server.blocks.get((self._rank, tag))
        if content is None:
            raise KeyError("no such block")
        found, payload = content[:_SUM_BYTES], content[_SUM_BYTES:]
        if self._server.corrupts:
            payload = bytes([payload[0] ^ 1]) + payload[1:]
        if found != _sum(payload, tag):
            raise ValueError("checksum mismatch")
        ctypes.memmove(address, payload, self._slot_bytes)

    def close(self, timeout=None):
        return self._threads.close(timeout)

    def measure(self):
        return Rate(1e12, 0.0)


def _sum(payload: bytes, tag: bytes) -> bytes:
    return xxhash.xxh3_64_digest(payload, xxhash.xxh3_64_intdigest(tag))
