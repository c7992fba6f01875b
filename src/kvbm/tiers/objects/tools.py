"""Copies a cache between a disk cache directory and a bucket, and looks at the caches in a bucket.

For `kvbm cache push | pull | list | verify`. All functions block, report progress in blocks, and raise
:class:`ToolError` with a sentence for the user. An engine may use the bucket meanwhile, but not the disk cache: push
and pull take its locks.

Push groups small blocks as the engine does, where the disk index says which blocks follow one another. It says so of
blocks whose prompt this release has used; the others become objects of their own. An engine finds both.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvbm.core.keys import KEY_BYTES, Key
from kvbm.tiers.base import Operation
from kvbm.tiers.disk import inspect
from kvbm.tiers.disk.file import DiskFile
from kvbm.tiers.disk.index import Index, cache_directory, slab_path
from kvbm.tiers.objects.client import Client, MissingError, ObjectStoreError
from kvbm.tiers.objects.format import (
    DESCRIPTION,
    MAX_GROUP_BITS,
    ROOT,
    Codec,
    Names,
    RefusedError,
    blocks_of_name,
    group_bits,
    object_id,
    object_of,
    object_with,
    open_text,
    place_of,
)
from kvbm.tiers.objects.settings import ObjectSettings
from kvbm.tiers.objects.store import ObjectStore, describe_cache

Progress = Callable[[int, int], None]  # (done, all), in blocks
# A description with more than this is not KVBM's.
MAX_RANKS = 4096
MAX_BLOCK_BYTES = 1 << 32
_BATCH_BYTES = 64 << 20
_THREADS = 8
_DISK_SECONDS = 300.0  # for one batch


class ToolError(Exception):
    """The command cannot be carried out; the text says why and what to do."""


class BucketCache(NamedTuple):
    """One cache in a bucket."""

    root: str
    fingerprint: dict[str, str | int]
    ranks: int
    block_bytes: int  # of one rank
    blocks: int
    bytes: int  # of all ranks
    modified: float  # seconds since 1970, by the store's clock

    @property
    def model(self) -> str:
        return str(self.fingerprint.get("model", "?"))


class Moved(NamedTuple):
    blocks: int  # that are at the target now
    failed: int
    reason: str  # why the first of them failed


class Verified(NamedTuple):
    good: int
    bad: list[tuple[str, str]]  # (object, reason)


def open_clients(settings: ObjectSettings, ranks: int) -> list[Client]:
    """By rank; one client for all of them unless each has a bucket of its own."""
    by_settings: dict[str, Client] = {}
    for rank in range(ranks):
        mine = settings.of_rank(rank)
        if mine.bucket not in by_settings:
            by_settings[mine.bucket] = Client(mine)
    return [by_settings[settings.of_rank(rank).bucket] for rank in range(ranks)]


def list_caches(settings: ObjectSettings) -> list[BucketCache]:
    """The caches in a bucket that can be read with these settings."""
    with _explained(settings):
        (client,) = open_clients(settings, 1)
        roots = client.folders(ROOT)
        return [cache for root in roots if (cache := _read_description(client, settings, root)) is not None]


def _read_description(client: Client, settings: ObjectSettings, root: str) -> BucketCache | None:
    try:
        found = json.loads(open_text(bytes(client.get(root + DESCRIPTION)), client.settings.encryption_secret))
        fingerprint, ranks, block_bytes = found["fingerprint"], int(found["ranks"]), int(found["block_bytes"])
        if not isinstance(fingerprint, dict) or not 1 <= ranks <= MAX_RANKS or not 1 <= block_bytes <= MAX_BLOCK_BYTES:
            return None
    except (MissingError, RefusedError, ValueError, KeyError, TypeError):
        return None  # of another secret, or not of KVBM
    blocks = size = 0
    modified = 0.0
    for rank, mine in enumerate(open_clients(settings, ranks)):
        for listed in mine.list(f"{root}/{rank}/"):
            size += listed.bytes
            modified = max(modified, listed.modified)
            blocks += 0 if rank else blocks_of_name(listed.name)
    return BucketCache(root, fingerprint, ranks, block_bytes, blocks, size, modified)


# ---------------------------------------------------------------------------------------------------------------------
# Between disk and bucket


def push(directory: Path, settings: ObjectSettings, progress: Progress) -> Moved:
    """Copy every block of a disk cache to the bucket; blocks that are there already cost a request and no bytes."""
    try:
        cache = inspect.describe(directory)
    except inspect.CacheError as error:
        raise ToolError(str(error)) from error
    if not cache.ranks or not cache.slot_bytes:
        raise ToolError(f"{directory} has no blocks to push")
    with _explained(settings):
        clients = open_clients(settings, cache.ranks)
    names = Names(cache.fingerprint, settings.encryption_secret)
    codec = Codec(names.scope, settings.encryption_secret)
    with (
        _explained(settings),
        _opened_cache(directory, cache.fingerprint, cache.slots, cache.ranks, cache.slot_bytes) as (
            index,
            files,
        ),
    ):
        for client in dict.fromkeys(clients):
            client.check()
        describe_cache(clients[0], names, cache.fingerprint, cache.ranks, cache.slot_bytes)
        stores = [ObjectStore(client, names, codec, rank, cache.slot_bytes) for rank, client in enumerate(clients)]
        pusher = _Pusher(files, stores, cache.slot_bytes)
        groups = index.groups(1 << group_bits(cache.slot_bytes))
        done, total = 0, sum(map(len, groups))
        for batch in _batches(groups, pusher.batch_blocks):
            pusher.push(batch)
            done += sum(map(len, batch))
            progress(done, total)
        for store in stores:
            store.close()
    blocks = {key for group in groups for key, _ in group}
    return Moved(len(blocks - pusher.failed), len(pusher.failed), pusher.reason)


_Group = list[tuple[Key, int]]  # blocks of one object, and their slots


def _batches(groups: Sequence[_Group], blocks: int) -> Iterator[list[_Group]]:
    """Of so many blocks at most; no group has more."""
    batch: list[_Group] = []
    for group in groups:
        if batch and sum(map(len, batch)) + len(group) > blocks:
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


class _Pusher:
    """Reads blocks of the disk, and writes an object for each group and rank."""

    def __init__(self, files: Sequence[DiskFile], stores: Sequence[ObjectStore], slot_bytes: int) -> None:
        self._files, self._stores = files, stores
        self.batch_blocks = max(1 << MAX_GROUP_BITS, _BATCH_BYTES // slot_bytes)
        self._memory = _Memory(self.batch_blocks, slot_bytes)
        self.failed: set[Key] = set()
        self.reason = ""

    def push(self, batch: Sequence[_Group]) -> None:
        """The blocks of a group of which one cannot be read are written alone, on all ranks."""
        pairs = [pair for group in batch for pair in group]
        keys, slots, addresses = [key for key, _ in pairs], [slot for _, slot in pairs], self._memory.addresses
        places = [
            place_of(object_id(group[-1][0], len(group).bit_length() - 1), index)
            for group in batch
            for index in range(len(group))
        ]
        bad: set[int] = set()
        for file, store in zip(self._files, self._stores, strict=True):
            read = _ended(file.read(slots, addresses[: len(pairs)], keys))
            bad.update(read.bad)
            broken = {object_of(places[i]) for i in bad}
            good = [i for i in range(len(pairs)) if object_of(places[i]) not in broken]
            write = _ended(
                store.write([places[i] for i in good], [addresses[i] for i in good], [keys[i] for i in good])
            )
            bad.update(good[i] for i in write.bad)
            self.reason = self.reason or read.reason or write.reason
        broken = {object_of(places[i]) for i in bad}
        lost = [group for group in batch if object_id(group[-1][0], len(group).bit_length() - 1) in broken]
        self.failed.update(group[0][0] for group in lost if len(group) == 1)
        if alone := [[pair] for group in lost if len(group) > 1 for pair in group]:
            self.push(alone)


def pull(cache: BucketCache, root: Path, settings: ObjectSettings, progress: Progress, max_blocks: int = 0) -> Moved:
    """Copy a cache of the bucket into a disk cache below ``root``, the newest ``max_blocks`` of it (0: all).

    An engine with that directory (DYN_KVBM_DISK_CACHE_DIR) finds the blocks at its next start. Its
    DYN_KVBM_DISK_CACHE_GB must hold as many blocks.
    """
    names = Names(cache.fingerprint, settings.encryption_secret)
    codec = Codec(names.scope, settings.encryption_secret)
    with _explained(settings):
        clients = open_clients(settings, cache.ranks)
        listed = sorted(
            (item for item in clients[0].list(names.prefix(0)) if blocks_of_name(item.name)),
            key=lambda item: -item.modified,
        )
        total = sum(blocks_of_name(item.name) for item in listed)
        slots = min(total, max_blocks) if max_blocks else total
        if not slots:
            raise ToolError(f"{cache.root} in bucket {settings.bucket} has no blocks to pull")
        directory = cache_directory(root, cache.fingerprint)
        with _opened_cache(directory, cache.fingerprint, slots, cache.ranks, cache.block_bytes) as (index, files):
            puller = _Puller(clients, names, codec, cache, index, files, slots)
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="kvbm-pull") as pool:
                for done, _ in enumerate(pool.map(puller.fetch, (item.name for item in listed)), 1):
                    progress(min(slots, done * slots // len(listed)), slots)
            index.flush()
            for file in files:
                file.sync()
            return Moved(puller.blocks, puller.failed, puller.reason)


class _Puller:
    """Fetches the object of every rank and writes its blocks to slots of their own."""

    def __init__(
        self,
        clients: Sequence[Client],
        names: Names,
        codec: Codec,
        cache: BucketCache,
        index: Index,
        files: Sequence[DiskFile],
        slots: int,
    ) -> None:
        self._clients, self._names, self._codec, self._cache = clients, names, codec, cache
        self._index, self._files = index, files
        used = dict(index.entries())
        self._held = set(used)
        self._free = iter([slot for slot in range(slots) if slot not in set(used.values())])
        self._lock = threading.Lock()
        self.blocks = self.failed = 0
        self.reason = ""

    def fetch(self, name: str) -> None:
        suffix = name.removeprefix(self._names.prefix(0))
        size = self._cache.block_bytes
        memory = _Memory(blocks_of_name(name), size)
        pairs: dict[Key, int] | None = None
        try:
            for rank, file in enumerate(self._files):
                contents = self._codec.open(self._clients[rank].get(self._names.prefix(rank) + suffix))
                if pairs is None:
                    pairs = self._take_slots(contents.tags)
                at = 0
                for position, tag in enumerate(contents.tags):
                    if tag in pairs:
                        self._codec.read_block(contents, position, tag, memory.view(at))
                        at += 1
                written = _ended(file.write(list(pairs.values()), memory.addresses[: len(pairs)], list(pairs)))
                if at != len(pairs) or written.bad:
                    raise ToolError(written.reason or f"rank {rank} lacks blocks of {suffix}")
        except (ObjectStoreError, RefusedError, ToolError) as error:
            with self._lock:
                self.failed += blocks_of_name(name)
                self.reason = self.reason or f"{suffix}: {error}"
            return
        with self._lock:
            self._index.put(list((pairs or {}).items()))
            self.blocks += len(pairs or {})

    def _take_slots(self, tags: Sequence[bytes]) -> dict[Key, int]:
        with self._lock:
            # Longer tags are of an engine that has reset its cache: no other engine may use them.
            keys = [tag for tag in tags if len(tag) == KEY_BYTES and tag not in self._held]
            pairs = dict(zip(keys, self._free, strict=False))
            self._held.update(pairs)
        return pairs


def verify(cache: BucketCache, settings: ObjectSettings, progress: Progress) -> Verified:
    """Fetch every object of every rank and check every block in it."""
    names = Names(cache.fingerprint, settings.encryption_secret)
    codec = Codec(names.scope, settings.encryption_secret)
    good, bad, done = 0, [], 0
    with _explained(settings):
        listed = [
            (client, item.name, blocks)
            for rank, client in enumerate(open_clients(settings, cache.ranks))
            for item in client.list(names.prefix(rank))
            if (blocks := blocks_of_name(item.name))
        ]
        total = sum(blocks for _, _, blocks in listed)

        def check(item: tuple[Client, str, int]) -> str:
            client, name, _ = item
            try:
                contents = codec.open(client.get(name))
                target = memoryview(bytearray(contents.block_bytes))
                for index, tag in enumerate(contents.tags):
                    codec.read_block(contents, index, tag, target)
                if not _is_named_by(names, name, contents.tags):
                    raise RefusedError("the object holds another block than its name says")
            except (ObjectStoreError, RefusedError) as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="kvbm-verify") as pool:
            for (_, name, blocks), reason in zip(listed, pool.map(check, listed), strict=True):
                done += blocks
                if reason:
                    bad.append((name, reason))
                else:
                    good += blocks
                progress(done, total)
    return Verified(good, bad)


def _is_named_by(names: Names, name: str, tags: Sequence[bytes]) -> bool:
    rank = int(name.removeprefix(f"{names.root}/").partition("/")[0])
    return name == names.of(rank, object_with(tags))


class _Memory:
    """Page-aligned memory for a batch of blocks, as O_DIRECT needs it."""

    def __init__(self, blocks: int, size: int) -> None:
        self._map = mmap.mmap(-1, max(1, blocks) * size)
        self._size = size
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.addresses = [first + i * size for i in range(blocks)]

    def view(self, index: int) -> memoryview:
        return memoryview(self._map)[index * self._size : (index + 1) * self._size]


@contextlib.contextmanager
def _opened_cache(
    directory: Path, fingerprint: dict[str, str | int], slots: int, ranks: int, slot_bytes: int
) -> Iterator[tuple[Index, list[DiskFile]]]:
    files: list[DiskFile] = []
    index: Index | None = None
    try:
        index = Index.open(directory, fingerprint, slots)
        files += [DiskFile(slab_path(directory, rank), slots, slot_bytes) for rank in range(ranks)]
        yield index, files
    except OSError as error:  # CacheInUse among them
        raise ToolError(error.strerror or str(error)) from error
    finally:
        for file in files:
            file.close()
        if index is not None:
            index.close()


def _ended(operation: Operation) -> Operation:
    if not operation.wait(_DISK_SECONDS):
        operation.cancel()
        raise ToolError(f"a {operation.kind} of {operation.bytes / 1e6:.0f} MB has not ended in {_DISK_SECONDS:.0f} s")
    return operation


@contextlib.contextmanager
def _explained(settings: ObjectSettings) -> Iterator[None]:
    try:
        yield
    except ObjectStoreError as error:
        where = f"bucket {settings.bucket} at {settings.endpoint or 'AWS'}"
        raise ToolError(f"{where}: {error}") from error
