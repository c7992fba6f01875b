"""Every source file fits in a few screens."""

from __future__ import annotations

from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
MAX_LINES = 500
SUFFIXES = {".py", ".js", ".css", ".html"}


def long_files(folder: Path) -> dict[str, int]:
    """The files under ``folder`` with more than ``MAX_LINES`` lines."""
    files = [path for path in folder.rglob("*") if path.suffix in SUFFIXES]
    assert files
    lines = {path.relative_to(folder).as_posix(): len(path.read_text().splitlines()) for path in files}
    return {name: count for name, count in lines.items() if count > MAX_LINES}


def test_no_file_of_the_source_is_too_long():
    assert long_files(SOURCE) == {}


@pytest.mark.parametrize("suffix", sorted(SUFFIXES))
def test_a_file_that_is_too_long_is_found(suffix, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / f"long{suffix}").write_text("\n" * (MAX_LINES + 1))
    (tmp_path / f"short{suffix}").write_text("\n" * MAX_LINES)
    assert long_files(tmp_path) == {f"package/long{suffix}": MAX_LINES + 1}
