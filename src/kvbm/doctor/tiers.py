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
from kvbm.doctor.base import Examination
from kvbm.doctor.gpu import gpus
from kvbm.observe.findings import bad, good, note
from kvbm.observe.format import gigabytes, size
from kvbm.observe.snapshot import Finding
from kvbm.tiers.directory import CacheRefused, open_trusted
from kvbm.tiers.disk import gds
from kvbm.tiers.disk.inspect import slabs_in
from kvbm.tiers.lock import is_locked

THREADS = 4
PIECE = 4 << 20
PROBE = 256 << 20
PROBE_SECONDS = 2.0
SLOW, VERY_SLOW = 1e9, 0.2e9  # bytes a second read
_DIRECTORY = "DYN_KVBM_DISK_CACHE_DIR"
_ELSEWHERE = f"Choose another directory: export {_DIRECTORY}=/mnt/nvme/kvbm"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_A_DISK = {
    "overlay": "a container's own layer", "tmpfs": "memory", "ramfs": "memory",
    "cifs": "on another machine", "smb3": "on another machine", "9p": "on another machine",
}  # fmt: skip
_NOT_IN_PATHS = {
    "$": "a $: the shell or the service manager has not replaced a variable", ":/": '":/"',
    '"': 'a ": `docker --env-file` passes quotes on', "'": "a ': `docker --env-file` passes quotes on",
}  # fmt: skip
_EMPTIED = (Path("/tmp"), Path("/var/tmp"))  # by systemd-tmpfiles, or at boot
_MIN_PROBE = 4 * PIECE  # a shorter measurement says nothing


