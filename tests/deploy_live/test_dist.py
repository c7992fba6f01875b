"""`make dist`: the wheel and the sdist, and the addresses in their metadata."""

from __future__ import annotations

import importlib.util
import tarfile

import pytest

from conftest import PROJECT

spec = importlib.util.spec_from_file_location("dist", PROJECT / "scripts" / "dist.py")
dist = importlib.util.module_from_spec(spec)
spec.loader.exec_module(dist)

URLS = {
    "Homepage": "https://example.org/team/kvbm",
    "Documentation": "https://example.org/team/kvbm/tree/v2.0.0/docs",
    "Issues": "https://example.org/team/kvbm/issues",
    "Changelog": "https://example.org/team/kvbm/blob/v2.0.0/CHANGELOG.md",
}


def files_of(packages):
    """The names in the sdist."""
    (sdist,) = (package for package in packages if package.suffix == ".gz")
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The packages without a home page."""
    return dist.build(tmp_path_factory.mktemp("plain"), {})


def test_the_sources_name_no_address(plain):
    assert [dist.urls_of(package) for package in plain] == [{}, {}]


def test_the_address_of_a_release_is_in_both_packages(plain, tmp_path):
    assert dist.project_urls(dist.home_page("https://example.org/team/kvbm/"), "2.0.0") == URLS
    packages = dist.build(tmp_path, URLS)
    assert [package.name for package in packages] == [package.name for package in plain]
    for package, without in zip(packages, plain, strict=True):
        assert dist.urls_of(package) == URLS
        lines = [line for line in dist.metadata(package).splitlines() if not line.startswith("Project-URL: ")]
        assert lines == dist.metadata(without).splitlines()
    # The copy of the sources lacks no file, and has no other.
    assert files_of(packages) == files_of(plain)
