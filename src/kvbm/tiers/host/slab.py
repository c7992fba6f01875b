"""The host tier's memory on one rank, or of several that share it: one slab of equal slots.

One mapping, huge pages where the kernel gives them, faulted in by several threads before the engine starts to serve: a
page that is touched for the first time while a request waits costs more than the copy into it. Fixed slots mean no
allocator and no fragmentation.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvbm.tiers.host import numa

logger = logging.getLogger(__name__)

SETTING = "DYN_KVBM_CPU_CACHE_GB"
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_PIECE = 256 << 20  # one unit of faulting-in: small enough for progress lines, large enough to cost nothing
_HUGE_PAGE = 2 << 20
_PIN_PIECE = 4 << 30
_GROUPS = Path("/sys/fs/cgroup")
_THREADS = 16  # faulting-in scales with threads until memory bandwidth ends it


class HostMemoryError(MemoryError):
    """The slab does not fit this machine; the text says what would."""


class Shared(NamedTuple):
    """Memory that several ranks map: an open file of :func:`mapped_bytes`, and which of them this one is."""

    file: int
    place: int
    ranks: int


class HostSlab:
    """``size`` bytes of memory, carved into equal slots.

    The pages are faulted in by threads of their own from the moment the slab is made, so that an engine can go on with
    its own start meanwhile; :meth:`carve` waits for them.
    """

    outlives_engine = False
    file = -1  # that other processes can map

    def __init__(self, size: int, node: int | None = None, shared: Shared | None = None) -> None:
        self.size = size
        self.slots = 0
        self.slot_bytes = 0
        length = mapped_bytes(size)
        if shared is None:
            refuse_if_too_large(size)
            self._map = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._map = mmap.mmap(shared.file, length, flags=mmap.MAP_SHARED)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                logger.info("no huge pages for the host tier: this kernel has them switched off")
        # A buffer export, not a copy; it also keeps the mapping from moving.
        self._buffer = (ctypes.c_uint8 * length).from_buffer(self._map)
        self.address = ctypes.addressof(self._buffer)
        # Ranks that share a slab begin at different places of it: each brings the part of it that lies near its GPU.
        place, ranks = (0, 1) if shared is None else (shared.place, shared.ranks)
        pieces = -(-length // _PIECE)
        first, last = (min(pieces * i // ranks * _PIECE, length) for i in (place, place + 1))
        if node is not None and first < last:
            numa.prefer(self.address + first, last - first, node)
        self._unpin: Callable[[int], None] | None = None
        self._pinned: list[int] = []
        # Touching a page of a full filesystem kills the process: a subclass over a file allocates the pages itself.
        touch = shared is None or shared.ranks > 1
        self._is_stopping = threading.Event()
        self._filling = threading.Thread(
            target=_fault_in,
            args=(self.address, length, first, touch, self._is_stopping),
            name="kvbm-host-tier",
            daemon=True,
        )
        self._filling.start()

    def carve(self, slots: int, slot_bytes: int) -> HostSlab:
        """Divide the slab into slots. Waits until all its memory is there."""
        if slots * slot_bytes > self.size:
            raise ValueError(f"{slots} slots of {slot_bytes} bytes do not fit into {self.size} bytes")
        self._filling.join()
        self.slots, self.slot_bytes = slots, slot_bytes
        return self

    def spared(self, slots: int) -> contextlib.AbstractContextManager[None]:
        """Restores the first ``slots`` slots at its end: a warm-up overwrites blocks of the last engine there."""
        return contextlib.nullcontext()

    def intact(self, slots: int) -> tuple[bytes, bytes]:
        """For :class:`kvbm.plans.TierHello`: the slots that hold blocks of the last engine, and by which index. Waits
        until all have been hashed."""
        return b"", b""

    def give_up(self) -> None:
        """Close it, and keep nothing of it for the next engine."""
        self.close()

    @property
    def piece_slots(self) -> int:
        """Slots that are pinned together; a single copy must not reach over the end of such a piece."""
        return max(1, _PIN_PIECE // self.slot_bytes)

    def pin(self, pin: Callable[[int, int], None], unpin: Callable[[int], None]) -> None:
        """Make the memory known to a device, in pieces of whole slots: hundreds of gigabytes at once may be refused."""
        self._unpin = unpin
        piece = self.piece_slots * self.slot_bytes
        for start in range(0, self.slots * self.slot_bytes, piece):
            size = min(piece, self.slots * self.slot_bytes - start)
            pin(self.address + start, size)
            self._pinned.append(self.address + start)

    def close(self) -> None:
        """Free the memory. No copy may still use it."""
        self._is_stopping.set()
        self._filling.join()
        if self._unpin is not None:
            for address in self._pinned:
                self._unpin(address)
            self._pinned.clear()
        if hasattr(self, "_buffer"):
            del self._buffer
        try:
            self._map.close()
        except BufferError:
            # A reader still holds a view. The memory is freed with that view: unmapping it now would crash the reader.
            logger.debug("host slab is still in use; it will be freed with its last view")


def available_memory() -> int:
    """Bytes this process can still take: free memory, or what its control group leaves if that is less."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":", 1)
        fields[name] = int(value.split()[0]) * 1024
    available = fields.get("MemAvailable", fields["MemFree"])
    for group in _control_groups():
        with contextlib.suppress(OSError, ValueError):  # no such group, or none with a limit
            available = min(available, max(0, group.limit() - group.taken()))
    return available


