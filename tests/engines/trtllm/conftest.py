"""For the tests of engines that are simulated or driven class by class."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from trtllm_sim.launch import end_fork_server


@pytest.fixture(scope="session", autouse=True)
def _end_fork_server() -> Iterator[None]:
    yield
    end_fork_server()
