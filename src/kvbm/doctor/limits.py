"""Checks of the limits of processes that this shell starts, and of directories beside the tiers'."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvbm.doctor.base import Examination, installed_version
from kvbm.doctor.tiers import mount_of
from kvbm.observe.findings import bad, note
from kvbm.observe.format import size
from kvbm.observe.snapshot import Finding

MIN_OPEN_FILES = 1024
MIN_PROCESSES = 1024
MIN_ADDRESS_SPACE = 1e12  # an engine maps more than it uses: torch and CUDA reserve ranges of hundreds of GB
MIN_SHARED_MEMORY = 1e9
MAX_SOCKET_PATH = 107  # bytes
SHARED_MEMORY = Path("/dev/shm")
PIDS_MAX = Path("/sys/fs/cgroup/pids.max")
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
MIN_CPUS = 2  # the engine's thread, and those that copy and write
_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")


class Limits:
    name = "limits"

    def run(self, case: Examination) -> Iterator[Finding]:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY and files < MIN_OPEN_FILES:
            yield bad(
                "open-files",
                f"This shell allows a process {files} open files; an engine and its cache need more.",
                f"ulimit -n 65536 (at least {MIN_OPEN_FILES}), or --ulimit nofile=65536 for a container.",
            )
        yield from _processes()
        yield from _cpus()
        space, _ = resource.getrlimit(resource.RLIMIT_AS)
        if space != resource.RLIM_INFINITY and space < MIN_ADDRESS_SPACE:
            yield bad(
                "address-space-limit",
                f"This shell limits a process to {size(space)} of address space (ulimit -v); an engine maps far more "
                "than the memory it uses.",
                "ulimit -v unlimited where the engine is started.",
            )
        shared = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0
        if shared < MIN_SHARED_MEMORY:
            yield note(
                "shared-memory-small",
                f"{SHARED_MEMORY} has {size(shared)}: processes of an engine with several GPUs exchange data there.",
                "docker run --shm-size=8g or --ipc=host; in Kubernetes a volume emptyDir with medium Memory.",
            )
        yield from _temporary(case.environ.get("TMPDIR", ""))
        yield from _engine_cache(case.environ)
        config = case.config
        if config is None:
            return
        largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if config.has_disk_tier and largest != resource.RLIM_INFINITY and largest < config.disk_cache_gb * 1e9:
            yield bad(
                "file-size-limit",
                f"This shell limits a file to {size(largest)} (ulimit -f), and the disk tier has "
                f"{size(config.disk_cache_gb * 1e9)}.",
                "ulimit -f unlimited where the engine is started.",
            )
        if config.enable_record and (problem := _not_writable(config.record_dir)):
            yield bad(
                "record-dir",
                f"DYN_KVBM_ENABLE_RECORD is on, and KVBM_RECORD_DIR={config.record_dir} {problem}.",
                "Set KVBM_RECORD_DIR to a directory that the engine can write to.",
            )
        if config.host_persist and (kind := mount_of(config.host_persist_dir)[1]) not in _MEMORY:
            yield note(
                "persist-not-memory",
                f"KVBM_HOST_PERSIST_DIR={config.host_persist_dir} is on {kind}, which is not memory: the kernel would "
                "write the host tier to a disk.",
                "Set it to a filesystem in memory: /dev/shm.",
            )


def _processes() -> Iterator[Finding]:
    """The limits of this user and of the control group. The kernel does not apply the first to root."""
    limits = [] if os.geteuid() == 0 else [("ulimit -u", resource.getrlimit(resource.RLIMIT_NPROC)[0])]
    with contextlib.suppress(OSError, ValueError):
        limits.append(("the container's pids limit", int(PIDS_MAX.read_text())))
    for where, most in limits:
        if most != resource.RLIM_INFINITY and most < MIN_PROCESSES:
            yield bad(
                "process-limit",
                f"{where} allows {most} processes and threads; an engine and its cache need hundreds.",
                f"ulimit -u {16 * MIN_PROCESSES}, or --pids-limit {16 * MIN_PROCESSES} for a container.",
            )


def _cpus() -> Iterator[Finding]:
    limits = [("its CPU affinity (taskset, --cpuset-cpus)", float(len(os.sched_getaffinity(0))))]
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, CPU_MAX.read_text().split())  # "max" is none
        limits.append(("the container's CPU limit (--cpus)", quota / period))
    for where, cpus in limits:
        if cpus < MIN_CPUS:
            yield note(
                "cpu-limit",
                f"{where} leaves the engine {cpus:g} CPU: its own thread waits for those that copy and write blocks.",
                f"Give it at least {MIN_CPUS}, better 4 for each GPU.",
            )


def _temporary(folder: str) -> Iterator[Finding]:
    """Compilers of the engine use TMPDIR, and sockets between engines and their workers."""
    if not folder:
        return
    if not Path(folder).is_dir():
        yield bad("tmpdir", f"TMPDIR={folder} is not a directory.", "Create it, or unset TMPDIR.")
    elif problem := _not_writable(Path(folder)):
        yield bad("tmpdir", f"TMPDIR={folder} {problem}.", "Set TMPDIR to a directory of your own.")
    socket = f"{folder}/kvbm-{os.geteuid()}/leader-65535"
    if len(os.fsencode(socket)) > MAX_SOCKET_PATH:
        yield bad(
            "tmpdir",
            f"TMPDIR={folder} is too long: the path of a socket in it has more than {MAX_SOCKET_PATH} bytes.",
            "Set TMPDIR to a shorter path.",
        )


def _engine_cache(environ: Mapping[str, str]) -> Iterator[Finding]:
    """A container with a user of its own often has no home."""
    home = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME') or '/'}/.cache"
    folder = Path(environ.get("VLLM_CACHE_ROOT") or f"{home}/vllm")
    if installed_version("vllm") and (problem := _not_writable(folder)):
        yield note(
            "engine-cache",
            f"vLLM keeps compiled graphs in {folder}, which {problem}; models are downloaded beside it.",
            "Set HOME to a directory of the engine's user, or VLLM_CACHE_ROOT and HF_HOME.",
        )


def _not_writable(folder: Path) -> str:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return f"lies below {folder}, which is not a directory"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "is not writable for this user"
    return "" if shutil.disk_usage(folder).free >= 1 << 20 else "is on a full filesystem"
