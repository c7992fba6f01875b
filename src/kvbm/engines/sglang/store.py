"""Pages by key, in host memory and on disk: what a storage backend is made of.

The bookkeeping is that of the other engines (:class:`~kvbm.core.manager.BlockManager`), under one lock that is never
held across a copy or a call to the disk. Bytes pass through a slab of our own on their way to and from disk, also where
there is no host tier: a read that was given up because the disk hangs must not write to a page of SGLang's later on.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from kvbm.config import Config
from kvbm.core.catalog import Catalog
from kvbm.core.counts import Counts, add
from kvbm.core.keys import Key
from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from kvbm.engines.sglang.observed import Lookups
from kvbm.plans import Copy, LoadPlan, MovePlan, TierName
from kvbm.tiers import bounded
from kvbm.tiers import disk as disk_tier
from kvbm.tiers.base import Operation
from kvbm.tiers.bounded import Call, keep_until_exit
from kvbm.tiers.disk.file import ALIGNMENT, DiskFile, DiskSpaceError
from kvbm.tiers.disk.index import Index, cache_directory, slab_path
from kvbm.tiers.disk.open import open_file, staging_slots
from kvbm.tiers.host.slab import HostSlab
from kvbm.tiers.registry import NEAR

logger = logging.getLogger("kvbm")

DISK = disk_tier.TIER.name

# A page, piece by piece: (address, bytes).
Page = Sequence[tuple[int, int]]

_PATIENCE_SECONDS = 10.0  # for a cache that an engine which has just been killed still holds


class Sizes(NamedTuple):
    """Slots of each tier; 0: there is none."""

    host: int
    disk: int


class Shown(Protocol):
    """Is told of every change of the disk tier."""

    def put(self, pairs: Iterable[tuple[Key, int]]) -> None: ...

    def remove(self, keys: Iterable[Key]) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class _Journal:
    """The disk tier's journal: the index for the next engine, and the map for readers in other processes."""

    def __init__(self, index: Index, shown: Shown | None) -> None:
        self._index = index
        self._shown = shown

    def put(self, pairs: Sequence[tuple[Key, int]]) -> None:
        self._index.put(pairs)
        if self._shown is not None:
            self._shown.put(pairs)

    def remove(self, keys: Iterable[Key]) -> None:
        self._index.remove(keys)
        if self._shown is not None:
            self._shown.remove(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        self._index.touch(keys)

    def clear(self) -> None:
        self._index.clear()
        if self._shown is not None:
            self._shown.clear()


class _OnDisk(NamedTuple):
    index: Index
    file: DiskFile
    shown: Shown | None

    def close(self) -> None:
        self.file.close()
        self.index.close()
        if self.shown is not None:
            self.shown.close()


class _Load(NamedTuple):
    """A group of pages on their way up."""

    plan: LoadPlan
    reads: list[Operation | None]  # one a copy of the plan; None: it is in host memory already
    generation: bytes  # the manager's when it began

    @property
    def pages(self) -> int:
        return len(self.plan.blocks)


class Store:
    """Pages of one size. Every method may be called from any thread, and none raises for the disk's sake."""

    def __init__(
        self,
        config: Config,
        cache: Mapping[str, str | int],
        page_bytes: int,
        sizes: Sizes,
        rank: int = 0,
        shown: Callable[[Path, int], Shown] | None = None,
    ) -> None:
        """``cache``: what makes these pages what they are, for the name of a cache that outlives the process. ``shown``
        opens what tells other processes which pages lie where on disk."""
        self.page_bytes = page_bytes
        self.counts = Counts()
        self.lookups = Lookups(config.cache_stats_max_requests)
        self.directory: Path | None = None
        self._slot_bytes = -(-page_bytes // ALIGNMENT) * ALIGNMENT
        self._persistent = not sizes.host  # a page counts as kept only when it is on disk
        slots = sizes.host or staging_slots(config, self._slot_bytes)
        self._group = max(1, min(slots // 4, 32))  # pages that are moved together
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._slab = HostSlab(slots * self._slot_bytes).carve(slots, self._slot_bytes)
        catalogs: dict[TierName, Catalog] = {NEAR.name: Pool(slots)}
        self._file: DiskFile | None = None
        self._index: Index | None = None  # what the next start finds; None after a clear
        self._cleared_index: Index | None = None  # holds the cache until the store is closed
        self._shown: Shown | None = None
        try:
            if sizes.disk and (disk := self._open_disk(config, cache, sizes.disk, rank, shown)) is not None:
                catalogs[DISK] = disk
        except BaseException:
            self._slab.close()
            raise
        self._manager = BlockManager(catalogs)
        self._under_way: deque[tuple[Sequence[Operation], Callable[[], None]]] = deque()
        self._users = 0  # calls that copy pages right now
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvbm-store", daemon=True)
        self._thread.start()

    def _open_disk(
        self,
        config: Config,
        cache: Mapping[str, str | int],
        slots: int,
        rank: int,
        shown: Callable[[Path, int], Shown] | None,
    ) -> Pool | None:
        """None, with a sentence, when the disk cannot be used now. Raises when it can never hold what was asked for."""
        self.directory = directory = cache_directory(config.disk_cache_dir, cache)

        def open_all() -> _OnDisk:
            about = {"block_bytes": self.page_bytes}
            index = Index.open(directory, cache, slots, patience=_PATIENCE_SECONDS, about=about)
            try:
                slab = slab_path(directory, rank)
                file = open_file(config, slab, slots, self._slot_bytes, rank, _PATIENCE_SECONDS)
            except BaseException:
                index.close()
                raise
            try:
                return _OnDisk(index, file, None if shown is None else _show(shown, directory, slots, index))
            except BaseException:
                file.close()
                index.close()
                raise

        try:
            disk = Call(open_all, str(directory), _OnDisk.close).result()
        except DiskSpaceError:
            raise
        except OSError as error:
            logger.warning(
                "there is no disk tier: %s. This engine runs without it; pages on disk are kept for the next start",
                error.strerror or error,
            )
            return None
        self._index, self._file, self._shown = disk
        pool = Pool(slots, journal=_Journal(disk.index, disk.shown))
        found = pool.adopt(disk.index.entries())
        logger.info("disk tier: %d of %d pages are there from before, in %s", found, slots, directory)
        return pool

    # -- finding ------------------------------------------------------------------------------------------------------

    def count(self, keys: Sequence[Key]) -> int:
        """How many pages from the first on are there."""
        with self._lock:
            match = self._manager.lookup(keys, wait_for_writers=False)
            found: dict[TierName, int] = {}
            for run in match.runs:
                found[run.tier] = found.get(run.tier, 0) + len(run.slots)
            self._note(len(keys), found)
            return match.blocks

    def _note(self, asked: int, found: dict[TierName, int]) -> None:
        self.lookups.add(asked, found)
        for tier, pages in found.items():
            add(self.counts.matched_blocks, tier, pages)

    @property
    def tiers(self) -> Mapping[TierName, Catalog]:
        """Those that were asked for: host memory that is but the way to the disk is none."""
        return {
            tier: pool for tier, pool in self._manager.catalogs.items() if tier != NEAR.name or not self._persistent
        }

    def has(self, keys: Sequence[Key]) -> list[bool]:
        with self._lock:
            catalogs = self._manager.catalogs.values()
            return [any(key in catalog for catalog in catalogs) for key in keys]

    # -- keeping ------------------------------------------------------------------------------------------------------

    def put(self, keys: Sequence[Key], pages: Sequence[Page], deadline: float) -> list[bool]:
        """Copy pages in. True for each that is kept: with a host tier as soon as it is there, else when on disk."""
        with self._in_use() as open_:
            if not open_ or (self._persistent and self._file is None):
                return [False] * len(keys)
            for at in range(0, len(keys), self._group):
                if not self._put_group(keys[at : at + self._group], pages[at : at + self._group], deadline):
                    break
            if not self._persistent:
                return self.has(keys)
            with self._changed:
                disk = self._manager.catalogs[DISK]
                self._changed.wait_for(lambda: not any(map(disk.is_writing, keys)), deadline - time.monotonic())
                return [key in disk for key in keys]

    def _put_group(self, keys: Sequence[Key], pages: Sequence[Page], deadline: float) -> bool:
        """False when there was no room in time."""
        left = dict(zip(keys, pages, strict=True))
        near = self._manager.near
        while True:
            with self._changed:
                left = {key: page for key, page in left.items() if not self._holds(key)}
                here = [key for key in left if key in near]  # and not on disk, where it failed or was evicted
                fresh = [key for key in left if key not in near]
                plan = self._manager.store(fresh, range(len(fresh))) if fresh else None
                waits = plan is None and bool(fresh) and not here
                generation = self._manager.generation
                if waits and not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return False
            for key in here:
                del left[key]
            if plan is not None:
                for i, slot in zip(plan.copy.blocks, plan.copy.slots, strict=True):
                    gather(left.pop(fresh[i]), self._address(slot))
            with self._lock:
                if plan is not None:
                    published = self._manager.finish_store(plan.id, ok=self._manager.generation == generation)
                    self.counts.offloaded_blocks += len(published)
                    here += published
                # In one go: nobody shall push them out in between.
                move = self._manager.move(here, DISK) if here and self._file is not None else None
            if move is not None:
                self._move(move)
            if not left:
                return True

    def _holds(self, key: Key) -> bool:
        """Whether the page needs no more thought. Without a host tier, what is not on disk or on its way there does."""
        tier = DISK if self._persistent and self._file is not None else NEAR.name
        return self._manager.catalogs[tier].holds(key)

    def _move(self, plan: MovePlan) -> None:
        """Write pages of the host tier on to disk, in the background."""
        file = self._file
        assert file is not None
        write = file.write(plan.targets, [self._address(slot) for slot in plan.slots], plan.tags)

        def end() -> None:
            with self._changed:
                written = self._manager.finish_move(plan.id, write.bad)
                add(self.counts.moved_blocks, DISK, len(written))
                add(self.counts.failed_move_blocks, DISK, len(write.bad))
                self._changed.notify_all()

        self._finish([write], end)

    # -- bringing back ------------------------------------------------------------------------------------------------

    def get(self, keys: Sequence[Key], pages: Sequence[Page], patience: float) -> list[bool]:
        """Copy pages out, up to the first that cannot be had. A disk that gives nothing for ``patience`` seconds is
        given up. Nothing is written to a page after its False has been returned."""
        with self._in_use() as open_:
            return self._get(keys, pages, patience) if open_ else [False] * len(keys)

    def _get(self, keys: Sequence[Key], pages: Sequence[Page], patience: float) -> list[bool]:
        arrived: list[bool] = []
        flights: deque[_Load] = deque()
        at = 0  # pages whose loads have begun
        while True:
            # Two groups at a time: one is copied while the other is read.
            while at < len(keys) and len(flights) < 2:
                wanted = keys[at : at + self._group]
                load = self._begin_load(wanted, 0.0 if flights else patience)
                if load is None:
                    break
                flights.append(load)
                at = at + load.pages if load.pages == len(wanted) else len(keys)
            if not flights:
                break
            load = flights.popleft()
            arrived += self._end_load(load, pages[len(arrived) : len(arrived) + load.pages], patience)
            if not all(arrived):
                while flights:
                    self._end_load(flights.popleft(), (), 0.0)
                break
        count = arrived.index(False) if False in arrived else len(arrived)
        with self._lock:
            self._manager.touch(keys[:count])
        return arrived + [False] * (len(keys) - len(arrived))

    def _begin_load(self, keys: Sequence[Key], patience: float) -> _Load | None:
        """None when the first page is not there, or there is no room to bring it up in time."""
        near = self._manager.near
        with self._changed:
            match = self._manager.lookup(keys, wait_for_writers=False)
            missing = sum(len(run.slots) for run in match.runs if run.tier != NEAR.name)
            if missing > near.available and patience:
                self._changed.wait_for(lambda: missing <= near.available, patience)
                match = self._manager.lookup(keys, wait_for_writers=False)
                missing = sum(len(run.slots) for run in match.runs if run.tier != NEAR.name)
            if not match.blocks or missing > near.available:
                return None
            plan = self._manager.load(match, "", range(match.blocks), in_step=False, after=[])
            generation = self._manager.generation
        return _Load(plan, [self._read(copy) for copy in plan.copies], generation)

    def _read(self, copy: Copy) -> Operation | None:
        if copy.tier == NEAR.name or self._file is None:
            return None
        # Where there was not room for all of them, the rest does not come.
        count = len(copy.via)
        return self._file.read(copy.slots[:count], [self._address(slot) for slot in copy.via], copy.tags[:count])

    def _end_load(self, load: _Load, pages: Sequence[Page], patience: float) -> list[bool]:
        """Copy what has come to its pages; without pages, only let go of it."""
        came: list[bool] = []
        bad: list[int] = []
        late: list[Operation] = []
        for copy, read in zip(load.plan.copies, load.reads, strict=True):
            slots = copy.slots if read is None else copy.via
            if read is not None and not read.wait(patience):
                late.append(read)
                came += [False] * len(copy.blocks)
                continue
            spoiled = set() if read is None else set(read.bad)
            first = len(came)
            for i in range(len(copy.blocks)):
                good = i < len(slots) and i not in spoiled and first + i < len(pages) and all(came)
                if good:
                    scatter(self._address(slots[i]), pages[first + i])
                came.append(good)
            bad += [first + i for i in spoiled]
        missed = [i for i, good in enumerate(came) if not good and i not in bad]

        def end() -> None:
            with self._changed:
                self.counts.failed_load_blocks += len(bad) + (len(missed) if pages else 0)
                self.counts.missed_load_blocks += len(missed) if pages else 0
                at = 0
                for copy in load.plan.copies:
                    self.counts.add_onboarded(copy.tier, sum(came[at : at + len(copy.blocks)]))
                    at += len(copy.blocks)
                keep = not late and self._manager.generation == load.generation
                self.counts.promoted_blocks += self._manager.finish_load(load.plan.id, bad, missed, keep)
                self._changed.notify_all()

        if late:
            self._finish(late, end)  # the disk still writes to our slots
        else:
            end()
        return came[: len(pages)]

    # -- housekeeping -------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget every page, because the weights may have changed.

        The name of the cache covers the weights that were loaded at start, so this process keeps nothing more for the
        next start and shows nothing more to other ranks. Pages that are written from now on carry another generation:
        no entry of an index that a crash leaves behind fits them.
        """
        with self._changed:
            self._manager.clear()
            self._manager.generation = os.urandom(8)
            for catalog in self._manager.catalogs.values():
                catalog.discard()
            if self._index is not None:
                self._cleared_index, self._index = self._index, None
            if self._shown is not None:
                self._shown.close()
                self._shown = None
        if self._cleared_index is not None:
            self._cleared_index.flush()

    def close(self) -> None:
        """Finish what is under way and let go of memory and files. May be called twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._users)
        deadline = time.monotonic() + bounded.DISK_END_SECONDS
        self._thread.join(bounded.DISK_END_SECONDS)
        answered = self._file is None or self._file.close(max(1.0, deadline - time.monotonic()))
        for index in (self._index, self._cleared_index):
            if index is not None:
                index.close()
        if self._shown is not None:
            self._shown.close()
        if answered:
            self._slab.close()
        else:
            keep_until_exit(self._slab)  # the disk may still read and write it

    @contextmanager
    def _in_use(self) -> Iterator[bool]:
        """While pages are copied nobody frees the memory. False: it is freed already."""
        with self._changed:
            closing = self._closing
            self._users += not closing
        try:
            yield not closing
        finally:
            if not closing:
                with self._changed:
                    self._users -= 1
                    self._changed.notify_all()

    def _address(self, slot: int) -> int:
        return self._slab.address + slot * self._slot_bytes

    def _finish(self, operations: Sequence[Operation], end: Callable[[], None]) -> None:
        """Call ``end`` when all of them are over."""
        with self._changed:
            self._under_way.append((operations, end))
            self._changed.notify_all()

    def _run(self) -> None:
        """The thread that ends what nobody waits for."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._under_way or self._closing)
                if not self._under_way:
                    return
                waiting, self._under_way = self._under_way, deque()
            waiting[0][0][0].wait(0.02)
            late: deque[tuple[Sequence[Operation], Callable[[], None]]] = deque()
            for item in waiting:
                if all(operation.done() for operation in item[0]):
                    item[1]()
                else:
                    late.append(item)
            with self._changed:
                self._under_way.extendleft(reversed(late))


def _show(shown: Callable[[Path, int], Shown], directory: Path, slots: int, index: Index) -> Shown | None:
    """What tells other processes of the pages; None, with a sentence, when it cannot be made now."""
    try:
        made = shown(directory, slots)
        made.put(index.entries())
        return made
    except OSError as error:
        logger.warning("cannot create keys.map, so ranks that only read get no disk hits: %s", error.strerror or error)
        return None


def gather(page: Page, target: int) -> None:
    """Pieces of a page to one place. ctypes lets go of the interpreter for each."""
    for address, size in page:
        ctypes.memmove(target, address, size)
        target += size


def scatter(source: int, page: Page) -> None:
    for address, size in page:
        ctypes.memmove(address, source, size)
        source += size
