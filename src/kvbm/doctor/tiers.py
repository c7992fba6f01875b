"""Checks of the disk tier's directory: permissions, free space, features of the filesystem, speed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvbm.config import Config
from kvbm.doctor.base import Examination, bad, good, note
from kvbm.doctor.gpu import gpus
from kvbm.observe.format import size
from kvbm.observe.snapshot import Finding
from kvbm.tiers.directory import CacheRefused, open_trusted
from kvbm.tiers.disk import gds
from kvbm.tiers.disk.inspect import slabs_in

THREADS = 4
PIECE = 4 << 20
PROBE = 256 << 20
PROBE_SECONDS = 2.0
SLOW, VERY_SLOW = 1e9, 0.2e9  # bytes a second read
_DIRECTORY = "DYN_KVBM_DISK_CACHE_DIR"


class Disk:
    name = "disk"

    def run(self, case: Examination) -> Iterator[Finding]:
        config = case.config
        if config is None or not config.has_disk_tier:
            return
        folder = config.disk_cache_dir
        where = _existing(folder)
        if not os.access(where, os.W_OK | os.X_OK):
            yield bad(
                "disk-not-writable",
                f"{_DIRECTORY}={folder} is not writable for this user.",
                f"Change its owner, or choose another directory: export {_DIRECTORY}=/mnt/nvme/kvbm",
            )
            return
        try:
            os.close(open_trusted(where))
        except CacheRefused as error:
            # No probe file either: other users could replace it with a link.
            yield bad("disk-not-private", f"{error.strerror}.", "Until then, the engine runs without a disk tier.")
            return
        except OSError as error:
            yield bad(
                "disk-not-writable",
                f"{_DIRECTORY}={folder} cannot be opened ({error.strerror}).",
                f"Choose another directory: export {_DIRECTORY}=/mnt/nvme/kvbm",
            )
            return
        yield from self._room(config, where)
        if gpus():
            yield note("gpudirect-storage", f"{gds.statement()}.")
        try:
            probe = _Probe(where)
        except OSError as error:
            yield bad(
                "disk-not-writable",
                f"{_DIRECTORY}={folder}: cannot create a file there ({error.strerror}).",
                f"Choose another directory: export {_DIRECTORY}=/mnt/nvme/kvbm",
            )
            return
        try:
            yield from self._features(config, probe)
            if not case.quick:
                yield from self._speed(config, probe)
        finally:
            probe.close()

    def _room(self, config: Config, where: Path) -> Iterator[Finding]:
        kind = _filesystem(where)
        if kind in ("overlay", "tmpfs", "ramfs"):
            yield note(
                "disk-not-a-disk",
                f"{where} is on {kind}" + (", a container's own layer." if kind == "overlay" else ", which is memory."),
                f"Mount a local NVMe drive and set {_DIRECTORY} to a directory on it.",
            )
        if config.disk_cache_override_num_blocks:
            return
        held = _held(config.disk_cache_dir)
        free = shutil.disk_usage(where).free + held
        wanted = config.disk_cache_gb * 1e9
        if free - held < wanted <= free:
            yield note(
                "disk-kept",
                f"Existing caches hold {size(held)} at {config.disk_cache_dir}. An engine reuses its own cache. A "
                f"cache of another model or engine release leaves no room for {size(wanted)}, and the engine would run "
                "without a disk tier.",
                "`kvbm cache ls` shows them, `kvbm cache clear` removes those that you no longer need.",
            )
        if wanted > free:
            yield bad(
                "disk-space-short",
                f"DYN_KVBM_DISK_CACHE_GB={config.disk_cache_gb:g} asks for {size(wanted)}, and {where} has only "
                f"{size(free)} free.",
                f"Set it to at most {free / 1e9:.1f}, make room, or choose another {_DIRECTORY}.",
            )

    def _features(self, config: Config, probe: _Probe) -> Iterator[Finding]:
        if not probe.fallocates():
            finding = (
                "fallocate-missing",
                f"{probe.folder} cannot preallocate files (fallocate is not supported).",
            )
            if config.disk_zerofill_fallback:
                yield good(finding[0], f"{finding[1]} DYN_KVBM_DISK_ZEROFILL_FALLBACK is on, so KVBM writes zeros.")
            else:
                yield bad(
                    *finding,
                    "Set DYN_KVBM_DISK_ZEROFILL_FALLBACK=1: KVBM then fills the file with zeros once. Without it, the "
                    "file is sparse, and the disk may be full later.",
                )
        if config.disk_disable_o_direct:
            yield note("o-direct-off", "O_DIRECT is off: the page cache competes with the host tier for memory.")
            return
        at_open, later = probe.takes_direct(at_open=True), probe.takes_direct(at_open=False)
        if at_open and not later and config.disk_allocator_type == "default":
            yield bad(
                "o-direct-at-open-only",
                f"{probe.folder} takes O_DIRECT only when a file is opened.",
                "Set DYN_KVBM_DISK_ALLOCATOR_TYPE=open-direct.",
            )
        elif not at_open and not later:
            yield bad(
                "o-direct-missing",
                f"{probe.folder} does not support O_DIRECT.",
                "Set DYN_KVBM_DISK_DISABLE_O_DIRECT=1, or choose a directory on ext4 or XFS on a local drive.",
            )
        elif not later and config.disk_allocator_type == "open-direct":
            yield good("disk", f"{probe.folder} takes O_DIRECT at open, as configured.")
        else:
            yield good("disk", f"{probe.folder} takes O_DIRECT.")

    def _speed(self, config: Config, probe: _Probe) -> Iterator[Finding]:
        direct = not config.disk_disable_o_direct and probe.takes_direct(at_open=True)
        try:
            speed = probe.speed(direct)
        except OSError as error:
            yield bad("disk-error", f"{probe.folder}: {error.strerror or error}", "Look at the kernel's log (dmesg).")
            return
        text = f"{probe.folder} reads {speed.read / 1e9:.2f} GB/s and writes {speed.write / 1e9:.2f} GB/s"
        how = " with O_DIRECT" if direct else " through the page cache, which may flatter it"
        if speed.read < VERY_SLOW:
            yield bad(
                "disk-slow",
                f"{text}{how}: recomputing is nearly always faster.",
                f"Choose a local NVMe drive: {_DIRECTORY}. KVBM loads from this one only if that is faster.",
            )
        elif speed.read < SLOW:
            yield note("disk-slow", f"{text}{how}.", "Only models with a slow prefill gain from this disk.")
        else:
            yield good("disk-speed", f"{text}{how}.")


def _existing(folder: Path) -> Path:
    """The folder, or its closest parent that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _held(folder: Path) -> int:
    """Bytes of this user's caches there, in use or not."""
    found = 0
    for slab in slabs_in(folder):
        with contextlib.suppress(OSError):
            found += slab.stat().st_blocks * 512
    return found


