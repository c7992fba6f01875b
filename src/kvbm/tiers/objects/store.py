"""One rank's half of the object store tier: blocks to and from objects.

Places come from the catalog (:mod:`kvbm.tiers.objects.format`) and say which object holds a block. A read fetches each
object once, whole, and copies its blocks straight to their addresses. A write creates each object once; an object that
is there already holds the same blocks, because its name follows from their keys, and counts as written.

An object that turns out to be damaged, or to be another one than its name says, is fetched once more, because the
network may have damaged it. If the second copy is no better, the object is deleted: objects are never overwritten, so
it would stay in the way of a good one. If it cannot be deleted now, the store remembers it: a write of its blocks
replaces the object, or fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from statistics import median

from kvbm.core.rate import Rate
from kvbm.tiers.base import Operation, Store
from kvbm.tiers.bounded import DaemonThreads
from kvbm.tiers.objects.client import Client, MissingError, ObjectStoreError
from kvbm.tiers.objects.format import (
    Buffer,
    Codec,
    Contents,
    DamagedError,
    Names,
    RefusedError,
    blocks_in,
    object_of,
    object_with,
    seal_text,
    split_place,
)
from kvbm.tiers.objects.settings import ObjectSettings

logger = logging.getLogger("kvbm")

_CLOSED = "the object store was closed"
_CANCELLED = "the load was given up"
_MEASURE_BYTES = 4 << 20
_MEASURE_READS = 4
_MAX_TAG_BYTES = 64  # for the estimate of an object's size
END_SECONDS = 10.0
_MAX_DAMAGED = 1024
_MAX_HASHING = 8  # threads that hash, copy or encrypt at a time


class ObjectStore(Store):
    """Reads and writes the blocks of one rank. Threads of its own make every request."""

    slots = 0

    def __init__(self, client: Client, names: Names, codec: Codec, rank: int, block_bytes: int) -> None:
        self._client = client
        self._names = names
        self._codec = codec
        self._rank = rank
        self.block_bytes = block_bytes
        self.identity = names.root
        self._buffer = ctypes.c_ubyte * block_bytes
        self._closing = False
        self._damaged: dict[str, None] = {}  # names of objects that are damaged and could not be deleted, oldest first
        self._lock = threading.Lock()  # of these
        self.stall_seconds = stall_seconds(client.settings)
        # Threads beyond the cores wait for the network well, but hash and copy badly: they take the caches from each
        # other (benchmarks/objects.py).
        # A queue of tokens: the semaphore of the standard library is written in Python, and every call of it keeps the
        # interpreter from the engine's thread.
        self._turns: SimpleQueue[None] = SimpleQueue()
        for _ in range(min(_MAX_HASHING, os.cpu_count() or 1)):
            self._turns.put(None)
        # Reads never wait behind writes.
        self._reads = DaemonThreads(client.settings.concurrency, "kvbm-object-read")
        self._writes = DaemonThreads(client.settings.concurrency, "kvbm-object-write")

    def describe(self) -> str:
        return describe_settings(self._client.settings)

    def read(self, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes]) -> Operation:
        return self.submit(Operation("read", slots, addresses, tags, self.block_bytes))

    def write(self, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes]) -> Operation:
        return self.submit(Operation("write", slots, addresses, tags, self.block_bytes))

    def close(self, timeout: float | None = None) -> bool:
        """Give up the requests that have not begun. Those that have begun end by their own deadline."""
        self._closing = True
        deadline = time.monotonic() + (END_SECONDS if timeout is None else timeout)
        ended = [pool.close(max(0.0, deadline - time.monotonic())) for pool in (self._reads, self._writes)]
        self._client.close()
        if not all(ended):
            logger.warning(
                "object store: requests are still under way at the end; they are left to their deadline "
                "(KVBM_OBJECT_TIMEOUT_SECS=%g)",
                self._client.settings.timeout_seconds,
            )
        return all(ended)

    def measure(self) -> Rate | None:
        """Write an object, read it a few times, delete it. None when the store does not answer."""
        name = self._names.probe
        try:
            began = time.monotonic()
            self._client.put(name, [bytes(_MEASURE_BYTES)])
            latencies, seconds = [], []
            for _ in range(_MEASURE_READS):
                began = time.monotonic()
                self._client.exists(name)
                latencies.append(time.monotonic() - began)
                began = time.monotonic()
                self._client.get(name)
                seconds.append(time.monotonic() - began)
        except ObjectStoreError as error:
            logger.warning("object store: not measured: %s", error)
            return None
        finally:
            with contextlib.suppress(ObjectStoreError):
                self._client.delete([name])
        latency = median(latencies)
        # One stream; loads use several, so the tier is at least as fast as this.
        return Rate(_MEASURE_BYTES / max(1e-6, median(seconds) - latency), latency)

    # -- the threads --------------------------------------------------------------------------------------------------

    def submit(self, operation: Operation) -> Operation:
        """Read or write, whichever the operation is."""
        pool, work = (
            (self._writes, self._write_object) if operation.kind == "write" else (self._reads, self._read_object)
        )
        try:
            pool.post(self._split, pool, operation, work)
        except RuntimeError:
            operation.parts_left = 1
            operation.end_part(list(range(len(operation.slots))), _CLOSED)
        return operation

    def _split(
        self,
        pool: DaemonThreads,
        operation: Operation,
        work: Callable[[Operation, int, list[int]], tuple[list[int], str]],
    ) -> None:
        parts: dict[int, list[int]] = {}
        for position, place in enumerate(operation.slots):
            parts.setdefault(object_of(place), []).append(position)
        # At least one, so that an operation on nothing ends like any other.
        operation.parts_left = len(parts) or 1
        if not parts:
            operation.end_part([], "")
        for identifier, positions in parts.items():
            try:
                pool.post(self._run, operation, identifier, positions, work)
            except RuntimeError:
                operation.end_part(positions, _CLOSED)

    def _run(
        self,
        operation: Operation,
        identifier: int,
        positions: list[int],
        work: Callable[[Operation, int, list[int]], tuple[list[int], str]],
    ) -> None:
        if operation.cancelled or self._closing:
            operation.end_part(positions, _CANCELLED if operation.cancelled else _CLOSED)
            return
        tag_bytes = min(len(operation.tags[positions[0]]), _MAX_TAG_BYTES)
        held = self._client.memory.take(self._codec.size(blocks_in(identifier), tag_bytes, self.block_bytes))
        operation.begin_part()
        try:
            bad, reason = work(operation, identifier, positions)
        except Exception as error:
            known = isinstance(error, ObjectStoreError | RefusedError)
            bad, reason = positions, str(error) if known else f"{type(error).__name__}: {error}"
        finally:
            self._client.memory.give(held)
        operation.end_part(bad, reason)

    def _read_object(self, operation: Operation, identifier: int, positions: list[int]) -> tuple[list[int], str]:
        name = self._names.of(self._rank, identifier)
        try:
            return self._fetch(name, identifier, operation, positions)
        except DamagedError:
            pass
        try:
            return self._fetch(name, identifier, operation, positions)
        except DamagedError as error:
            logger.warning("object store: %s is damaged and gets deleted: %s", name, error)
            try:
                self._client.delete([name])
            except ObjectStoreError:
                self._remember_damage(name)
            return positions, str(error)

    def _remember_damage(self, name: str) -> None:
        with self._lock:
            self._damaged[name] = None
            while len(self._damaged) > _MAX_DAMAGED:
                self._damaged.pop(next(iter(self._damaged)))

    def _fetch(self, name: str, identifier: int, operation: Operation, positions: list[int]) -> tuple[list[int], str]:
        """Raises DamagedError when any block of the object is damaged, or the object is another one."""
        data = self._client.get(name)
        self._turns.get()
        try:
            return self._unpack(data, identifier, operation, positions)
        finally:
            self._turns.put(None)

    def _unpack(
        self, data: Buffer, identifier: int, operation: Operation, positions: list[int]
    ) -> tuple[list[int], str]:
        contents: Contents = self._codec.open(data)
        if object_with(contents.tags) != identifier:
            raise DamagedError("the object holds the blocks of another one")
        bad: list[int] = []
        reason = ""
        for position in positions:
            index = split_place(operation.slots[position])[1]
            target = memoryview(self._buffer.from_address(operation.addresses[position])).cast("B")
            try:
                self._codec.read_block(contents, index, operation.tags[position], target)
            except DamagedError:
                raise
            except RefusedError as error:
                bad.append(position)
                reason = reason or str(error)
        return bad, reason

    def _write_object(self, operation: Operation, identifier: int, positions: list[int]) -> tuple[list[int], str]:
        positions.sort(key=lambda position: split_place(operation.slots[position])[1])
        indexes = [split_place(operation.slots[position])[1] for position in positions]
        if indexes != list(range(blocks_in(identifier))):
            return positions, f"the write has {len(indexes)} of the {blocks_in(identifier)} blocks of an object"
        payloads = [
            memoryview(self._buffer.from_address(operation.addresses[position])).cast("B") for position in positions
        ]
        self._turns.get()
        try:
            pieces = self._codec.encode([operation.tags[position] for position in positions], payloads)
        finally:
            self._turns.put(None)
        name = self._names.of(self._rank, identifier)
        if not self._client.put(name, pieces):
            self._confirm(name, pieces)
        with self._lock:
            self._damaged.pop(name, None)
        return [], ""

    def _confirm(self, name: str, pieces: Sequence[Buffer]) -> None:
        """The store says that the object is there. It may only be on its way, from an engine that dies before the end.

        Raises ObjectStoreError when the object is not there. One that is known to be damaged, or of another size, is
        replaced."""
        try:
            found, _ = self._client.head(name)
        except MissingError:
            raise ObjectStoreError(f"another engine began to write {name}, and it is not there yet") from None
        if name in self._damaged or found.bytes != sum(len(piece) for piece in pieces):
            logger.warning("object store: %s has %d bytes, is damaged and gets replaced", name, found.bytes)
            self._client.delete([name])
            if not self._client.put(name, pieces):
                raise ObjectStoreError(f"{name} was damaged, and another engine replaces it")


def describe_settings(settings: ObjectSettings) -> str:
    return f"objects in bucket {settings.bucket} at {settings.endpoint or 'AWS'}"


def stall_seconds(settings: ObjectSettings) -> float:
    """The attempts of one request, and the time it may stand in the queue behind as many."""
    return 2 * (settings.max_retries + 1) * settings.timeout_seconds


def describe_cache(
    client: Client, names: Names, fingerprint: Mapping[str, str | int], ranks: int, block_bytes: int
) -> None:
    """Leave a description of the cache in the bucket, for the tools. An engine does so at its start."""
    text = json.dumps({"fingerprint": dict(fingerprint), "ranks": ranks, "block_bytes": block_bytes}, sort_keys=True)
    client.put(names.description, [seal_text(text.encode(), client.settings.encryption_secret)])
