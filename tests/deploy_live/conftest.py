"""Fixtures of `make test-deploy`: helm, and a resolver of packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.deploy)


@pytest.fixture(scope="session")
def helm() -> str:
    command = [sys.executable, str(PROJECT / "scripts" / "helm_tool.py")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()