def _filesystem(path: Path) -> str:
    """The type of the filesystem, from the longest mount point above the path."""
    best, kind = Path("/"), ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, name, *_ = line.split()
        mount = Path(point.replace("\\040", " "))
        if path.resolve().is_relative_to(mount) and mount.is_relative_to(best):
            best, kind = mount, name
    return kind


class Speed(NamedTuple):
    read: float
    write: float


class _Probe:
    """A temporary file in the folder, which :meth:`close` removes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fd, name = tempfile.mkstemp(prefix=".kvbm-doctor-", dir=folder)
        self._path = Path(name)

    def close(self) -> None:
        os.close(self._fd)
        self._path.unlink()

    def fallocates(self) -> bool:
        # Not posix_fallocate: without support of the filesystem the C library writes zeros and reports success.
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        if libc.fallocate(self._fd, 0, 0, 1 << 20) == 0:
            return True
        return ctypes.get_errno() not in (errno.EOPNOTSUPP, errno.ENOSYS)

    def takes_direct(self, at_open: bool) -> bool:
        """Whether a write with O_DIRECT works: some filesystems ignore the flag, or refuse the write."""
        import fcntl

        fd = -1
        try:
            fd = os.open(self._path, os.O_RDWR | (os.O_DIRECT if at_open else 0))
            if not at_open:
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
            if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                return False
            with mmap.mmap(-1, 4096) as page:
                return os.pwritev(fd, [page], 0) == 4096
        except OSError:
            return False
        finally:
            if fd >= 0:
                os.close(fd)

    def speed(self, direct: bool) -> Speed:
        """The speed with several threads, as in the disk tier, in about two seconds for each direction at most."""
        fd = os.open(self._path, os.O_RDWR | (os.O_DIRECT if direct else 0))
        try:
            pieces = range(min(PROBE, shutil.disk_usage(self.folder).free // 4) // PIECE)
            written = self._run(pieces, lambda i, page: os.pwritev(fd, [page], i * PIECE), fd)
            if not direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            read = self._run(range(written.pieces), lambda i, page: os.preadv(fd, [page], i * PIECE), None)
        finally:
            os.close(fd)
        return Speed(read.rate, written.rate)

    def _run(self, pieces: range, move: Callable[[int, mmap.mmap], int], sync: int | None) -> _Rate:
        began = time.perf_counter()
        deadline = began + PROBE_SECONDS

        def work(first: int) -> int:
            done = 0
            with mmap.mmap(-1, PIECE) as page:
                for i in range(first, len(pieces), THREADS):
                    if time.perf_counter() > deadline:
                        break
                    move(i, page)
                    done += 1
            return done

        with ThreadPoolExecutor(THREADS) as pool:
            done = sum(pool.map(work, range(THREADS)))
        if sync is not None:
            os.fdatasync(sync)
        return _Rate(done, done * PIECE / (time.perf_counter() - began))


class _Rate(NamedTuple):
    pieces: int
    rate: float  # bytes a second
