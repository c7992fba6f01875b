"""Fixtures of the tests that run Dynamo; `make test-dynamo`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack import ANSWER, HOW, PROJECT, Servers, Stack, no_servers, prompt


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.dynamo)
            item.add_marker(pytest.mark.timeout(1500))


@pytest.fixture(scope="session")
def dynamo() -> None:
    """Dynamo, its vLLM and NIXL are installed."""
    for module, package in (("dynamo.vllm", "ai-dynamo"), ("vllm", "vllm"), ("nixl", "nixl")):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{package} is not installed for this Python; {HOW}")


@pytest.fixture(scope="session")
def model(dynamo: None) -> str:
    made = subprocess.run(
        [sys.executable, str(PROJECT / "scripts" / "models.py"), "tiny"], capture_output=True, text=True, timeout=600
    )
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("servers"))
    yield made
    made.close()


@pytest.fixture
def without_servers(tmp_path: Path) -> dict[str, str]:
    return no_servers(tmp_path)


@pytest.fixture
def patient_servers(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Where four engines share two cores one of them may have no turn for longer than a lease lasts, or an entry in a
    file, which never comes back."""
    made = Servers(tmp_path)
    yield {**made.env, "ETCD_LEASE_TTL": "300"}
    made.close()


@pytest.fixture(scope="session")
def aggregated(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Prompt -> what `agg_kvbm.sh` answers, one worker that does everything: the measure for all others."""
    folder = tmp_path_factory.mktemp("aggregated")
    stack = Stack("agg_kvbm.sh", 1, model, folder, no_servers(folder))
    try:
        stack.ready(1)
        return {text: stack.chat(text, ANSWER)[0] for text in map(prompt, range(1, 5))}
    finally:
        stack.close()
