"""benchmarks/policies.py runs, and its figures hang together."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def script(benchmark_script, monkeypatch):
    module = benchmark_script("policies")
    monkeypatch.setattr(module, "GENERATED", ("quiet",))
    monkeypatch.setattr(module, "POLICIES", ["lru"])
    return module


def test_figures_and_plots_of_policies_and_filters(script, tmp_path):
    json_file, page = tmp_path / "policies.json", tmp_path / "policies.html"
    arguments = ["--only", "policies", "filters", "--jobs", "1", "--json", str(json_file), "--html", str(page)]
    assert script.main(arguments) == 0
    figures = json.loads(json_file.read_text())
    rates = figures["policies"]["quiet"]
    assert rates["slots"] == sorted(rates["slots"])
    assert all(ours <= bound for ours, bound in zip(rates["lru"], rates[script.OPTIMUM], strict=True))
    rows = figures["filters"]["quiet"]
    every, guide = (next(row for name, row in rows.items() if name.startswith(word)) for word in ("every", "frequency"))
    assert every[2] > guide[2] > 0  # the filter writes less, and a block that it writes is read more often
    assert guide[3] > every[3]
    assert page.read_text().count("<svg") == 2
