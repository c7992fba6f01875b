"""Fixtures that run scenarios in a real vLLM on the CPU, with KVBM and without."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import PROJECT, Driver, Outcome


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = Driver(tmp_path_factory.mktemp("driver") / "driver.log")
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def model() -> str:
    """A random Qwen3 whose tokens depend on its KV; made on first use."""
    command = [sys.executable, str(PROJECT / "scripts" / "models.py"), "tiny"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if made.returncode:
        pytest.fail(f"{' '.join(command)} failed:\n{made.stderr}")
    return made.stdout.strip()


@pytest.fixture
def run_scenario(driver: Driver, model: str, tmp_path: Path):
    """Runs steps in an engine of their own: ``run_scenario(steps, kvbm={...}, engine={...}, env={...})``."""

    def run(
        steps: list[dict],
        kvbm: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        timeout: float = 120,
    ) -> Outcome:
        scenario = {"engine": {"model": model, **(engine or {})}, "kvbm": kvbm, "env": env or {}, "steps": steps}
        return driver.run(scenario, tmp_path, timeout)

    return run


@pytest.fixture(scope="session")
def baseline(driver: Driver, model: str, tmp_path_factory: pytest.TempPathFactory):
    """Tokens of vLLM without KVBM: ``baseline(prompts, max_tokens, engine)``. Each set of questions is asked once."""
    known: dict[str, list[list[int]]] = {}

    def ask(prompts: list[list[int]], max_tokens: int = 16, engine: dict[str, Any] | None = None, **options: Any):
        question = json.dumps([prompts, max_tokens, engine, options], sort_keys=True)
        if question not in known:
            env = options.pop("env", {})
            steps = [{"do": "generate", "prompts": prompts, "max_tokens": max_tokens, **options}]
            scenario = {"engine": {"model": model, **(engine or {})}, "kvbm": None, "env": env, "steps": steps}
            outcome = driver.run(scenario, tmp_path_factory.mktemp("baseline"), 120)
            assert outcome.refused is None, outcome.refused
            known[question] = [samples[0] for samples in outcome.steps[0]["tokens"]]
        return known[question]

    return ask
