"""Tests on a CUDA device; see devices.py. What they measure is printed at the end of the run."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = (TESTS / "engines/vllm", TESTS / "engines/trtllm", TESTS / "gpu", TESTS.parent / "scripts")
sys.path[:0] = map(str, FOLDERS)

from devices import DEVICE, ON_CUDA, why_not  # noqa: E402
from engines import Driver, Outcome  # noqa: E402
from random_models import Dense, Latent, model_folder  # noqa: E402

DTYPE = "bfloat16" if ON_CUDA else "float32"
MODELS = {
    "dense": Dense("dense", 4, 256, 4, 2, 128, 512, 4096, DTYPE, 0),
    "deep": Dense("deep", 36 if ON_CUDA else 4, 1024, 8, 8, 128, 1024, 4096, DTYPE, 0),
    "mla": Latent("mla", 3, 256, 16, 512, 4096, DTYPE),
}

_figures: list[str] = []


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    return "cuda:0" if ON_CUDA else "cpu"


@pytest.fixture(scope="session")
def stream(device: str) -> contextlib.AbstractContextManager:
    """Engines do not compute on the default stream, and neither do tests."""
    if not ON_CUDA:
        return contextlib.nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.Stream())


@pytest.fixture(scope="session")
def figure(device: str) -> Callable[[str], None]:
    """Notes a measurement for the end of the run."""
    return _figures.append


def pytest_exception_interact(report: pytest.TestReport) -> None:
    """At once and not at the end: whoever has a GPU for minutes only wants to know now."""
    print(f"\n{report.longreprtext[-6000:]}", file=sys.__stderr__, flush=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        terminalreporter.section("measured")
        for line in _figures:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def models(device: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of one of MODELS."""
    under = tmp_path_factory.mktemp("models")
    return lambda name: str(model_folder(MODELS[name], under))


@pytest.fixture(scope="session")
def driver(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = Driver(
        tmp_path_factory.mktemp("driver") / "driver.log", {"KVBM_TEST_DEVICE": DEVICE, "PYTHONHASHSEED": "0"}
    )
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def run_engine(
    driver: Driver, models: Callable[[str], str], figure: Callable[[str], None], tmp_path_factory: Any
) -> Callable[..., Outcome]:
    """Runs steps in an engine of their own, with KVBM: ``run_engine(name, model, steps, engine, env)``.

    One that hangs is killed after ``timeout`` seconds, and whoever asked for it fails.
    """

    def run(
        name: str,
        model: str,
        steps: list[dict],
        engine: dict,
        env: dict | None = None,
        timeout: float = 200,
        kvbm: dict | None = None,
    ) -> Outcome:
        _wait_for_memory()
        scenario = {
            "engine": {
                "model": models(model), "dtype": DTYPE, "skip_tokenizer_init": True, "gpu_memory_utilization": 0.3,
                "max_num_seqs": 16, "max_num_batched_tokens": 2048, **engine,
            },
            "kvbm": {"cpu_cache_override_num_blocks": 1000, "load": "always", **(kvbm or {})},
            "env": env or {},
            "steps": steps,
        }  # fmt: skip
        began = time.monotonic()
        outcome = driver.run(scenario, tmp_path_factory.mktemp(name), timeout)
        figure(f"engine {name}: {time.monotonic() - began:.0f} s")
        assert outcome.refused is None, outcome.refused
        return outcome

    return run


def _wait_for_memory(patience: float = 10) -> None:
    """The last engine's memory goes back some time after its end, and vLLM does not start while it does."""
    if not ON_CUDA:
        return
    import torch

    torch.cuda.empty_cache()
    free, deadline = -1, time.monotonic() + patience
    while (now := torch.cuda.mem_get_info()[0]) != free and time.monotonic() < deadline:
        free = now
        time.sleep(0.3)
