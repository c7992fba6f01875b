"""Which block lies in which slot of the disk tier, kept where a restart finds it.

The leader owns the index. Changes go to a thread of its own, which writes them in batches: nobody ever waits for it,
and what it has not written when the process dies is forgotten, no more. An index that is out of date is harmless: the
checksum of a slot answers only to the block that was written last (:mod:`kvbm.storage.disk`).

A directory holds one cache::

    kvbm-llama-3.1-8b-9f86d081884c7d65/
      cache.json      what the cache is of, for people, for `kvbm cache ls` and to be compared at start
      index.sqlite    one row a block
      lock            held by the engine that uses the cache
      rank-0.slab     the blocks of rank 0, and rank-0.slab.sums their checksums

SQLite and not LMDB: it comes with Python, its file can be read beside a running engine, and a file that was truncated
gives an error where a mapped one would kill the process. benchmarks/disk.py --index measures both.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from kvbm.core.keys import Key
from kvbm.storage.lock import FileLock, private_directory

logger = logging.getLogger("kvbm")

FORMAT = 1
DATABASE = "index.sqlite"
DESCRIPTION = "cache.json"
LOCK = "lock"

_BATCH_SECONDS = 0.2  # how long changes gather: what a crash may forget
_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (slot INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, used INTEGER NOT NULL)
"""

Fingerprint = Mapping[str, str | int]


def cache_directory(root: Path, fingerprint: Fingerprint) -> Path:
    """Where the cache of ``fingerprint`` lies: readable, and different for everything that is not exchangeable.

    The fingerprint holds whatever makes the bytes of two blocks of one key differ (model, dtype, layout, block size,
    ranks) and the scheme of the keys; the version of the format is added here.
    """
    digest = hashlib.sha256(_canonical(fingerprint)).hexdigest()[:16]
    model = re.sub(r"[^a-z0-9.]+", "-", str(fingerprint.get("model", "")).lower().rstrip("/").rsplit("/", 1)[-1])
    return root / f"kvbm-{model.strip('-.')[:48] or 'cache'}-{digest}"


def slab_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.slab"


def _canonical(fingerprint: Fingerprint) -> bytes:
    return json.dumps({"format": FORMAT, **fingerprint}, sort_keys=True).encode()


