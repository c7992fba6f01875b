"""The pages name what there is: every finding, every metric, every option."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from kvbm.cli.main import build_parser
from kvbm.observe.metrics import METRICS

PROJECT = Path(__file__).parents[2]
DOCS = PROJECT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), PROJECT / "README.md"]


def findings() -> set[str]:
    """Names of everything but good news, from the source."""
    names: set[str] = set()
    for path in [*(PROJECT / "src/kvbm/doctor").glob("*.py"), PROJECT / "src/kvbm/observe/findings.py"]:
        text = path.read_text()
        names.update(re.findall(r'\b(?:bad|note)\(\s*"([a-z-]+)"', text))
        names.update(re.findall(r'name="([a-z-]+)"', text))
    return names


def test_every_finding_is_in_troubleshooting():
    text = (DOCS / "troubleshooting.md").read_text()
    names = findings()
    assert len(names) > 30
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_every_finding_in_troubleshooting_exists():
    text = (DOCS / "troubleshooting.md").read_text()
    cells = re.findall(r"^\| (`[a-z-]+`(?:, `[a-z-]+`)*) \|", text, re.M)
    named = {name for cell in cells for name in re.findall(r"`([a-z-]+)`", cell)}
    source = "".join(path.read_text() for path in (PROJECT / "src/kvbm").rglob("*.py"))
    made = {"host-smaller-than-device", "disk-smaller-than-device", "fallocate-missing"}
    assert sorted(name for name in named - made if f'"{name}"' not in source) == []


def test_every_metric_is_in_observability():
    text = (DOCS / "observability.md").read_text()
    assert [metric.name for metric in METRICS if f"`{metric.name}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Of a command and of its own commands."""
    found = set()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                found |= options(below)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_one(page):
    """`kvbm NAME --option` in the text: the command and its options exist."""
    parsers = build_parser()._subparsers._group_actions[0].choices
    for line in re.findall(r"kvbm ([a-z]+)((?: +[^\n`|]*)?)", page.read_text()):
        name, rest = line
        if name not in parsers:
            continue
        known = options(parsers[name])
        for option in re.findall(r"(?<=\s)--[a-z-]+", rest.split("#")[0]):
            assert option in known, f"kvbm {name} {option}"
