"""docs/design.md, "Where to start": the lists name files that exist, and following them works in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

PROJECT = Path(__file__).parents[2]
TOPICS = ["New tier", "New policy", "New engine", "New setting", "New metric"]


class Step(NamedTuple):
    path: str
    is_new: bool
    text: str


def parse_lists(page: str) -> dict[str, list[Step]]:
    """The numbered lists under "Where to start", by heading. Every line of a list has the same form."""
    section = page.partition("\n## Where to start\n")[2].partition("\n## ")[0]
    lists: dict[str, list[Step]] = {}
    for part in section.split("\n### ")[1:]:
        title, _, body = part.partition("\n")
        steps = []
        for line in re.findall(r"^\d.*$", body, re.M):
            found = re.fullmatch(r"(\d)\. `([^`]+)`( \(new\))?: (.+\.)", line)
            assert found, f"{title}: expected '1. `path`: what to do.' or '1. `path` (new): ...', got {line!r}"
            assert int(found[1]) == len(steps) + 1, f"{title}: wrong number in {line!r}"
            steps.append(Step(found[2], found[3] is not None, found[4]))
        lists[title] = steps
    return lists


PAGE = (PROJECT / "docs" / "design.md").read_text()
LISTS = parse_lists(PAGE)


def problems_of(step: Step) -> str:
    """Why a reader cannot do this step; empty when nothing is wrong."""
    path = PROJECT / step.path
    if not step.is_new:
        return "" if path.is_file() else f"{step.path} does not exist"
    if "<name>" not in step.path:
        return f"{step.path} is new and has no <name>"
    known = Path(step.path.partition("<name>")[0])
    folder = PROJECT / (known if step.path.partition("<name>")[0].endswith("/") else known.parent)
    return "" if folder.is_dir() else f"{folder} does not exist"


def test_there_is_a_list_for_each_topic():
    assert list(LISTS) == TOPICS
    assert all(LISTS.values())


@pytest.mark.parametrize("topic", TOPICS)
def test_every_file_of_a_list_is_there(topic):
    assert [problem for step in LISTS[topic] if (problem := problems_of(step))] == []


@pytest.mark.parametrize("topic", TOPICS)
def test_every_name_in_a_step_is_in_its_file(topic):
    """`POLICIES`, `Config`, `register`: a word in backticks that looks like a name stands in the file of its step."""
    for path, is_new, text in LISTS[topic]:
        for name in re.findall(r"`([A-Za-z_][A-Za-z_.]*)`", text):
            if not is_new and not name.startswith("make"):
                assert name.rpartition(".")[2] in (PROJECT / path).read_text(), f"{path} has no {name}"


@pytest.mark.parametrize("topic", TOPICS)
def test_a_list_ends_with_a_test_or_a_page(topic):
    assert any(step.path.startswith("tests/") for step in LISTS[topic])


def test_a_step_with_a_wrong_path_is_noticed():
    assert problems_of(Step("src/kvbm/storage/table.py", False, "Add a row."))
    assert problems_of(Step("src/kvbm/storage/<name>.py", True, "Add a class."))
    with pytest.raises(AssertionError, match="expected"):
        parse_lists("\n## Where to start\n\n### New tier\n\n1. Write a tier.\n")


# -- the rest of the page ---------------------------------------------------------------------------------------------


def test_the_house_has_every_folder_and_no_other():
    rows = re.findall(r"^\| (`[^|]+/`) \|", PAGE.partition("\n## The house\n")[2].partition("\n## ")[0], re.M)
    listed = {name.rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row)}
    folders = {path.parent for path in (PROJECT / "src" / "kvbm").glob("*/__init__.py")}
    assert listed == {folder.relative_to(PROJECT).as_posix() for folder in folders} | {"tests"}


def test_the_threads_of_the_page_are_started_somewhere():
    named = re.findall(r"`(kvbm-[a-z-]+?)(?:-N)?`", PAGE.partition("\n## Threads\n")[2].partition("\n## ")[0])
    assert len(named) >= 8
    source = "".join(path.read_text() for path in (PROJECT / "src" / "kvbm").rglob("*.py"))
    patterns = [name.replace("disk-read", "disk-{name}").replace("disk-write", "disk-{name}") for name in named]
    assert [name for name in patterns if f'"{name}' not in source] == []


def test_diagrams_have_no_semicolon_which_ends_a_line_of_mermaid():
    diagrams = re.findall(r"^```mermaid\n(.*?)^```", PAGE, re.M | re.S)
    assert len(diagrams) == 3
    assert not any(";" in diagram for diagram in diagrams)


# -- following the lists ----------------------------------------------------------------------------------------------


class Copy:
    """A copy of src/ and of docs/ for a reader to edit."""

    def __init__(self, folder: Path) -> None:
        self._root = folder
        for part in ("src", "docs"):
            shutil.copytree(PROJECT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))

    def create(self, step: Step, name: str, text: str) -> None:
        assert step.is_new
        path = self._root / step.path.replace("<name>", name)
        assert not path.exists()
        path.write_text(text)

    def insert(self, step: Step, before: str, text: str) -> None:
        """Put ``text`` in front of the one line that matches ``before``."""
        assert not step.is_new
        path = self._root / step.path
        source = path.read_text()
        found = list(re.finditer(before, source, re.M))
        assert len(found) == 1, f"{step.path}: expected one line like {before!r}, found {len(found)}"
        path.write_text(source[: found[0].start()] + text + source[found[0].start() :])

    def run(self, program: str, *path: Path) -> str:
        paths = os.pathsep.join(map(str, (self._root / "src", *path)))
        settings = {name: value for name, value in os.environ.items() if "KVBM" not in name}
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, cwd=self._root,
            env={**settings, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


POLICY = '''
"""Least recently used, in the plainest way: a dict of slots in the order of eviction."""

from kvbm.core.policy.base import EvictionPolicy


class Toy(EvictionPolicy):
    def __init__(self, slots):
        self._used_at = [0] * slots
        self._slots = {}
        self._clock = 0

    def inserted(self, slots, keys):
        self.hit(slots)

    def hit(self, slots):
        for slot in map(int, slots):
            self._clock += 1
            self._used_at[slot] = self._clock
            self._slots.pop(slot, None)
            self._slots[slot] = None

    def pinned(self, slots):
        if len(set(slots)) < len(slots) or not all(slot in self._slots for slot in slots):
            raise KeyError("a slot that is not there, or is named twice")
        for slot in slots:
            del self._slots[int(slot)]

    dropped = pinned

    def released(self, slots, used):
        if used:
            self.hit(slots)
        else:
            self._slots.update(dict.fromkeys(map(int, slots)))
            self._slots = dict.fromkeys(sorted(self._slots, key=self._used_at.__getitem__))

    def evict(self):
        slot = next(iter(self._slots), None)
        if slot is None:
            raise KeyError("no slot may be evicted")
        del self._slots[slot]
        return slot

    def __len__(self):
        return len(self._slots)

    def __contains__(self, slot):
        return slot in self._slots
'''

RUN_POOL_MACHINE = """
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvbm.core import pool
from kvbm.core.policy import make_policy

