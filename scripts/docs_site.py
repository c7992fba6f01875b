#!/usr/bin/env python3
"""Build the documentation site: README, docs/ and the measurements, with a search. A broken link fails it.

    python scripts/docs_site.py            # what `make docs-site` does; the site is build/docs-site

The pages keep their places in the repository, so that a link works on both sides. A link to a file that is no page, a
script for example, leads to a copy of it; a link to a folder leads to a list of what is in it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
SOURCE = PROJECT / "build" / "docs-source"
PAGES = ("*.md", "docs/**/*.md", "benchmarks/**/*.md")
LINK = re.compile(r"(?<!`)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def main() -> int:
    stage()
    status = build(PROJECT)
    if not status:
        print(PROJECT / "build" / "docs-site" / "index.html")
    return status


def build(folder: Path) -> int:
    """The exit code of mkdocs, where mkdocs.yml and the staged pages are."""
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--clean",
    ]  # --quiet would hide the warnings from --strict
    return subprocess.run(command, cwd=folder, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode


def stage() -> None:
    shutil.rmtree(SOURCE, ignore_errors=True)
    for page in sorted({page for pattern in PAGES for page in PROJECT.glob(pattern)}):
        text = LINK.sub(lambda link, page=page: _stage_link(page, link), page.read_text())
        _write(page, text)
    shutil.copy(PROJECT / "docs" / "site.css", SOURCE / "docs")


def _stage_link(page: Path, link: re.Match[str]) -> str:
    target = Path(os.path.normpath(page.parent / link[1]))
    if "://" in link[1] or link[1].startswith("mailto:") or not target.is_relative_to(PROJECT):
        return link[0]
    if target.is_dir():
        listing = target / "README.md"
        if not listing.exists():  # else it is a page already
            listing = target / "index.md"
            names = sorted(each.name for each in target.iterdir() if each.suffix == ".md")
            items = "".join(f"- [{name}]({name})\n" for name in names)
            _write(listing, f"# {target.relative_to(PROJECT)}\n\n{items or 'See the repository.'}\n")
        return f"]({os.path.relpath(listing, page.parent)}{link[2] or ''})"
    if target.is_file() and target.suffix != ".md" and not _staged(target).exists():
        _staged(target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(target, _staged(target))
    return link[0]


def _staged(path: Path) -> Path:
    return SOURCE / path.relative_to(PROJECT)


def _write(page: Path, text: str) -> None:
    _staged(page).parent.mkdir(parents=True, exist_ok=True)
    _staged(page).write_text(text)


if __name__ == "__main__":
    sys.exit(main())
