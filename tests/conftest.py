"""For all tests: the run fails when it leaves something behind, and tests get temporary folders of their own."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import settings

import observed
from kvbm.observe.server import Server
from leftovers import pytest_configure, pytest_sessionfinish, pytest_terminal_summary
from processes import Process

# What these tests import comes with the extra of the same name; `make test-observe` installs it.
collect_ignore = [] if importlib.util.find_spec("playwright") else ["observe_live"]

# A busy machine stops a test for longer than Hypothesis's deadline of 200 ms.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# Tests make directories for caches, and a cache is refused below one that a group can write to.
os.umask(0o022)

__all__ = ["pytest_configure", "pytest_sessionfinish", "pytest_terminal_summary"]


def pytest_collection_finish() -> None:
    """Collecting has imported torch and vLLM: a million objects that every garbage collection would walk over."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries complain at the end of the interpreter about objects that are left


@pytest.fixture
def benchmark_script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Loads one of the scripts in benchmarks/, by its name."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Calls that the rules ``disk-slow-read`` and ``disk-slow-write`` strike wait for the event ``over``, however many
    seconds a rule says, and set ``begun``. Name this fixture after those that open a disk: it ends before them."""
    begun, over = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        begun.set()
        over.wait()

    monkeypatch.setattr("kvbm.testing.disk_faults.time", SimpleNamespace(sleep=sleep))
    yield SimpleNamespace(begun=begun, over=over)
    over.set()


@pytest.fixture
def source() -> observed.FixedSource:
    """Snapshots of a leader that does not change unless the test says so."""
    return observed.FixedSource()


@pytest.fixture
def server(source: observed.FixedSource) -> Iterator[Server]:
    """A metrics port over ``source``, answered by its own process."""
    server = Server(source, "127.0.0.1", 0)
    server.start()
    yield server
    server.close()


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator:
    """Starts programs; those that still run when the test is over are killed with all their children."""
    started: list[Process] = []

    def start(command: list[str], env: dict[str, str] | None = None) -> Process:
        process = Process(command, tmp_path / f"process-{len(started)}.log", env)
        started.append(process)
        return process

    yield start
    for process in started:
        process.end()


@pytest.fixture
def stranger():
    """Answers whatever it is asked with what is no HTTP, as a port of TLS does."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer():
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                with client:
                    client.recv(1000)
                    client.sendall(b"\x15\x03\x01\x00\x02\x02\x50\n")

    thread = threading.Thread(target=answer)
    thread.start()
    yield f"127.0.0.1:{listening.getsockname()[1]}"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()
