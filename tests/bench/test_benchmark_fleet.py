"""The fleet of simulated members finds what it holds, sends what has changed, and survives a death."""

from __future__ import annotations

import json
import random

import pytest

SMALL = ["--members", "8", "--blocks", "60", "--speed", "1"]


@pytest.fixture
def benchmark(benchmark_script):
    return benchmark_script("fleet")


@pytest.fixture
def trace(tmp_path):
    """Conversations of a few turns each: a prompt begins with the whole prompt before it."""
    source, rows, fresh = random.Random(7), [], iter(range(10**6))
    talks = [[next(fresh) for _ in range(4)] for _ in range(12)]
    for turn in range(240):
        talk = source.choice(talks)
        talk += [next(fresh) for _ in range(2)]
        if len(talk) > 20:
            del talk[4:]
        rows.append({"timestamp": turn * 2000, "input_length": 1, "output_length": 1, "hash_ids": list(talk)})
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_fleet_keeps_its_promises(benchmark, trace, tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert benchmark.main(["--trace", str(trace), *SMALL, "--check", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["peer"] > figures["local"] > 0
    assert figures["local"] + figures["peer"] + figures["recomputed"] == pytest.approx(1)
    assert figures["local"] + figures["peer"] <= figures["reachable"] <= figures["infinite"] + 1e-9
    assert figures["death"]["blocks_that_only_the_dead_held"] > 0
    assert "one infinite cache" in capsys.readouterr().out


def test_a_fleet_that_never_hears_of_changes_fails_the_check(benchmark, trace, monkeypatch, capsys):
    monkeypatch.setattr(benchmark.Fleet, "answered", lambda *_: None)
    assert benchmark.main(["--trace", str(trace), *SMALL, "--check"]) == 1
    assert "NOT KEPT: peers find at least 95 %" in capsys.readouterr().err
