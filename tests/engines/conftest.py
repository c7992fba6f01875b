"""For the tests of engines that are simulated or driven class by class."""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.util
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _end_fork_server() -> Iterator[None]:
    """The simulator's ranks are forked from a server that has torch loaded. It ends with the run, and so does its
    folder."""
    yield
    multiprocessing.forkserver._forkserver._stop()
    multiprocessing.util._run_finalizers(-100)
