"""Fixtures that run scenarios in a real vLLM on the CPU, with KVBM and without."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from engines import IMPATIENT, PATIENT, PROJECT, SETTINGS, Driver, Outcome, generate, has_late_stores


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
def make_clockwork(model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Makes engines that are stepped by hand: ``make_clockwork(kvbm={...}, heir=True, **options)``.

    ``heir``: what its cache holds may be from requests of the engines before it.
    """
    pytest.importorskip("vllm")
    from clockwork import Clockwork  # imports vLLM, which takes seconds

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    made: list[Clockwork] = []

    def set_seconds(places: dict[str, float]) -> None:
        for place, value in places.items():
            monkeypatch.setattr(place.replace(":", "."), value)

    set_seconds(PATIENT)

    def make(kvbm: dict[str, Any] | None = None, heir: bool = False, **options: Any) -> Clockwork:
        kvbm = {**SETTINGS, **(kvbm or {})}
        if has_late_stores(kvbm):
            set_seconds(IMPATIENT)
        engine = Clockwork(model, kvbm, **options)
        if heir and made:
            engine._requests = made[-1]._requests
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def hold_stores(monkeypatch):
    """No store that is late ends within this context, unless a fence asks for it."""

    from kvbm.testing.copier_faults import _Late

    @contextmanager
    def hold():
        with monkeypatch.context() as holding:
            holding.setattr(_Late, "done", lambda store: False)
            yield

    return hold


@pytest.fixture(scope="session")
def run_scenario(driver: Driver, model: str, tmp_path_factory: pytest.TempPathFactory):
    """Runs steps in an engine of their own: ``run_scenario(steps, kvbm={...}, engine={...}, env={...})``.

    ``kvbm=None`` is vLLM without KVBM; ``refused`` says that the engine is not to start; ``spawn`` lets vLLM start its
    ranks and connect them as a server does (see driver.py). KVBM loads every hit, unless ``kvbm`` says otherwise: the
    model is so small that computing a block is often faster than loading it.
    """

    def run(
        steps: list[dict],
        kvbm: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        patch: dict[str, Any] | None = None,
        swap: list[str] | None = None,
        refused: bool = False,
        spawn: bool = False,
        timeout: float = 300,
    ) -> Outcome:
        if kvbm is not None:
            kvbm = {**SETTINGS, **kvbm}
            patch = {**PATIENT, **(IMPATIENT if has_late_stores(kvbm) else {}), **(patch or {})}
        scenario = {"engine": {"model": model, **(engine or {})}, "kvbm": kvbm, "env": env or {}, "steps": steps}
        scenario |= {"patch": patch or {}, "swap": swap, "spawn": spawn}
        outcome = driver.run(scenario, tmp_path_factory.mktemp("engine"), timeout)
        assert (outcome.refused is not None) is refused, outcome.refused
        return outcome

    return run


@pytest.fixture(scope="session")
def baseline(run_scenario):
    """Tokens of vLLM without KVBM: ``baseline(prompts, max_tokens, engine)``. Every question is asked once.

    One prompt at a time, so that nothing but the prompt decides.
    """
    known: dict[str, list[list[int]]] = {}

    def ask(
        prompts: list[list[int]],
        max_tokens: int = 16,
        engine: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> list[list[int]]:
        question = json.dumps([prompts, max_tokens, engine, options], sort_keys=True)
        if question not in known:
            steps = [generate(t, name=str(i), max_tokens=max_tokens, **options) for i, t in enumerate(prompts)]
            outcome = run_scenario(steps, None, engine, env)
            known[question] = [outcome.tokens(str(i))[0] for i in range(len(prompts))]
        return known[question]

    return ask
