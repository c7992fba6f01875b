"""Ranges for a profiler: there when one is attached, out of the way otherwise."""

import logging
import re
import sys
import types
from pathlib import Path

import pytest

from kvbm import tracing as nvtx
from kvbm.config import load
from kvbm.tracing import annotate, switch

PROJECT = Path(__file__).parents[2]
NSIGHT = {"NSYS_PROFILING_SESSION_ID": "1"}


@pytest.fixture(autouse=True)
def _off_again():
    yield
    switch("off")


@pytest.fixture
def profiler(monkeypatch):
    """A package ``nvtx`` that writes down what it is asked for."""
    seen = []

    class Annotate:
        def __init__(self, message, domain):
            self.name = f"{domain}/{message}"
            seen.append(f"made {self.name}")

        def __enter__(self):
            seen.append(f"> {self.name}")
            return self

        def __exit__(self, *exception):
            seen.append(f"< {self.name}")
            return False

    package = types.ModuleType("nvtx")
    package.annotate = Annotate
    monkeypatch.setitem(sys.modules, "nvtx", package)
    return seen


@pytest.fixture
def no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)


@annotate("double")
def double(number, *, plus=0):
    """Twice as much."""
    return 2 * number + plus


def ranges(seen):
    return [line for line in seen if not line.startswith("made")]


def test_a_marked_function_is_a_range_of_the_domain(profiler):
    assert switch("on")
    assert double(3, plus=1) == 7
    assert ranges(profiler) == ["> kvbm/double", "< kvbm/double"]


def test_marked_lines_are_a_range(profiler):
    switch("on")
    with annotate("outer"), annotate("inner"):
        profiler.append("work")
    assert ranges(profiler) == ["> kvbm/outer", "> kvbm/inner", "work", "< kvbm/inner", "< kvbm/outer"]


def test_a_name_is_registered_once(profiler):
    switch("on")
    mark = annotate("again")
    for _ in range(3):
        with mark, mark:
            pass
    assert profiler.count("made kvbm/again") == 1
    assert len(ranges(profiler)) == 12


def test_a_range_ends_when_its_code_fails_and_the_error_is_the_callers(profiler):
    @annotate("fails")
    def fails():
        raise KeyError("yes")

    switch("on")
    with pytest.raises(KeyError):
        fails()
    with pytest.raises(KeyError), annotate("lines"):
        raise KeyError
    assert ranges(profiler) == ["> kvbm/fails", "< kvbm/fails", "> kvbm/lines", "< kvbm/lines"]


def test_a_marked_function_keeps_its_name():
    assert (double.__name__, double.__doc__) == ("double", "Twice as much.")


def test_off_until_asked(profiler):
    assert double(1) == 2
    with annotate("lines"):
        pass
    assert profiler == []


@pytest.mark.parametrize(
    ("wanted", "environ", "on"),
    [
        ("auto", {}, False),
        ("auto", NSIGHT, True),
        ("auto", {"NVTX_INJECTION64_PATH": "/some/tool.so"}, True),
        ("auto", {"NVTX_INJECTION64_PATH": ""}, False),
        ("on", {}, True),
        ("off", NSIGHT, False),
    ],
)
def test_who_wants_ranges(profiler, wanted, environ, on):
    assert switch(wanted, environ) is on
    double(1)
    assert bool(profiler) is on


def test_it_can_be_turned_off_again(profiler):
    switch("on")
    switch("off")
    double(1)
    assert profiler == []


@pytest.mark.parametrize(
    ("wanted", "environ", "reason"),
    [("on", {}, "KVBM_NVTX is on"), ("auto", NSIGHT, r"a profiler is attached \(NSYS_PROFILING_SESSION_ID\)")],
)
@pytest.mark.usefixtures("no_package")
def test_without_the_package_there_are_no_ranges_and_one_warning(caplog, wanted, environ, reason):
    with caplog.at_level(logging.WARNING, "kvbm"):
        assert not switch(wanted, environ)
    assert double(1) == 2
    (warning,) = caplog.messages
    assert re.match(rf"{reason}, but KVBM makes no ranges: .* pip install nvtx$", warning)


@pytest.mark.usefixtures("no_package")
def test_where_nobody_asks_the_package_is_not_missed(caplog):
    assert not switch("auto", {})
    assert not caplog.messages


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("1", "on"), ("on", "on"), ("0", "off"), ("off", "off")])
def test_the_setting(text, value):
    assert load(environ={"KVBM_NVTX": text}, files=()).nvtx == value


def test_ranges_are_documented():
    """Every range that the source makes has a row in docs/profiling.md."""
    documented = set(re.findall(r"^\| `([^`]+)` \|", (PROJECT / "docs" / "profiling.md").read_text(), re.MULTILINE))
    assert len(documented) > 20
    made = set()
    for path in (PROJECT / "src" / "kvbm").rglob("*.py"):
        if path != Path(nvtx.__file__):
            made.update(re.findall(r'\bannotate\("([^"]+)"\)', path.read_text()))
    assert made <= documented
