"""Memory that several ranks of one machine map: for KV that is the same on all of them and is kept once.

It has no name in any file system. One rank creates it and sends the others its place. They open it through ``/proc``
while the creator still has it open. The kernel frees it with its last mapping, also after a crash of the ranks. The
size of ``/dev/shm``, 64 MB in many containers, does not limit it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvbm.tiers.host.slab import HostSlab, Shared, mapped_bytes, refuse_if_too_large

# Linux; the names came with Python 3.13.
_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_MADV_POPULATE_READ = 22
_AHEAD_BYTES, _AHEAD_SECONDS = 2 << 20, 1e-3  # 0.2 ms of work at a time
_SEALED = 0x1 | 0x2 | 0x4  # no more seals, neither smaller nor larger: a mapping that shrinks kills its reader


class SharingError(RuntimeError):
    """These ranks cannot share memory; the text says why."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where another process of this machine finds the memory."""

    machine: str
    pid: int
    file: int
    inode: int
    size: int


class SharedMemory:
    """An open file without a name. Close it when every rank has mapped it."""

    def __init__(self, file: int, size: int) -> None:
        self.file = file
        self.size = size

    @classmethod
    def make(cls, size: int) -> SharedMemory:
        file = os.memfd_create("kvbm-host-tier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        memory = cls(file, size)
        try:
            os.fchmod(file, 0o600)
            os.ftruncate(file, size)
            fcntl.fcntl(file, _ADD_SEALS, _SEALED)
        except OSError:
            memory.close()
            raise
        return memory

    @classmethod
    def open(cls, place: Place) -> SharedMemory:
        """What another process has made. Raises SharingError when that is out of reach."""
        if place.machine != machine():
            raise SharingError("the ranks are on different machines, or in containers that do not see each other")
        try:
            file = os.open(f"/proc/{place.pid}/fd/{place.file}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SharingError(f"one rank may not open the memory of another ({error.strerror})") from error
        status = os.fstat(file)
        if (status.st_ino, status.st_size) != (place.inode, place.size) or not stat.S_ISREG(status.st_mode):
            os.close(file)
            raise SharingError(f"process {place.pid} has closed its memory already")
        return cls(file, place.size)

    @property
    def place(self) -> Place:
        return Place(machine(), os.getpid(), self.file, os.fstat(self.file).st_ino, self.size)

    def close(self) -> None:
        """Mappings stay."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class MappableSlab(HostSlab):
    """A slab of one rank that other processes of this user can map. Has huge pages only where the kernel gives them to
    shared memory (/sys/kernel/mm/transparent_hugepage/shmem_enabled)."""

    def __init__(self, size: int, node: int | None = None) -> None:
        refuse_if_too_large(size)
        self._memory = SharedMemory.make(mapped_bytes(size))
        try:
            super().__init__(size, node=node, shared=Shared(self._memory.file, 0, 1))
        except BaseException:
            self._memory.close()
            raise
        self.file = self._memory.file

    def close(self) -> None:
        super().close()
        self._memory.close()
        self.file = -1


def map_ahead(address: int, size: int, is_over: Callable[[], bool]) -> None:
    """Enter another process's memory into this one's page tables: a copy that does so by its page faults takes twice as
    long. In small pieces with pauses, because mmap of other threads waits for each. Kernels before 5.14 refuse."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for at in range(0, size, _AHEAD_BYTES):
        if is_over() or libc.madvise(address + at, min(_AHEAD_BYTES, size - at), _MADV_POPULATE_READ):
            return
        time.sleep(_AHEAD_SECONDS)


def machine() -> str:
    """Equal for processes that see each other's process numbers, and for no others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
