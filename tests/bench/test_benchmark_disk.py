"""The benchmark of the disk tier still runs: small sizes, so that it says nothing about speed."""

import json

import pytest

SMALL = ["--gb", "0.01", "--slot-kb", "64", "--rounds", "1"]


@pytest.fixture
def benchmark(benchmark_script):
    return benchmark_script("disk")


def test_both_directions_are_measured_and_written_down(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "LIMITS", {"read": 0.0, "write": 0.0})
    file = tmp_path / "figures.json"
    assert benchmark.main([*SMALL, "--check", "--directory", str(tmp_path), "--json", str(file)]) == 0
    rows = {row["what"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == set(benchmark.LIMITS)
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["gb_s"] / row["plain_gb_s"])
        assert row["cpu_s_gb"] > 0
    assert "CPU s/GB" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]


def test_a_missed_limit_is_told_and_fails_the_check(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "LIMITS", {"read": 1e9, "write": 0.0})
    assert benchmark.main([*SMALL, "--directory", str(tmp_path)]) == 0
    assert benchmark.main([*SMALL, "--check", "--directory", str(tmp_path)]) == 1
    assert "limit missed: read" in capsys.readouterr().err


def test_the_index_is_measured(benchmark, tmp_path, capsys):
    assert benchmark.main(["--index", "--blocks", "300", "--batch", "64", "--directory", str(tmp_path)]) == 0
    assert "sqlite" in capsys.readouterr().out
