"""Fails a test run that leaves something behind: a process, a shared memory segment or a temporary file.

The run gets a temporary directory of its own, which every process it starts inherits as TMPDIR, and a mark in the
environment by which its processes are known even when their parent is gone. Workers of pytest-xdist inherit the mark,
and get a directory each below that of the run. The process that starts them does the looking, when they have ended.
"""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import shutil
import tempfile
import time
import uuid
from pathlib import Path

import pytest

MARK = "KVBM_TEST_RUN"
WORKER = "worker-"  # and its name: the temporary directory of a worker of pytest-xdist
PATIENCE_SECONDS = 10
SHARED_MEMORY = Path("/dev/shm")
BENCHMARK = "kvbm-bench-"  # the name of what a benchmark beside this run makes, and removes


class Watch:
    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="kvbm-tests-"))
        self.temporary = self.root / "tmp"
        self.temporary.mkdir()
        self.mark = f"{MARK}={uuid.uuid4()}"
        self.segments = _segments()
        self.found: list[str] = []
        self._before = {name: os.environ.get(name) for name in ("TMPDIR", MARK)}
        os.environ["TMPDIR"] = str(self.temporary)
        os.environ[MARK] = self.mark.partition("=")[2]
        tempfile.tempdir = None

    def end(self) -> None:
        # What has just been told to end may take a moment, and so may a segment that another program is making.
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (self._processes() or self._new_segments()) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.found += [f"process {pid}: {command}" for pid, command in self._processes().items()]
        self.found += [f"shared memory {SHARED_MEMORY / name}" for name in self._new_segments()]
        workers = sorted(self.temporary.glob(f"{WORKER}*"))
        for folder in (self.temporary, *workers):
            self._clear_meeting_place(folder / f"kvbm-{os.geteuid()}")
            left = (path for path in sorted(folder.iterdir()) if path not in workers and not _is_foreign(path))
            self.found += [f"temporary file {path}" for path in left]
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        tempfile.tempdir = None
        shutil.rmtree(self.root, ignore_errors=True)

    def _clear_meeting_place(self, path: Path) -> None:
        """Of leaders and workers. It stays, so that nobody else can make one of its name, and so do the sockets of
        leaders that were killed, until the next one of their name comes."""
        names = {entry.name.removesuffix(".lock") for entry in path.iterdir()} if path.is_dir() else set()
        if all(name.startswith("leader-") for name in names):
            shutil.rmtree(path, ignore_errors=True)

    def _processes(self) -> dict[int, str]:
        """Live processes of this run: those that carry its mark, and children forked without a new program."""
        helpers = {
            os.getpid(),
            # They serve the interpreter and end with it.
            getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None),
            getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None),
        }
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            # A process may end, or belong to somebody else, while we look.
            with contextlib.suppress(OSError, ValueError):
                pid = int(process.name)
                state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
                marked = self.mark.encode() in (process / "environ").read_bytes()
                if (marked or int(parent) == os.getpid()) and pid not in helpers and state not in "ZX":
                    found[pid] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
        return found

    def _new_segments(self) -> list[str]:
        """KVBM's segments that have appeared since the start, without those that a process outside of this run maps
        right now. Others are left alone: a semaphore that a vLLM beside this run is about to open looks unused."""
        ours = (name for name in _segments() - self.segments if "kvbm" in name and not name.startswith(BENCHMARK))
        new = {name for name in ours if not _is_foreign(SHARED_MEMORY / name)}
        if not new:
            return []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() not in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                    maps = (process / "maps").read_text(errors="replace")
                    new = {name for name in new if f"{SHARED_MEMORY / name}" not in maps}
        return sorted(new)


def _is_foreign(path: Path) -> bool:
    """Whether vLLM and torch leave such a file behind without KVBM as well, on a busy machine at least, where vLLM
    kills workers that are slow to end. It goes with the run's directory."""
    return path.is_socket() or path.name.startswith(("torchinductor_", "vllm_dist_"))


def _segments() -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHARED_MEMORY):
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    found.add(entry.name)
    return found


_watch = pytest.StashKey[Watch]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        folder = Path(os.environ["TMPDIR"]) / f"{WORKER}{config.workerinput['workerid']}"
        folder.mkdir()
        os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = None
        return
    watch = config.stash[_watch] = Watch()
    if config.option.basetemp is None:
        config.option.basetemp = str(watch.root / "cases")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    watch = session.config.stash.get(_watch, None)
    if watch is None:
        return
    watch.end()
    if watch.found:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    watch = config.stash.get(_watch, None)
    if watch is not None and watch.found:
        terminalreporter.section("left behind", red=True)
        for line in watch.found:
            terminalreporter.line(line)
