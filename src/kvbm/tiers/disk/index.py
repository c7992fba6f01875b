"""Which block lies in which slot of the disk tier, kept where a restart finds it.

The leader owns the index. It hands changes to a thread, which writes them in batches. No caller waits for that thread.
A crash loses the changes that the thread has not written. A stale index is harmless: a slot's checksum matches only the
block that was written last (:mod:`kvbm.tiers.disk.file`).

SQLite and not LMDB: it comes with Python, its file can be read beside a running engine, and a file that was truncated
gives an error where a mapped one would kill the process. benchmarks/disk.py --index measures both.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from kvbm.core.keys import Key
from kvbm.tiers import bounded
from kvbm.tiers.base import Fingerprint
from kvbm.tiers.directory import private_directory
from kvbm.tiers.disk.cache_dir import LOCK, compare, describe
from kvbm.tiers.disk.database import DATABASE as DATABASE
from kvbm.tiers.disk.database import (
    DELETE_SLOTS,
    MAX_POSITION,
    POSITION_STEP,
    IndexUnavailable,
    Opened,
    connect,
    execute,
    position_of,
    row_sum,
    set_aside,
    turn_of,
    used_in,
)
from kvbm.tiers.lock import FileLock

logger = logging.getLogger("kvbm")


MAX_EXPECTED = 1 << 16  # blocks; about 200 bytes each
_LAST_SECONDS = 5.0  # that the end of a process waits for a disk
_BATCH_SECONDS = 0.2  # how long changes gather; a crash loses them
_MAX_BACKOFF_SECONDS = 30.0
_DELETE_BLOCKS = "DELETE FROM blocks WHERE (slot, key) IN (VALUES {})"
_INSERT = "INSERT OR REPLACE INTO blocks (slot, key, used, sum) VALUES {}"
_TOUCH = """
WITH fresh (slot, used) AS (VALUES {})
INSERT OR REPLACE INTO blocks (slot, key, used, sum)
SELECT slot, key, fresh.used, sum FROM fresh JOIN blocks USING (slot)
"""


class Index:
    """Made by :meth:`open`. The methods are called from the leader's thread and return at once.

    In ``put`` and ``touch`` the first block counts as used last: a block is worth nothing without those before it. The
    same numbers keep which blocks follow one another, for :meth:`groups`.

    What waits to be written is kept by slot, the latest only. So there is never more of it than there are slots,
    however long the disk takes, and nothing has to be dropped. Rows lie by slot too, and not by key: the slots of a
    request are neighbours while its keys are all over the place, and a transaction writes only the pages it touches:
    3 µs a block instead of 36.
    """

    def __init__(self, directory: Path, lock: FileLock, opened: Opened, what: str) -> None:
        self.directory = directory
        self._what = what
        self.started_clean = ""  # why; empty when the index of the last engine was kept, or there was none
        self._lock = lock
        self._database = opened.connection
        self._slots: dict[Key, int] = {}  # in the order of their use
        for key, slot in opened.rows:
            self._move(key, slot)
        self._turn = turn_of(opened.used)
        # Used before they came to this tier -> the number of it. Two halves: when one is full, the other is dropped.
        self._expected: tuple[dict[Key, int], dict[Key, int]] = {}, {}
        self._changed = threading.Condition()
        self._waiting = _Changes()
        self._given = self._written = 0  # changes that came in, and how many of them are in the file
        self._closing = self._hurry = False
        self._failures = 0  # writes in a row, since the last flush
        self._thread = threading.Thread(target=self._run, name="kvbm-index", daemon=True)
        self._thread.start()
        _open.add(self)

    @classmethod
    def open(
        cls,
        directory: Path,
        fingerprint: Fingerprint,
        slots: int,
        *,
        patience: float = 0.0,
        about: Mapping[str, str | int] | None = None,
        what: str = "disk tier",
        setting: str = "DYN_KVBM_DISK_CACHE_DIR",
    ) -> Index:
        """Take the cache in ``directory`` (see :mod:`~kvbm.tiers.disk.cache_dir`) into use, or make one.

        Raises :class:`~kvbm.tiers.lock.CacheInUse` when another engine uses it, and OSError when the directory or the
        index cannot be used now: nothing is lost then. An index that is damaged is started clean, and
        :attr:`started_clean` says why. ``about`` goes into cache.json beside the fingerprint; it is for people and not
        compared. ``what`` it is of goes into the log, and errors name the ``setting`` that the directory comes from.
        """
        private_directory(directory, setting)
        lock = FileLock(directory / LOCK, patience, setting)
        opened = None
        try:
            why = compare(directory, fingerprint)
            if not why and os.path.lexists(directory / DATABASE):
                try:
                    opened = connect(directory, slots, what)
                except ValueError as error:
                    why = f"its index is damaged and cannot be used ({error})"
            if why:
                logger.warning("%s: starting clean in %s, because %s", what, directory, why)
                set_aside(directory)
            # Before there is an index: an index without a description looks like another engine's.
            describe(directory, fingerprint, slots, about or {})
            if opened is None:
                try:
                    opened = connect(directory, slots, what)
                except ValueError as error:
                    raise IndexUnavailable(errno.EIO, f"no index can be made in {directory}: {error}") from error
            index = cls(directory, lock, opened, what)
        except BaseException:
            if opened is not None:
                opened.connection.close()
            lock.release()
            raise
        index.started_clean = why
        return index

    def entries(self) -> Iterator[tuple[Key, int]]:
        """All (key, slot), least recently used first."""
        with self._changed:
            pairs = list(self._slots.items())
        last = {slot: key for key, slot in pairs}  # a block that was put over another one
        return (pair for pair in pairs if last[pair[1]] == pair[0])

    def __len__(self) -> int:
        return len(self._slots)

    def put(self, pairs: Sequence[tuple[Key, int]]) -> None:
        """These blocks lie in these slots now, on every rank; what lay there before is forgotten with it."""
        with self._changed:
            for key, slot in reversed(pairs):
                before = self._slots.get(key)
                if before is not None and before != slot:
                    self._waiting.remove(key, before)
                self._move(key, slot)
                self._waiting.put(key, slot, self._expected_use(key) or self._tick())
            self._wake()

    def remove(self, keys: Iterable[Key]) -> None:
        """These blocks are gone."""
        with self._changed:
            for key in keys:
                slot = self._slots.pop(key, None)
                if slot is not None:
                    self._waiting.remove(key, slot)
            self._wake()

    def touch(self, keys: Sequence[Key], is_prefix: bool = False) -> None:
        """These blocks have been used. ``is_prefix``: they are the front of one prompt, without a gap. Those that are
        not here yet may be on their way."""
        if is_prefix and len(keys) > MAX_POSITION:
            self.touch(keys[MAX_POSITION:])
            keys = keys[:MAX_POSITION]
        with self._changed:
            if is_prefix:
                self._tick()
                first = used_in(self._turn, 0)
                numbers = range(first, first - len(keys) * POSITION_STEP, -POSITION_STEP)
                self._expect(dict(zip(keys, numbers, strict=True)))
            for key in reversed(keys):
                slot = self._slots.get(key)
                if slot is not None:
                    self._move(key, slot)
                    self._waiting.used[slot] = self._expected_use(key) if is_prefix else self._tick()
            self._wake()

    def groups(self, size: int) -> list[list[tuple[Key, int]]]:
        """All blocks as (key, slot), in the groups of ``size`` into which their prompts divide, and the others alone.

        A prompt that shares its first blocks with a later one ends in the middle of a group of that one, and finds the
        shared blocks of that group only alone: these come a second time. Waits for the file.
        """
        self.flush()
        turns: dict[int, dict[int, tuple[Key, int]]] = {}
        alone: list[tuple[Key, int]] = []
        for key, slot, used in self._database.execute("SELECT key, slot, used FROM blocks ORDER BY slot").fetchall():
            position = position_of(used, key) if size > 1 else None
            if position is None:
                alone.append((key, slot))
            else:
                turns.setdefault(turn_of(used), {})[position] = key, slot
        shared = {at for found in turns.values() for at in range(min(found) // size * size, min(found))}
        groups: list[list[tuple[Key, int]]] = []
        for found in turns.values():
            for first in {at // size * size for at in found}:
                positions = [at for at in range(first, first + size) if at in found]
                if len(positions) == size:
                    groups.append([found[at] for at in positions])
                    positions = [at for at in positions if at in shared]
                alone += [found[at] for at in positions]
        return groups + [[pair] for pair in alone]

    def clear(self) -> None:
        """Forget every block, also those still waiting to be written. Call :meth:`flush` where that must be certain."""
        with self._changed:
            self._slots = {}
            self._expected = {}, {}
            self._waiting = _Changes(clear=True)
            self._wake()

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until everything given so far is in the file. False when that took longer than ``timeout``."""
        with self._changed:
            wanted = self._given
            self._hurry = self._written < wanted
            self._failures = 0  # its caller waits: try again at once, and then soon
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._written >= wanted, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Write pending changes and release the cache. A hanging disk is not waited for: the thread that writes closes
        the files and releases the lock, as soon as the disk answers or with the end of the process."""
        _open.discard(self)
        timeout = bounded.DISK_END_SECONDS if timeout is None else timeout
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning(
                "%s: the index at %s has not answered for %.0f s, so the engine ends without it; its last changes may "
                "not be found after a restart",
                self._what, self.directory, timeout,
            )  # fmt: skip

    def _expect(self, uses: dict[Key, int]) -> None:
        if len(self._expected[0]) + len(uses) > MAX_EXPECTED // 2:
            self._expected = {}, self._expected[0]
        self._expected[0].update(uses)

    def _expected_use(self, key: Key) -> int:
        """0 when no prompt that is remembered has used it."""
        newer, older = self._expected
        used = newer.get(key) or older.get(key)
        return used + key[0] if used else 0

    def _move(self, key: Key, slot: int) -> None:
        """To the end: no other block has been used since."""
        self._slots.pop(key, None)
        self._slots[key] = slot

    def _tick(self) -> int:
        self._turn += 1
        return used_in(self._turn)

    def _wake(self) -> None:
        self._given += 1
        self._changed.notify_all()

    def _run(self) -> None:
        """The thread that writes, and closes: the last connection to a database writes its log back."""
        try:
            self._write_all()
        finally:
            with contextlib.suppress(Exception):
                self._database.close()
            self._lock.release()

    def _write_all(self) -> None:
        is_failing = False  # said once, however often a flush has it tried again
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._given > self._written or self._closing)
                if self._given == self._written or (is_failing and self._closing):
                    return
                # More is usually on its way; a flush does not wait for it. A disk that fails is tried ever less often.
                seconds = min(_MAX_BACKOFF_SECONDS, _BATCH_SECONDS * 2 ** min(self._failures, 16))
                self._changed.wait_for(lambda: self._hurry or self._closing, seconds)
                self._hurry = False
                given, changes, self._waiting = self._given, self._waiting, _Changes()
            try:
                self._write(changes)
            except Exception as error:
                if not is_failing:
                    logger.warning(
                        "%s: the index at %s cannot be written (%s); what changes from here on may not be found after "
                        "a restart",
                        self._what, self.directory, error,
                    )  # fmt: skip
                is_failing = True
                with self._changed:
                    self._failures += 1
                    self._waiting = changes.then(self._waiting)
                continue
            is_failing = False
            with self._changed:
                self._failures = 0
                self._written = given
                self._changed.notify_all()

    def _write(self, changes: _Changes) -> None:
        with self._database as database:
            if changes.clear:
                database.execute("DELETE FROM blocks")
            gone = changes.gone.items()
            execute(database, DELETE_SLOTS, ((slot,) for slot, key in gone if key is None))
            execute(database, _DELETE_BLOCKS, ((slot, key) for slot, key in gone if key is not None))
            execute(database, _INSERT, changes.rows())
            execute(database, _TOUCH, (pair for pair in changes.used.items() if pair[0] not in changes.keys))


_open: weakref.WeakSet[Index] = weakref.WeakSet()


def _flush_all() -> None:
    """Not every engine tells its connector that it ends."""
    for index in list(_open):
        index.flush(_LAST_SECONDS)


atexit.register(_flush_all)
os.register_at_fork(after_in_child=_open.clear)


class _Changes(msgspec.Struct, eq=False):
    """Changes that wait to be written: the latest for each slot, to be applied in the order of the fields."""

    clear: bool = False
    gone: dict[int, Key | None] = {}  # slot -> the key to be removed from it; None: whichever is there
    keys: dict[int, Key] = {}
    used: dict[int, int] = {}

    def rows(self) -> Iterator[tuple[int, Key, int, int]]:
        """Those to be written, as the columns of the table are."""
        return ((slot, key, self.used[slot], row_sum(slot, key)) for slot, key in self.keys.items())

    def put(self, key: Key, slot: int, used: int) -> None:
        self.gone.pop(slot, None)
        self.keys[slot] = key
        self.used[slot] = used

    def remove(self, key: Key, slot: int) -> None:
        waiting = self.keys.get(slot)
        if waiting is None:
            # Only this key: should the slot have been given to another block meanwhile, that one stays.
            self.gone.setdefault(slot, key)
        elif waiting == key:
            del self.keys[slot]
            self.gone[slot] = None  # the file may have an older one there
            self.used.pop(slot, None)

    def then(self, later: _Changes) -> _Changes:
        """Both, as one."""
        if later.clear:
            return later
        for slot, key in later.gone.items():
            if key is None:
                self.keys.pop(slot, None)
                self.used.pop(slot, None)
                self.gone[slot] = None
            else:
                self.remove(key, slot)
        for slot, key in later.keys.items():
            self.gone.pop(slot, None)
            self.keys[slot] = key
        self.used |= later.used
        return self
