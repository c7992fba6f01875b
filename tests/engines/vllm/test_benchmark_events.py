"""The benchmark of block events still runs: small sizes, so that it says nothing about speed."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

SMALL = ["--blocks", "600", "--step", "40", "--steps", "5", "--rounds", "1"]


@pytest.fixture
def benchmark(benchmark_script):
    return benchmark_script("events")


def test_figures_are_written_down_and_a_missed_limit_fails_the_check(benchmark, monkeypatch, tmp_path, capsys):
    file = tmp_path / "figures.json"
    monkeypatch.setattr(benchmark, "MAX_PERCENT", 1e9)
    assert benchmark.main([*SMALL, "--check", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["figures"]
    assert figures["bytes_a_block"] > 8
    assert "of a core" in capsys.readouterr().out
    monkeypatch.setattr(benchmark, "MAX_PERCENT", -1e9)
    assert benchmark.main([*SMALL, "--check"]) == 1
    assert benchmark.main(SMALL) == 0
