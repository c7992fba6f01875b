"""Checks of the limits of processes that this shell starts, and of directories beside the tiers'."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from kvbm.doctor.base import Examination, bad, note
from kvbm.doctor.tiers import mount_of
from kvbm.observe.format import size
from kvbm.observe.snapshot import Finding

MIN_OPEN_FILES = 1024
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


def _not_writable(folder: Path) -> str:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return f"lies below {folder}, which is not a directory"
    return "" if os.access(folder, os.W_OK | os.X_OK) else "is not writable for this user"