class Index:
    """Made by :meth:`open`. The methods are called from the leader's thread and return at once.

    In ``put`` and ``touch`` the first block counts as used last: a block is worth nothing without those before it.
    """

    def __init__(
        self, directory: Path, lock: FileLock, connection: sqlite3.Connection, slots: int, max_pending: int
    ) -> None:
        self.directory = directory
        self.started_clean = ""  # why; empty when the index of the last engine was kept, or there was none
        self.dropped = 0  # blocks that are not in the index because it could not follow: not found after a restart
        self._lock = lock
        self._database = connection
        self._max_pending = max_pending
        self._max_gone = max_pending + slots
        self._used: int = connection.execute("SELECT coalesce(max(used), 0) FROM blocks").fetchone()[0]
        self._changed = threading.Condition()
        self._slots: dict[Key, tuple[int, int]] = {}  # to be put: key -> (slot, used)
        self._gone: dict[Key, None] = {}  # to be removed
        self._touched: dict[Key, int] = {}
        self._clear = False
        self._given = self._written = 0  # changes that came in, and how many of these the last batch included
        self._closing = self._hurry = False
        self._thread = threading.Thread(target=self._run, name="kvbm-index", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        directory: Path,
        fingerprint: Fingerprint,
        slots: int,
        *,
        patience: float = 0.0,
        max_pending: int = 100_000,
        about: Mapping[str, str | int] | None = None,
    ) -> Index:
        """Take the cache in ``directory`` (see :func:`cache_directory`) into use, or make one.

        Raises :class:`~kvbm.storage.lock.CacheInUse` when another engine uses it, and OSError when the directory cannot
        be used at all. Whatever else is wrong with the index, it is started clean and :attr:`started_clean` says why.
        ``about`` goes into cache.json beside the fingerprint; it is for people and not compared.
        """
        private_directory(directory)
        lock = FileLock(directory / LOCK, patience)
        try:
            why = _compare(directory, fingerprint)
            connection = None
            if not why:
                try:
                    connection = _connect(directory)
                    connection.execute("DELETE FROM blocks WHERE slot >= ? OR slot < 0", (slots,))
                    connection.commit()
                except (sqlite3.Error, ValueError) as error:
                    why = f"its index cannot be read ({error})"
                    if connection is not None:
                        connection.close()
                    connection = None
            if connection is None:
                logger.warning("disk tier: starting clean in %s, because %s", directory, why)
                _remove_database(directory)
                connection = _connect(directory)
            _describe(directory, fingerprint, slots, about or {})
            index = cls(directory, lock, connection, slots, max_pending)
        except BaseException:
            lock.release()
            raise
        index.started_clean = why
        return index

    def entries(self) -> Iterator[tuple[Key, int]]:
        """All (key, slot) as of the last flush, least recently used first."""
        self.flush()
        reader = sqlite3.connect(self.directory / DATABASE)
        try:
            yield from reader.execute("SELECT key, slot FROM blocks WHERE typeof(key) = 'blob' ORDER BY used")
        finally:
            reader.close()

    def put(self, pairs: Sequence[tuple[Key, int]]) -> None:
        """These blocks lie in these slots now, on every rank; what lay there before is forgotten with it."""
        with self._changed:
            for key, slot in reversed(pairs):
                known = self._slots.pop(key, None)
                if known is None and len(self._slots) >= self._max_pending:
                    self._drop()
                    continue
                self._gone.pop(key, None)
                self._touched.pop(key, None)
                self._slots[key] = (slot, self._tick())
            self._wake()

    def remove(self, keys: Iterable[Key]) -> None:
        """These blocks are gone. Never dropped, however much is waiting.

        Should more be gone than there are slots, then so is everything the file knows: it is cleared instead.
        """
        with self._changed:
            for key in keys:
                self._slots.pop(key, None)
                self._touched.pop(key, None)
                self._gone[key] = None
            self._bound()
            self._wake()

    def touch(self, keys: Sequence[Key]) -> None:
        """These blocks have been used. Forgotten when too much is waiting: it only changes who is evicted first."""
        with self._changed:
            if len(self._touched) + len(keys) > self._max_pending:
                return
            for key in reversed(keys):
                self._touched[key] = self._tick()
            self._wake()

    def clear(self) -> None:
        """Forget every block, also those still waiting to be written. Call :meth:`flush` where that must be certain."""
        with self._changed:
            self._slots, self._gone, self._touched = {}, {}, {}
            self._clear = True
            self._wake()

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until everything given so far is in the file. False when that took longer than ``timeout``."""
        with self._changed:
            wanted = self._given
            self._hurry = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._written >= wanted, timeout)

    def close(self, timeout: float = 30.0) -> None:
        """Write what is waiting and let the cache go. A disk that hangs is left behind, and the lock with it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("disk tier: the index at %s does not answer; leaving it", self.directory)
            return
        self._database.close()
        self._lock.release()

    # -- inside; called with the condition held -----------------------------------------------------------------------

    def _tick(self) -> int:
        self._used += 1
        return self._used

    def _wake(self) -> None:
        self._given += 1
        self._changed.notify_all()

    def _bound(self) -> None:
        if len(self._gone) > self._max_gone:
            logger.warning("disk tier: the index at %s is too far behind; it starts clean", self.directory)
            self._gone = {}
            self._clear = True

    def _drop(self) -> None:
        if not self.dropped:
            logger.warning(
                "disk tier: the index cannot keep up with %d changes waiting; some blocks will not be found after a "
                "restart",
                self._max_pending,
            )
        self.dropped += 1

    # -- the thread that writes ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        failing = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._given > self._written or self._closing)
                if self._given == self._written or (failing and self._closing):
                    return
                # More is usually on its way; a flush does not wait for it.
                self._changed.wait_for(lambda: self._hurry or self._closing, _BATCH_SECONDS)
                self._hurry = False
                given, clear = self._given, self._clear
                slots, gone, touched = self._slots, self._gone, self._touched
                self._slots, self._gone, self._touched, self._clear = {}, {}, {}, False
            try:
                self._write(clear, slots, gone, touched)
            except Exception as error:
                if not failing:
                    logger.warning("disk tier: the index at %s cannot be written: %s", self.directory, error)
                failing = True
                self._put_back(clear, gone, len(slots))
                continue
            failing = False
            with self._changed:
                self._written = given
                self._changed.notify_all()

    def _write(
        self, clear: bool, slots: dict[Key, tuple[int, int]], gone: dict[Key, None], touched: dict[Key, int]
    ) -> None:
        with self._database as database:
            if clear:
                database.execute("DELETE FROM blocks")
            database.executemany("DELETE FROM blocks WHERE key = ?", zip(gone))
            # Replaces the row of the slot and the row of the key: a slot has one block, a block one slot.
            database.executemany(
                "INSERT OR REPLACE INTO blocks (key, slot, used) VALUES (?, ?, ?)",
                ((key, slot, used) for key, (slot, used) in slots.items()),
            )
            database.executemany(
                "UPDATE blocks SET used = ? WHERE key = ?", ((used, key) for key, used in touched.items())
            )

    def _put_back(self, clear: bool, gone: dict[Key, None], lost: int) -> None:
        """What was to be removed is tried again: a row too few costs a hit, a row too many costs a failed load."""
        with self._changed:
            self.dropped += lost
            self._clear |= clear
            for key in gone:
                if key not in self._slots:
                    self._gone[key] = None
            self._bound()


