"""Scenarios in a real vLLM, as the tests see them."""

from __future__ import annotations

import json
import os
import queue
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

from processes import end_group

PROJECT = Path(__file__).resolve().parents[3]
BLOCK = 32  # tokens; the CPU attention kernel takes multiples of 32 only
START_SECONDS = 180  # importing vLLM from a cold disk

# How long KVBM waits, for tests that count what has come: a machine that stops for some seconds must not change that.
# Tests of a deadline set it themselves.
PATIENT = {
    "kvbm.engines.vllm.adapters:ASK_SECONDS": 60.0,
    "kvbm.engines.vllm.deferral:LONGEST_PUT_OFF": 60.0,
    "kvbm.engines.vllm.deferral:PATIENCE_SECONDS": 60.0,
    "kvbm.engines.vllm.idle:MAX_MOVE_STALL_SECONDS": 60.0,
    "kvbm.runtime.flush:FLUSH_SECONDS": 60.0,
    "kvbm.tiers.bounded:DISK_END_SECONDS": 60.0,
    "kvbm.tiers.disk.index:_LAST_SECONDS": 60.0,
}
# Where stores are late on purpose, requests do not wait for them.
IMPATIENT = {
    "kvbm.engines.vllm.deferral:PATIENCE_SECONDS": 0.25,
    "kvbm.testing.copier_faults:STORE_DELAY_SECONDS": 0.25,
}
SETTINGS = {"load": "always", "disk_load_timeout_secs": 60}


def has_late_stores(kvbm: dict[str, Any]) -> bool:
    return "slow-store" in kvbm.get("inject_faults", "")


class EngineFailedError(AssertionError):
    """The engine's process died or hung; the message ends with the last lines it printed."""


class Outcome(NamedTuple):
    """What became of a scenario."""

    steps: dict[str, Any]  # what each named step returned
    log: list[tuple[str, str]]  # (level, message) of everything KVBM said in the scheduler's process
    refused: str | None  # why the engine did not start
    output: str  # everything the engine printed

    def __getitem__(self, name: str) -> Any:
        return self.steps[name]

    def tokens(self, name: str) -> list[list[int]]:
        """What a ``generate`` step gave for each of its prompts."""
        return [samples[0] for samples in self.steps[name]["tokens"]]

    def said(self, text: str) -> list[str]:
        """Everything KVBM logged that holds ``text``."""
        return [message for _, message in self.log if text in message]


class Driver:
    """The process that forks engines; see driver.py."""

    def __init__(self, log: Path, env: dict[str, str] | None = None) -> None:
        environment = {
            **os.environ,
            **(env or {}),
            "PYTHONPATH": f"{PROJECT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "TORCHINDUCTOR_CACHE_DIR": str(log.parent / "inductor"),
        }
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("driver.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                text=True,
                start_new_session=True,
            )
        self._log = log
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.version = self._hear(START_SECONDS)["ready"]
        except queue.Empty:
            self.close()
            raise EngineFailedError(f"vLLM could not be imported:\n{_tail(log)}") from None

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def _hear(self, timeout: float) -> dict[str, Any]:
        return json.loads(self._lines.get(timeout=timeout))

    def run(self, scenario: dict[str, Any], folder: Path, timeout: float) -> Outcome:
        log, result = folder / "engine.log", folder / "engine.json"
        names = [step.get("name") for step in scenario["steps"]]
        steps = [{key: value for key, value in step.items() if key != "name"} for step in scenario["steps"]]
        order = {**scenario, "steps": steps, "log": str(log), "result": str(result)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pid = self._hear(START_SECONDS)["pid"]
        try:
            status = self._hear(timeout)["status"]
        except queue.Empty:
            end_group(pid)
            self._hear(START_SECONDS)
            raise EngineFailedError(f"the engine was killed after {timeout} s:\n{_tail(log)}") from None
        # Whatever the engine has started shares its group; nothing of it may outlive the scenario.
        end_group(pid)
        if status:
            raise EngineFailedError(f"the engine ended with status {status}:\n{_tail(log)}")
        found = json.loads(result.read_text())
        returned = dict(zip(names, found["steps"], strict=False))
        said = [(level, message) for level, message in found["log"]]
        return Outcome(returned, said, found["refused"], log.read_text(errors="replace"))

    def close(self) -> None:
        end_group(self._process.pid)
        self._process.wait(START_SECONDS)


def _tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def parting(alone: dict[str, Any], tokens: list[int]) -> tuple[int, float]:
    """(how many tokens are those of the same prompt alone, how clear the choice of two tokens was where they part).

    With 16 bits the same scores come out a little different in batches of another shape. ``alone``: what a ``generate``
    step with log-probabilities gave.
    """
    (wanted,), (margins,) = alone["tokens"][0], alone["margins"]
    assert len(tokens) == len(wanted)
    at = next((i for i in range(len(wanted)) if tokens[i] != wanted[i]), len(wanted))
    return at, margins[at] if at < len(wanted) else 0.0


def prompt(seed: int, tokens: int) -> list[int]:
    """Tokens that no other seed shares."""
    source = random.Random(seed)
    return [source.randrange(100, 49_000) for _ in range(tokens)]


def numbers(seed: int, count: int) -> list[int]:
    """Tokens for :class:`clockwork.Clockwork`."""
    source = random.Random(seed)
    return [source.randrange(1000, 9000) for _ in range(count)]


def do(what: str, name: str | None = None, **arguments: Any) -> dict[str, Any]:
    """A step of a scenario: a method of driver.Scenario, and the name under which its result is found."""
    return {"do": what, "name": name, **arguments}


def generate(*prompts: list[int], name: str | None = None, **options: Any) -> dict[str, Any]:
    return do("generate", name, prompts=list(prompts), **options)