class Disk:
    name = "disk"

    def run(self, case: Examination) -> Iterator[Finding]:
        config = case.config
        if config is None or not config.has_disk_tier:
            return
        folder = config.disk_cache_dir
        if case.snapshot is not None and any(tier.tier == "disk" for tier in case.snapshot.tiers):
            yield good("disk", "The running engine has its disk tier.")
            return
        try:
            where = _existing(folder)
        except OSError as error:
            yield bad("disk-not-writable", f"{_DIRECTORY}={folder}: {error.strerror}.", _ELSEWHERE)
            return
        if not where.is_dir():
            yield bad("disk-not-writable", f"{_DIRECTORY}={folder}: {where} is not a directory.", _ELSEWHERE)
            return
        is_missing = where != Path(os.path.realpath(folder))
        what = f"{_DIRECTORY}={folder} " + (f"does not exist, and {where} " if is_missing else "")
        if os.statvfs(where).f_flag & os.ST_RDONLY:
            yield bad(
                "disk-read-only",
                f"{what}is on a filesystem that is mounted read-only ({mount_of(where)[0]}).",
                f"Mount it writable, or choose another directory: export {_DIRECTORY}=/mnt/nvme/kvbm",
            )
            return
        if not os.access(where, os.W_OK | os.X_OK):
            yield bad(
                "disk-not-writable",
                f"{what}is not writable for this user" + (": the engine cannot create it." if is_missing else "."),
                ("See `lsattr -d` for an immutable directory" if os.geteuid() == 0 else "Change its owner")
                + f", or choose another directory: export {_DIRECTORY}=/mnt/nvme/kvbm",
            )
            return
        if is_missing:
            yield from _will_be_made(folder, where)
        try:
            os.close(open_trusted(where))
        except CacheRefused as error:
            # No probe file either: other users could replace it with a link.
            yield bad(
                "disk-not-private",
                f"{_DIRECTORY}={folder}: {error.strerror}.",
                "Until then, the engine refuses to start.",
            )
            return
        except OSError as error:
            yield bad(
                "disk-not-writable",
                f"{_DIRECTORY}={folder} cannot be opened ({error.strerror}).",
                _ELSEWHERE,
            )
            return
        yield from self._room(config, where)
        if gpus():
            yield note("gpudirect-storage", f"{gds.statement()}.")
        try:
            with _Probe(where) as probe:
                yield from self._features(config, probe)
                if not case.quick:
                    yield from self._speed(config, probe)
        except OSError as error:
            if error.errno not in _FULL:
                text = f"{_DIRECTORY}={folder}: cannot create a file there ({error.strerror})."
                yield bad("disk-not-writable", text, _ELSEWHERE)
                return
            # A full filesystem refuses every write: that says nothing about its features and its speed.
            what = "has no free inodes" if not os.statvfs(where).f_favail else "is full"
            yield bad(
                "disk-full",
                f"The filesystem of {where} {what} ({error.strerror}). Nothing else was tested on it.",
                f"Make room, or choose another {_DIRECTORY}. `kvbm cache ls` shows caches that can go.",
            )

    def _room(self, config: Config, where: Path) -> Iterator[Finding]:
        kind = mount_of(where)[1]
        if what := _NOT_A_DISK.get(kind, "on another machine" if kind.startswith(("fuse.", "nfs")) else ""):
            yield note(
                "disk-not-a-disk",
                f"{where} is on {kind}, which is {what}.",
                f"Mount a local NVMe drive and set {_DIRECTORY} to a directory on it.",
            )
        if any(where.is_relative_to(each) and mount_of(each)[0] == mount_of(where)[0] for each in _EMPTIED):
            yield note(
                "disk-in-tmp",
                f"{where} is a directory for temporary files: many systems empty it at boot, or remove files that have "
                "not been read for days. The cache would be lost.",
                f"Choose another directory: export {_DIRECTORY}=/mnt/nvme/kvbm",
            )
        if config.disk_cache_override_num_blocks:
            return
        held, in_use = _held(config.disk_cache_dir)
        if in_use:
            yield note(
                "disk-in-use",
                f"An engine that runs now uses {size(in_use)} at {config.disk_cache_dir}. A second engine with the "
                "same model would run without a disk tier.",
                f"Give every engine a {_DIRECTORY} of its own.",
            )
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
            most = f"Set it to at most {gigabytes(free)}, make room" if free >= 1e6 else "Make room"
            yield bad(
                "disk-space-short",
                f"DYN_KVBM_DISK_CACHE_GB={config.disk_cache_gb:g} asks for {size(wanted)}, and {where} has only "
                f"{size(free)} free" + (f" beside the {size(in_use)} of a running engine." if in_use else "."),
                f"{most}, or choose another {_DIRECTORY}.",
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
            if error.errno in _FULL:
                raise
            yield bad("disk-error", f"{probe.folder}: {error.strerror or error}", "Look at the kernel's log (dmesg).")
            return
        if speed is None:
            yield note("disk-not-measured", f"{probe.folder} has too little room to measure its speed.")
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


def _will_be_made(folder: Path, where: Path) -> Iterator[Finding]:
    if what := next((what for part, what in _NOT_IN_PATHS.items() if part in str(folder)), ""):
        yield bad(
            "disk-dir-not-a-path",
            f"{_DIRECTORY}={folder} contains {what}.",
            "It takes one path, without quotes and variables, and no URL. For S3, set DYN_KVBM_OBJECT_BUCKET.",
        )
        return
    mount, kind = mount_of(where)
    real = os.path.realpath(folder)
    means = f", which is {real}," if real != str(folder) else ""
    relative = "The path is relative to the directory that the engine starts in. " if not folder.is_absolute() else ""
    yield note(
        "disk-dir-missing",
        f"{_DIRECTORY}={folder}{means} does not exist. The engine creates it in {where}, on the filesystem of {mount} "
        f"({kind}).",
        f"{relative}If a drive belongs there, mount it first.",
    )


def _existing(folder: Path) -> Path:
    """The folder that the path leads to, or its closest parent that exists. Raises OSError where it can never exist."""
    folder = Path(os.path.realpath(folder))
    while True:
        try:
            os.stat(folder)
            return folder
        except (FileNotFoundError, NotADirectoryError):
            folder = folder.parent


def _held(folder: Path) -> tuple[int, int]:
    """Bytes of this user's caches there: (not in use, in use by an engine)."""
    found = [0, 0]
    for slab in slabs_in(folder):
        with contextlib.suppress(OSError):
            found[is_locked(slab)] += slab.stat().st_blocks * 512
    return found[0], found[1]


def mount_of(path: Path) -> tuple[Path, str]:
    """(the mount point that the path is on, the type of its filesystem)"""
    best, kind = Path("/"), ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, name, *_ = line.split()
        mount = Path(point.replace("\\040", " "))
        if path.resolve().is_relative_to(mount) and mount.is_relative_to(best):
            best, kind = mount, name
    return best, kind


class Speed(NamedTuple):
    read: float
    write: float


class _Probe:
    """A temporary file in the folder, removed at the end. A full filesystem raises OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fd, name = tempfile.mkstemp(prefix=".kvbm-doctor-", dir=folder)
        self._path = Path(name)

    def __enter__(self) -> _Probe:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        self._path.unlink()

    def fallocates(self) -> bool:
        # Not posix_fallocate: without support of the filesystem the C library writes zeros and reports success.
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        if libc.fallocate(self._fd, 0, 0, 1 << 20) == 0:
            return True
        error = ctypes.get_errno()
        if error in _FULL:
            raise OSError(error, os.strerror(error))
        return error not in (errno.EOPNOTSUPP, errno.ENOSYS)

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
        except OSError as error:
            if error.errno in _FULL:
                raise
            return False
        finally:
            if fd >= 0:
                os.close(fd)

    def speed(self, direct: bool) -> Speed | None:
        """The speed with several threads, as in the disk tier, in about two seconds for each direction at most. None
        without room for a measurement."""
        room = min(PROBE, shutil.disk_usage(self.folder).free // 4)
        if room < _MIN_PROBE:
            return None
        fd = os.open(self._path, os.O_RDWR | (os.O_DIRECT if direct else 0))
        try:
            pieces = range(room // PIECE)
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
