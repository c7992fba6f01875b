"""Checks of the host tier's memory: its size, and the time to fault it in."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from kvbm.config import Config
from kvbm.doctor.base import Examination
from kvbm.observe.findings import bad, good, note
from kvbm.observe.format import gigabytes, seconds, size
from kvbm.observe.snapshot import Finding
from kvbm.tiers.directory import open_trusted
from kvbm.tiers.disk.inspect import slabs_in
from kvbm.tiers.host.slab import available_memory
from kvbm.tiers.lock import is_locked

PROBE = 256 << 20
OVERCOMMIT, MEMINFO = Path("/proc/sys/vm/overcommit_memory"), Path("/proc/meminfo")
STATUS, NODES = Path("/proc/self/status"), Path("/sys/devices/system/node")
READY_VARIABLE, READY_DEFAULT = "VLLM_ENGINE_READY_TIMEOUT_S", 600.0


class HostMemory:
    name = "memory"

    def run(self, case: Examination) -> Iterator[Finding]:
        config = case.config
        taken = case.host_tier_bytes
        if config is None or not config.has_host_tier:
            if taken:
                left = size(available_memory())
                yield good("memory", f"The running engine's host tier takes {size(taken)}; {left} are available.")
            return
        if config.cpu_cache_override_num_blocks:
            unused = f"; DYN_KVBM_CPU_CACHE_GB={config.cpu_cache_gb:g} has no effect" if config.cpu_cache_gb else ""
            yield note(
                "memory-unknown",
                f"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS={config.cpu_cache_override_num_blocks} sets the size in "
                f"blocks{unused}. Its size in memory depends on the model.",
                "If it does not fit, the engine refuses to start and reports the size that fits.",
            )
            return
        wanted, available, kept = config.cpu_cache_gb * 1e9, available_memory(), kept_bytes(config.host_persist_dir)
        if kept:
            yield note(
                "memory-kept",
                f"Host tiers of engines that have ended hold {size(kept)} of memory at {config.host_persist_dir}.",
                "An engine with the same model takes it over. `kvbm cache ls` shows it, `kvbm cache clear` frees it.",
            )
        if config.host_persist:
            available += kept
            yield from self._room_to_keep(config, wanted, kept)
        fits = 0.95 * available
        asked = f"DYN_KVBM_CPU_CACHE_GB={config.cpu_cache_gb:.15g} asks for {size(wanted)}"
        beside = f" beside the {size(taken)} of the running engine's host tier" if taken else ""
        if wanted > fits + taken:
            yield bad(
                "host-memory-short",
                f"{asked}, and {size(available)} are available here{beside}.",
                f"Set it to at most {gigabytes(fits)}, or raise the container's memory limit."
                + (" The size is in GB, not in bytes." if wanted > 1e15 else ""),
            )
            return
        if wanted > fits:
            yield note(
                "memory-second",
                f"The running engine's host tier takes {size(taken)}. A second engine with this size would not fit: "
                f"{asked}, and {size(available)} are available.",
                f"For a second engine, set it to at most {gigabytes(fits)}.",
            )
            return
        if (promised := committable()) is not None and wanted > promised + taken:
            yield bad(
                "commit-limit",
                f"{asked}. This kernel does not overcommit (vm.overcommit_memory=2) and allows programs to ask for "
                f"{size(promised)} more, however much memory is free.",
                f"sysctl vm.overcommit_memory=0, or a higher vm.overcommit_ratio, or at most {gigabytes(promised)}.",
            )
            return
        if (near := node_memory()) is not None and wanted > near + taken:
            yield bad(
                "memory-node",
                f"{asked}, and the memory nodes that this shell may use (--cpuset-mems) have {size(near)} left.",
                f"Allow it all nodes, or set the size to at most {gigabytes(near)}.",
            )
            return
        second = f". A second engine would fit{beside}" if taken else ""
        yield good("memory", f"{size(wanted)} for the host tier, {size(available)} available{second}.")
        if _ready_seconds(case) is None:
            yield bad(
                "ready-timeout",
                f"{READY_VARIABLE}={case.environ[READY_VARIABLE]!r} is not a whole number of seconds above 0: vLLM "
                "refuses to start.",
                f"Correct or remove it; the default is {READY_DEFAULT:.0f}.",
            )
        if not case.quick and not taken:
            yield from self._start_time(case, wanted)

    def _room_to_keep(self, config: Config, wanted: float, kept: int) -> Iterator[Finding]:
        folder = config.host_persist_dir
        try:
            os.close(open_trusted(folder, "KVBM_HOST_PERSIST_DIR"))
            if os.statvfs(folder).f_flag & os.ST_RDONLY:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            room = shutil.disk_usage(folder).free + kept
        except OSError as error:
            yield bad(
                "memory-not-kept",
                f"KVBM_HOST_PERSIST_DIR={folder} cannot be used: {error.strerror}.",
                "Choose a filesystem in memory: /dev/shm.",
            )
            return
        if wanted > room:
            yield bad(
                "memory-not-kept",
                f"KVBM_HOST_PERSIST keeps {size(wanted)} at {folder}, which has room for {size(room)}: the host tier "
                "would not survive a restart.",
                f"Make it larger: mount -o remount,size={wanted / 1e9 + 1:.0f}G {folder}; in a container --shm-size.",
            )

    def _start_time(self, case: Examination, wanted: float) -> Iterator[Finding]:
        """The host tier is faulted in before the engine serves; vLLM gives up an engine that takes too long."""
        threads = min(16, len(os.sched_getaffinity(0)))
        takes = wanted / (fault_in_speed() * threads)
        limit = _ready_seconds(case) or READY_DEFAULT
        if takes > 0.8 * limit:
            yield bad(
                "start-too-slow",
                f"Faulting in {size(wanted)} of memory takes about {seconds(takes)} on this machine, and vLLM gives "
                f"its engine {seconds(limit)} to start.",
                f"Set {READY_VARIABLE}={int(2 * takes) + 600}; for other engines "
                "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS.",
            )


def _ready_seconds(case: Examination) -> float | None:
    """How long vLLM waits for its engine; None if the variable has another value than a number of seconds."""
    text = case.environ.get(READY_VARIABLE, f"{READY_DEFAULT:.0f}").strip()
    return float(text) if text.isdecimal() and int(text) else None


def committable() -> int | None:
    """Bytes that programs may still ask the kernel for; None where it has no such limit."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        if OVERCOMMIT.read_text().strip() == "2":
            rows = (line.split() for line in MEMINFO.read_text().splitlines())
            fields = {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}
            return max(0, fields["CommitLimit"] - fields["Committed_AS"])
    return None


