"""The benchmark of the core still runs: small sizes, so that it says nothing about speed."""

import json

import pytest

SMALL = ["--blocks", "600", "--tokens", "1024", "--rounds", "2"]


@pytest.fixture
def benchmark(benchmark_script, monkeypatch):
    module = benchmark_script("core")
    monkeypatch.setattr(module, "LIMITS", dict.fromkeys(module.LIMITS, 1e9))
    return module


def test_every_limit_is_measured_and_written_down(benchmark, tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert benchmark.main([*SMALL, "--check", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    rows = {row["name"]: row for row in figures["rows"]}
    assert set(benchmark.LIMITS) <= set(rows)
    assert not any(row["missed"] for row in rows.values())
    assert all(row["best"] > 0 for name, row in rows.items() if name not in ("rss", "tracked"))
    assert {"cpu", "cores", "python", "system"} == set(figures["machine"])
    printed = capsys.readouterr().out
    assert all(row["what"].strip() in printed for row in rows.values())


def test_a_missed_limit_is_told_and_fails_the_check(benchmark, monkeypatch, capsys):
    monkeypatch.setitem(benchmark.LIMITS, "publish", 0.0)
    assert benchmark.main(SMALL) == 0
    assert benchmark.main([*SMALL, "--check"]) == 1
    said = capsys.readouterr()
    assert "MISSED" in said.out
    assert "limit missed: allocate and publish a block" in said.err


def test_the_hash_for_comparison_is_chained(benchmark):
    tokens = list(range(64))
    whole = benchmark.vllm_style(tokens, 16)
    assert len(whole) == 4
    assert benchmark.vllm_style(tokens[:32], 16) == whole[:2]
    assert not set(benchmark.vllm_style([1, *tokens[1:]], 16)) & set(whole)
