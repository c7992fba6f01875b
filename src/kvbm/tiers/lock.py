"""Locks on the files of a cache that outlives its process: one engine at a time uses it."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from kvbm.forks import close_in_children

# Workers of an engine that was killed may live a little longer than it did, and hold its files.
PATIENCE_SECONDS = 5.0
_PAUSE_SECONDS = 0.05


class CacheInUse(OSError):  # noqa: N818 - a state, not a mistake
    """Another process uses this part of the cache."""


class FileLock:
    """A lock that ends with the process, however it ends: of one owner, or of several who only read.

    A child made by fork would keep the lock after its parent's death, so it closes its copy at once.
    """

    def __init__(
        self, path: Path, patience: float = 0.0, setting: str = "DYN_KVBM_DISK_CACHE_DIR", *, shared: bool = False
    ) -> None:
        """Raises :class:`CacheInUse` when another process holds the lock for ``patience`` seconds.

        The workers of a killed engine may outlive it for a moment, so an engine that starts right after it waits.
        """
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            # Before the lock is taken: another thread may fork at any time.
            self._file = close_in_children(os.fdopen(fd, "r+b", buffering=0))
            try:
                _take(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, path, patience, setting)
                if _is_at(fd, path):
                    break
                self.release()  # its last owner removed the file: this lock protects nothing
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # also for a child that is forked before the next line
            self._file.close()


def _take(fd: int, kind: int, path: Path, patience: float, setting: str) -> None:
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        if time.monotonic() >= deadline:
            raise CacheInUse(
                errno.EBUSY,
                f"{path} is in use by another engine. Stop it, or give this one a directory of its own with {setting}",
            )
        time.sleep(_PAUSE_SECONDS)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """True while some process holds the lock. Takes nothing and changes nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO would wait
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