def _connect(directory: Path) -> sqlite3.Connection:
    """The database, checked from end to end. Raises sqlite3.Error or ValueError when it cannot be used."""
    path = directory / DATABASE
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    database = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    try:
        # With a write-ahead log a crash at any moment leaves whole transactions, and a reader never waits.
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, FORMAT):
            raise ValueError(f"its format is {version}, and this release writes {FORMAT}")
        check = database.execute("PRAGMA quick_check(1)").fetchone()[0]
        if check != "ok":
            raise ValueError(check)
        with database:
            database.execute(_SCHEMA)
            database.execute(f"PRAGMA user_version = {FORMAT}")
        database.execute("SELECT slot, key, used FROM blocks LIMIT 1").fetchone()
    except BaseException:
        database.close()
        raise
    return database


def _remove_database(directory: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        (directory / f"{DATABASE}{suffix}").unlink(missing_ok=True)


def _compare(directory: Path, fingerprint: Fingerprint) -> str:
    """Why what lies in the directory cannot be used; empty when it can."""
    path = directory / DESCRIPTION
    try:
        found = json.loads(path.read_bytes())["fingerprint"]
    except FileNotFoundError:
        return "" if not (directory / DATABASE).exists() else f"its {DESCRIPTION} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {DESCRIPTION} cannot be read ({error})"
    wanted = json.loads(_canonical(fingerprint))
    if found != wanted:
        keys = sorted(set(found) | set(wanted)) if isinstance(found, dict) else []
        differing = ", ".join(key for key in keys if found.get(key) != wanted.get(key))
        return f"it is of another cache ({differing or 'not described'} differ)"
    return ""


def _describe(directory: Path, fingerprint: Fingerprint, slots: int, about: Mapping[str, str | int]) -> None:
    text = json.dumps({"fingerprint": json.loads(_canonical(fingerprint)), "slots": slots, **about}, indent=2)
    new = directory / f"{DESCRIPTION}.new"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(fd)
    os.replace(new, directory / DESCRIPTION)
