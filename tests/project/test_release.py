"""What a release must agree on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvbm.engines.supported import RELEASES

PROJECT = Path(__file__).parents[2]
PYPROJECT = (PROJECT / "pyproject.toml").read_text()
VERSION = re.search(r'^version = "(.+)"$', PYPROJECT, re.MULTILINE)[1]


def test_every_file_names_the_same_version():
    chart = yaml.safe_load((PROJECT / "deploy/helm/kvbm/Chart.yaml").read_text())
    values = yaml.safe_load((PROJECT / "deploy/helm/kvbm/values.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == values["image"]["tag"] == VERSION
    for path in [
        *PROJECT.glob("deploy/kubernetes/*.yaml"),
        *PROJECT.glob("deploy/Containerfile.*"),
        PROJECT / "docs/deploy.md",
    ]:
        assert set(re.findall(r"kvbm-(?:vllm|trtllm):([\w.]+)", path.read_text())) <= {VERSION}, path


def test_the_changelog_has_the_version_with_a_date():
    text = (PROJECT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(VERSION)}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE)
    assert "## [Unreleased]" in text


def test_the_package_says_what_it_supports():
    for minor in (10, 11, 12, 13):
        assert f"Programming Language :: Python :: 3.{minor}" in PYPROJECT
    assert 'requires-python = ">=3.10"' in PYPROJECT
    assert "Operating System :: POSIX :: Linux" in PYPROJECT
    assert "Report" in (PROJECT / "SECURITY.md").read_text()


def rows_of(text: str, header: str) -> list[list[str]]:
    """The cells of the table below this header, without its emphasis."""
    table = text[text.index(header) :].partition("\n\n")[0]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_table_of_the_first_page_has_the_figures_of_its_run():
    run = (PROJECT / "benchmarks/gpu/results/2026-11-16-all-engines.md").read_text()
    measured = rows_of(run, "| engine | cold, ms |")
    shown = rows_of((PROJECT / "README.md").read_text(), "| | first time | returned |")
    assert len(measured) == len(shown) == 5
    for (_, *times, equal, _), (_, *figures, equal_shown) in zip(measured, shown, strict=True):
        for figure, each in zip(figures, times, strict=True):
            assert abs(int(figure.replace(",", "")) - float(each.split()[0])) <= 0.5
        assert equal_shown == equal


def test_the_first_page_names_the_releases_that_kvbm_supports():
    text = (PROJECT / "README.md").read_text()
    requirements = text[text.index("## Requirements") : text.index("## Install and run")]
    for package, name in (("vllm", "vLLM"), ("tensorrt_llm", "TensorRT-LLM"), ("sglang", "SGLang")):
        first, last = RELEASES[package][0], RELEASES[package][-1]
        assert f"{name} {first}" + (f" to {last}" if first != last else "") in requirements
    pythons = re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    assert f"Python {pythons[0]} to {pythons[-1]}" in requirements
    assert "Linux" in requirements
    assert "CUDA" in requirements


@pytest.mark.parametrize(
    "address",
    [
        "kvbm", "github.com/me/kvbm", "https://", "https://localhost", "ftp://example.org/kvbm", "https://[::1/kvbm",
        "https://me:secret@example.org/kvbm", "https://example.org/kvbm?tab=readme", "https://example.org/#kvbm",
        'https://example.org/"kvbm', "https://example.org/my kvbm", " ",
    ],
)  # fmt: skip
def test_what_is_no_home_page_is_refused(address):
    command = [sys.executable, str(PROJECT / "scripts" / "dist.py"), "--home-url", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"{address!r}: expected the address of the repository" in done.stderr


def test_other_systems_get_a_sentence():
    command = "import sys; from kvbm.cli.main import main; sys.platform = 'darwin'; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("kvbm: KVBM runs on Linux only")
    assert done.stderr.endswith("(this is darwin)\n")
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.platform = 'win32'; import kvbm.engines.session"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "ImportError: KVBM runs on Linux only" in done.stderr
