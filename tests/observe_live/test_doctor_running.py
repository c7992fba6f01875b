"""`kvbm doctor` on engines that really run: it says whether KVBM helps and, if not, why."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from conftest import prompt
from kvbm.cli.main import main
from servers import free_port, start_server


@pytest.fixture(scope="module")
def small(start, model):
    """An engine with a host tier that is smaller than its own cache."""
    port = free_port()
    environment = {
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "36",
        "DYN_KVBM_METRICS": "1",
        "DYN_KVBM_METRICS_PORT": str(port),
        "KVBM_LOAD": "always",
    }
    return start_server(start, model, environment, options=["--num-gpu-blocks-override", "40"]), port


def ask(capsys: pytest.CaptureFixture, port: int) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["doctor", "--quick", "--json", "--url", str(port)])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return code, {finding["name"]: finding for finding in findings if finding["check"] == "running"}


def test_too_small_tiers_are_told_from_prompts_that_do_not_repeat(small, capsys):
    server, port = small
    code, found = ask(capsys, port)
    assert "too-early" in found
    assert (code, found["host-smaller-than-device"]["level"]) == (1, "bad")
    assert "DYN_KVBM_CPU_CACHE_GB" in found["host-smaller-than-device"]["cure"]

    for seed in range(12):
        server.stream(prompt(5000 + seed, 200), 1)
    _, found = ask(capsys, port)
    assert "no-repeats" in found
    assert "tier-too-small" not in found

    # Six prompts of nine blocks in turn: neither 40 blocks of the engine's nor 36 of ours hold them.
    for _, seed in itertools.product(range(5), range(6)):
        server.stream(prompt(6000 + seed, 300), 1)
    code, found = ask(capsys, port)
    assert code == 1
    assert "too small" in found["tier-too-small"]["text"]
    assert "DYN_KVBM_CPU_CACHE_GB" in found["tier-too-small"]["cure"]


def test_an_engine_that_gains_is_well(watched, capsys):
    """The engine whose page and metrics the other tests look at, with traffic that comes back."""
    for _, seed in itertools.product(range(6), range(4)):
        watched.stream(prompt(7000 + seed, 480), 1)
    code, found = ask(capsys, watched.port)
    assert code == 0, found
    assert found["gain"]["level"] == "good"
