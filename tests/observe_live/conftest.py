"""Fixtures of `make test-observe`: real tools, and a real vLLM with two ranks that is being looked at."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from processes import Process
from servers import Server, free_port, start_server

PROJECT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = Path("/dev/shm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.observe)
    # These count by hand what the engine that all share has done, from its first request on.
    items.sort(key=lambda item: item.path != here / "test_prometheus.py")


@pytest.fixture(scope="session")
def tools() -> dict[str, Any]:
    command = [sys.executable, str(PROJECT / "scripts" / "observe_tools.py")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.fixture(scope="session")
def model() -> str:
    command = [sys.executable, str(PROJECT / "scripts" / "models.py"), "tiny"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """As ``start_process``, for as long as the session lasts."""
    folder = tmp_path_factory.mktemp("processes")
    started: list[Process] = []

    def start(command: list[str], env: dict[str, str] | None = None) -> Process:
        started.append(Process(command, folder / f"{len(started)}.log", env))
        return started[-1]

    before = set(SHARED_MEMORY.glob("vllm_dist_*"))
    yield start
    for process in reversed(started):
        process.popen.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.end()
    # vLLM's own, for ranks on a CPU; it leaves them when it is ended while it is busy.
    for segment in set(SHARED_MEMORY.glob("vllm_dist_*")) - before:
        segment.unlink()


class Watched(Server):
    """A server and its metrics port."""

    def __init__(self, server: Server, port: int) -> None:
        super().__init__(server.process, 0)
        self.url = server.url
        self.port = port
        self.metrics_url = f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def watched(start, model: str, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """vLLM with two ranks, a cache of 40 blocks of its own, 512 in host memory and 1,024 on disk."""
    port = free_port()
    environment = {
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "512",
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": "1024",
        "DYN_KVBM_DISK_CACHE_DIR": str(tmp_path_factory.mktemp("disk")),
        "DYN_KVBM_METRICS": "1",
        "DYN_KVBM_METRICS_PORT": str(port),
        "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS": "1",
        "KVBM_LOAD": "always",  # the model is so small that computing is often faster
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    }
    options = ["--tensor-parallel-size", "2", "--num-gpu-blocks-override", "40"]
    return Watched(start_server(start, model, environment, options=options), port)


def prompt(seed: int, tokens: int) -> list[int]:
    """Tokens that no other seed shares."""
    source = random.Random(seed)
    return [source.randrange(100, 49_000) for _ in range(tokens)]