pool.LRU = lambda slots: make_policy("toy", slots, lambda: 0.0)  # the default of Pool
assert type(pool.Pool(3)._policy).__name__ == "Toy"

from test_pool_machine import PoolMachine

# Without shrinking: it takes ten times as long as finding the first failure.
few = settings(
    max_examples=40, stateful_step_count=60, deadline=None, database=None, derandomize=True, phases=[Phase.generate]
)
run_state_machine_as_test(PoolMachine, settings=few)
print("the pool's states and the order of eviction are right")
"""


def add_policy(copy: Copy, source: str) -> None:
    new_file, factory, *_ = LISTS["New policy"]
    copy.create(new_file, "toy", source)
    copy.insert(factory, r"^__all__ = ", "from kvbm.core.policy.toy import Toy\n\n")
    copy.insert(factory, r"^def make_policy", 'POLICIES["toy"] = lambda slots, clock: Toy(slots)\n\n\n')


def test_a_policy_made_by_its_list_passes_the_machine_of_the_pool(copy):
    add_policy(copy, POLICY)
    assert "are right" in copy.run(RUN_POOL_MACHINE, PROJECT / "tests", PROJECT / "tests" / "core")


def test_a_policy_that_evicts_in_the_wrong_order_does_not_pass(copy):
    add_policy(copy, POLICY.replace("next(iter(self._slots), None)", "next(reversed(self._slots), None)"))
    with pytest.raises(AssertionError, match="in_the_order_of_use"):
        copy.run(RUN_POOL_MACHINE, PROJECT / "tests", PROJECT / "tests" / "core")


SETTING = """\
    toy_limit: Annotated[int, Setting(
        "KVBM_TOY_LIMIT", GENERAL, Number(unit="toys", low=1, example="4"), "Maximum number of toys.",
    )] = 7

"""
SHOW_SETTINGS = "import sys; from kvbm.cli.main import main; sys.exit(main(['config', *sys.argv[1:]]))"


def test_a_setting_made_by_its_list_is_shown_by_kvbm_config(copy):
    table, page, _ = LISTS["New setting"]
    copy.insert(table, r"^    # ---- Host tier ----$", SETTING)
    rows = [line.split() for line in copy.run(SHOW_SETTINGS).splitlines()]
    assert ["KVBM_TOY_LIMIT", "7", "default"] in rows
    written = copy.run(SHOW_SETTINGS.replace("*sys.argv[1:]", "'--docs'"))  # what `make docs` runs
    row = "| `KVBM_TOY_LIMIT` | `toy_limit` | 7 | Maximum number of toys. | a whole number of toys >= 1 |\n"
    assert written.replace(row, "") == (PROJECT / page.path).read_text()
    assert written.count(row) == 1


RENDER = """
import msgspec

from kvbm.observe.metrics import render
from observed import SNAPSHOT

print(render(SNAPSHOT).decode())
print(render(msgspec.structs.replace(SNAPSHOT, toys=3)).decode())
"""


def test_a_metric_made_by_its_list_is_in_the_prometheus_text(copy):
    _, snapshot, _, metrics, *_ = LISTS["New metric"]
    copy.insert(snapshot, r"^    record_dropped: int = 0", "    toys: int = 0\n")
    metric = '    Metric("kvbm_toys_total", "counter", "Toys that were seen", _one(lambda s: s.toys)),\n'
    copy.insert(metrics, r"(?<=^_CUSTOMARY = \(\n)    Metric\(", metric)
    text = copy.run(RENDER, PROJECT / "tests")
    assert text.count("# HELP kvbm_toys_total Toys that were seen\n# TYPE kvbm_toys_total counter\n") == 2
    assert re.findall(r"^kvbm_toys_total (\d+)$", text, re.M) == ["0", "3"]