class _ControlGroup(NamedTuple):
    path: Path
    limit_file: str
    used_file: str
    cached: tuple[str, ...]  # lines of memory.stat

    def limit(self) -> int:
        return int((self.path / self.limit_file).read_text())  # "max" is none

    def taken(self) -> int:
        """Bytes in use that the kernel cannot reclaim. It can reclaim cached files, for example the weights that were
        just read; MemAvailable leaves them out too."""
        taken = int((self.path / self.used_file).read_text())
        with contextlib.suppress(OSError):
            for line in (self.path / "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                taken -= int(value) if name in self.cached else 0
        return max(0, taken)


def _control_groups() -> list[_ControlGroup]:
    """This process's, and those around it: each may have a limit. Of either version."""
    try:
        entries = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = []
    for entry in entries:
        _, kinds, name = entry.split(":", 2)
        # In a container, the name may be a path of the host, while the container's group is mounted as the root.
        own = Path(name.lstrip("/"))
        if not kinds:
            files = "memory.max", "memory.current", ("active_file", "inactive_file")
            groups += [_ControlGroup(_GROUPS / path, *files) for path in (own, *own.parents)]
        elif "memory" in kinds.split(","):
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
            groups += [_ControlGroup(_GROUPS / "memory" / path, *files) for path in (own, *own.parents)]
    return groups


def refuse_if_too_large(size: int, ranks: int = 1) -> None:
    """Raise HostMemoryError when the machine has not that much. ``ranks``: how many share it."""
    available = available_memory()
    # Leave a twentieth for other processes: a machine that swaps is slower than no cache.
    usable = int(available * 0.95)
    if size > usable:
        whom = "on this rank" if ranks == 1 else f"for {ranks} ranks that share it"
        raise HostMemoryError(
            f"{SETTING} asks for {size / 1e9:.2f} GB of host memory {whom}, but only {usable / 1e9:.2f} GB "
            f"can be had ({available / 1e9:.2f} GB available). "
            f"Lower {SETTING}: up to {usable / 1e9:.2f} GB {'a rank' if ranks == 1 else 'for all of them'} would fit."
        )


def mapped_bytes(size: int) -> int:
    """The mapping of a slab of ``size`` bytes: whole huge pages."""
    return -(-size // _HUGE_PAGE) * _HUGE_PAGE


def _fault_in(address: int, length: int, first: int, touch_all: bool, is_stopping: threading.Event) -> None:
    """Fault in ``length`` bytes, beginning at ``first``, until done or ``is_stopping``."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    pieces = iter([*range(first, length, _PIECE), *range(0, first, _PIECE)])
    finished: queue.SimpleQueue[int] = queue.SimpleQueue()  # bytes of a piece; 0 at the end of a thread

    def work() -> None:
        # next() of a list iterator is atomic. ctypes releases the GIL during each call, so the threads run in parallel.
        while not is_stopping.is_set() and (start := next(pieces, None)) is not None:
            size = min(_PIECE, length - start)
            if libc.madvise(address + start, size, _MADV_POPULATE_WRITE) != 0 and touch_all:
                libc.memset(address + start, 0, size)  # older kernels: a write faults a page in
            finished.put(size)
        finished.put(0)

    began = last = time.monotonic()
    done = 0
    workers = min(_THREADS, len(os.sched_getaffinity(0)))
    # Daemon threads: the interpreter joins those of a ThreadPoolExecutor at exit, and an engine that is told to stop
    # while it starts would first fault in the whole tier.
    for i in range(workers):
        threading.Thread(target=work, name=f"kvbm-fault-in-{i}", daemon=True).start()
    while workers:
        size = finished.get()
        workers -= size == 0
        done += size
        now = time.monotonic()
        if now - last >= 2 and done < length:
            last = now
            logger.info("host tier: %.1f of %.1f GB ready (%.0f s)", done / 1e9, length / 1e9, now - began)
    if done >= length:
        logger.info("host tier: %.2f GB ready in %.1f s", length / 1e9, time.monotonic() - began)
