"""What a release must agree on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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
