"""The import contracts of pyproject.toml hold, and each of them fails when a module breaks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Contract, importer, imported. The imports inside of a function count as well.
BROKEN = [
    ("Layers", "kvbm.runtime.steps", "kvbm.observe.metrics"),
    ("Layers", "kvbm.tiers.edges", "kvbm.transfer.layout"),
    ("Layers", "kvbm.events.merge", "kvbm.observe.format"),
    ("core does no I/O", "kvbm.core.rate", "torch"),
    ("core does no I/O", "kvbm.core.rate", "time"),
    ("Only the two factories", "kvbm.runtime.steps", "kvbm.testing.fault_rules"),
    ("Only the two factories", "kvbm.transfer.cpu", "kvbm.testing.fault_rules"),
    ("The engines are independent", "kvbm.engines.sglang.pages", "kvbm.engines.trtllm.keys"),
    ("The tiers are independent", "kvbm.tiers.disk.gds", "kvbm.tiers.host.numa"),
    ("The tiers are independent", "kvbm.tiers.host.numa", "kvbm.tiers.disk.gds"),
]


def lint(directory, imports=()):
    """Run the contracts on a copy of the package to which ``imports`` have been added."""
    shutil.copytree(
        ROOT / "src" / "kvbm", directory / "kvbm", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", directory)
    for importer, imported in imports:
        with (directory / f"{importer.replace('.', '/')}.py").open("a") as file:
            file.write(f"\ndef later():\n    import {imported}\n")
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_tree_keeps_every_contract(tmp_path):
    done = lint(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 broken" in done.stdout


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One run over a copy with every import of BROKEN: contract -> its part of the report."""
    done = lint(tmp_path_factory.mktemp("tree"), [pair for _, *pair in BROKEN])
    assert done.returncode == 1, done.stdout + done.stderr
    parts, name = {}, ""
    lines = done.stdout.splitlines()
    for line, next_line in zip(lines, [*lines[1:], ""], strict=True):
        if line and next_line == "-" * len(line):
            name = line
        parts[name] = f"{parts.get(name, '')}{line}\n"
    return parts


@pytest.mark.parametrize(("contract", "importer", "imported"), BROKEN)
def test_a_forbidden_import_is_found(report, contract, importer, imported):
    part = next(text for name, text in report.items() if name.startswith(contract))
    assert f"{importer} -> {imported} (l." in part


def test_a_cycle_within_a_package_is_found(tmp_path):
    done = lint(tmp_path, [("kvbm.observe.format", "kvbm.observe.findings")])
    assert done.returncode == 1
    assert "No cycles are allowed in kvbm.observe." in done.stdout


def test_a_package_without_a_place_is_found(tmp_path):
    (tmp_path / "kvbm" / "elsewhere").mkdir(parents=True)
    (tmp_path / "kvbm" / "elsewhere" / "__init__.py").touch()
    done = lint(tmp_path)
    assert done.returncode == 1
    assert "kvbm.elsewhere" in done.stdout
