"""The documentation site: it has every page and a search, and a broken link fails its build."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("docs_site", PROJECT / "scripts" / "docs_site.py")
docs_site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(docs_site)


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(PROJECT / "mkdocs.yml", folder)
    docs_site.SOURCE = folder / "build" / "docs-source"
    docs_site.stage()
    return folder


def test_the_site_has_every_page_and_a_search(staged):
    assert docs_site.build(staged) == 0
    site = staged / "build" / "docs-site"
    for page in (PROJECT / "docs").glob("*.md"):
        assert (site / "docs" / f"{page.stem}.html").exists()
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert any("DYN_KVBM_CPU_CACHE_GB" in entry["text"] for entry in index["docs"])


@pytest.mark.parametrize("link", ["gone.md", "design.md#no-such-heading", "/absolute.md"])
def test_a_broken_link_fails_the_build(staged, link):
    page = staged / "build" / "docs-source" / "docs" / "vllm.md"
    whole = page.read_text()
    page.write_text(f"{whole}\n[broken]({link})\n")
    try:
        assert docs_site.build(staged) != 0
    finally:
        page.write_text(whole)
