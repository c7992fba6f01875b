"""Sockets of ranks on one machine: files in a directory that only their user can enter.

A port on the loopback interface is open to every user of the machine. Another user could read plans and forge reports,
and a forged report publishes a block that was never written. Only this user can open a socket in the directory.

ZeroMQ removes a socket's file before it listens, even the file of a running leader. A lock beside it, which ends with
its process, tells a running leader from a crashed one.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from kvbm.runtime.channel.base import ChannelError
from kvbm.tiers.directory import private_directory
from kvbm.tiers.lock import CacheInUse, FileLock, is_locked

PREFIX = "ipc://"
_LONGEST = 107  # bytes that the system takes for the path of a socket

_HOW = "(it is in TMPDIR, or in /tmp if that is not set, which must be the same for the leader and its workers)"


def path_of(url: str) -> Path | None:
    """The file of a socket on this machine; None if the address is another kind."""
    return Path(url.removeprefix(PREFIX)) if url.startswith(PREFIX) else None


class Claim:
    """The right to listen on one path. Raises :class:`CacheInUse` while another leader has it.

    Ends with the process, for engines that end without a word to their connectors.
    """

    def __init__(self, path: Path) -> None:
        prepare(path)
        self.release = weakref.finalize(self, _release, path, FileLock(_lock(path)), os.getpid())


def _release(path: Path, lock: FileLock, owner: int) -> None:
    if os.getpid() == owner:  # and not a child that was forked meanwhile
        path.unlink(missing_ok=True)
        _lock(path).unlink(missing_ok=True)
        lock.release()


def is_claimed(path: Path) -> bool:
    return is_locked(_lock(path))


def prepare(path: Path) -> None:
    """Make sure that no other user can put a socket there. Raises :class:`ChannelError`."""
    if len(os.fsencode(path)) > _LONGEST:
        raise ChannelError(
            f"{path} is too long for a socket, which may have {_LONGEST} bytes: set TMPDIR to a shorter path {_HOW}"
        )
    try:
        private_directory(path.parent, setting="TMPDIR")
    except OSError as error:
        raise ChannelError(f"leader and workers cannot meet in {path.parent}: {error.strerror} {_HOW}") from error


def hint(url: str) -> str:
    """Advice for the user at the end of a timeout's error."""
    if (path := path_of(url)) is None:
        return " Check that no firewall is in between."
    return (
        f" Leader and workers must run as one user and see the same {path.parent} {_HOW}; in containers of their own "
        "share it between them, or set DYN_KVBM_LEADER_ZMQ_HOST to an address of the leader's machine, on a network "
        "that only the ranks reach."
    )


def _lock(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


__all__ = ["PREFIX", "CacheInUse", "Claim", "hint", "is_claimed", "path_of", "prepare"]