def node_memory() -> int | None:
    """Bytes left on the memory nodes that this process may use; None if it may use all."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        allowed = re.search(r"^Mems_allowed_list:\s*(\S+)$", STATUS.read_text(), re.M)
        spans = [each.partition("-") for each in allowed[1].split(",")] if allowed else []
        numbers = {each for first, _, last in spans for each in range(int(first), int(last or first) + 1)}
        nodes = {int(node.name[4:]): node for node in NODES.glob("node[0-9]*")}
        if numbers and nodes.keys() - numbers:
            text = "".join((nodes[each] / "meminfo").read_text() for each in numbers & nodes.keys())
            return 1024 * sum(map(int, re.findall(r" (?:MemFree|FilePages):\s*(\d+) kB", text)))
    return None


def kept_bytes(folder: Path) -> int:
    """The memory of this user's host tiers that have survived their engines."""
    found = 0
    for slab in slabs_in(folder):
        with contextlib.suppress(OSError):
            found += 0 if is_locked(slab) else slab.stat().st_blocks * 512
    return found


def fault_in_speed() -> float:
    """Bytes a second that one thread faults in."""
    with mmap.mmap(-1, PROBE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            area.madvise(mmap.MADV_HUGEPAGE)
        buffer = (ctypes.c_uint8 * PROBE).from_buffer(area)
        began = time.perf_counter()
        ctypes.memset(ctypes.addressof(buffer), 0, PROBE)
        took = time.perf_counter() - began
        del buffer
    return PROBE / took
