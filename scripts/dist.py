#!/usr/bin/env python3
"""Build the wheel and the source distribution, and try both in clean environments of every supported Python.

    python scripts/dist.py                                          # what `make dist` does
    python scripts/dist.py --home-url https://github.com/me/kvbm    # and `make dist HOME_URL=...`

For each Python of 3.10 to 3.13 that this machine has, and for each of the two files: a new virtual environment, an
installation with its requirements, the command line, and an import of the public module paths. A Python that is missing
is named at the end. The release check list is in CONTRIBUTING.md.

The sources name no home page, because a copy of them can be published anywhere. --home-url is the address of the
repository that publishes this release, on GitHub or GitLab: the script adds [project.urls] to a copy of the sources and
builds from that, so the wheel and the sdist both carry the addresses.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

PROJECT = Path(__file__).resolve().parent.parent
DIST = PROJECT / "dist"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
NOT_COPIED = (".git", ".venv", ".venvs", "build", "dist", "*-results", "kvbm-records", "__pycache__", ".*_cache")
# What a user of a fresh installation does first. No engine is installed, so doctor finds a fault: exit code 1.
TRIES = (
    (["--version"], 0, "kvbm {version}"),
    (["config", "--changed"], 0, "every setting is at its default"),
    (["doctor", "--quick"], 1, "None of vllm, tensorrt_llm, sglang is installed"),
    (["size", "."], 1, "has no config.json"),
    (["cache", "ls"], 0, ""),
)


# An engine that runs on this machine is of no concern: nothing listens on this port.
ENVIRONMENT = {"doctor": {"DYN_KVBM_METRICS_PORT": "1"}}


def run(*command: object, cwd: Path | None = None, expect: int = 0, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=900,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    if done.returncode != expect:
        raise SystemExit(f"$ {' '.join(map(str, command))}\nexit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def find_python(version: str) -> str | None:
    """A Python that runs: on the PATH, or one of pyenv's. pyenv's own names on the PATH may lead nowhere."""
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path.home() / ".pyenv" / "versions"
    candidates += [str(path / "bin" / "python") for path in sorted(pyenv.glob(f"{version}.*"), reverse=True)]
    for candidate in filter(None, candidates):
        program = "import sys; print('{}.{}'.format(*sys.version_info))"
        done = subprocess.run([candidate, "-c", program], capture_output=True, text=True)
        if done.stdout.strip() == version:
            return candidate
    return None


def home_page(text: str) -> str:
    """The address without a slash at its end."""
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and "." in (parts.hostname or "") and not parts.username
    except ValueError:  # for example an IPv6 address without its bracket
        is_address = False
    if not is_address or parts.query or parts.fragment or re.search(r"[\s\"\\]", text):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected the address of the repository that publishes this release, for example "
            "https://github.com/me/kvbm"
        )
    return text.rstrip("/")


def project_urls(home: str, version: str) -> dict[str, str]:
    """The pages of a repository on GitHub. GitLab redirects the same addresses to its own."""
    return {
        "Homepage": home,
        "Documentation": f"{home}/tree/v{version}/docs",
        "Issues": f"{home}/issues",
        "Changelog": f"{home}/blob/v{version}/CHANGELOG.md",
    }


def with_urls(folder: Path, urls: dict[str, str]) -> Path:
    """A copy of the sources below ``folder`` whose metadata has these addresses."""
    copy = folder / "source"
    shutil.copytree(PROJECT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    table = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    with (copy / "pyproject.toml").open("a") as file:
        file.write(f"\n[project.urls]\n{table}")
    return copy


def build(target: Path, urls: dict[str, str]) -> list[Path]:
    with tempfile.TemporaryDirectory() as folder:
        source = with_urls(Path(folder), urls) if urls else PROJECT
        run(sys.executable, "-m", "venv", Path(folder) / "env")
        python = Path(folder) / "env" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "build", "hatchling")
        run(python, "-m", "build", "--no-isolation", "--outdir", target, source)
    return sorted(target.iterdir())


def metadata(package: Path) -> str:
    """The metadata of a wheel or of an sdist."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as files:
            (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
            return files.read(name).decode()
    with tarfile.open(package) as archive:
        member = archive.extractfile(f"{package.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert member is not None
        return member.read().decode()


def urls_of(package: Path) -> dict[str, str]:
    return dict(re.findall(r"^Project-URL: (\w+), (\S+)$", metadata(package), re.MULTILINE))


def try_out(python: str, package: Path, version: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run(python, "-m", "venv", place / "env")
        bin_ = place / "env" / "bin"
        run(bin_ / "pip", "install", "--quiet", f"{package}[cli]")
        for arguments, code, text in TRIES:
            found = run(bin_ / "kvbm", *arguments, cwd=place, expect=code, env=ENVIRONMENT.get(arguments[0]))
            if text.format(version=version) not in found:
                raise SystemExit(f"kvbm {' '.join(arguments)} said:\n{found}")
        run(
            bin_ / "python",
            "-c",
            "import kvbm.config, kvbm.engines.session, kvbm.observe.web, kvbm.cli.screen",
            cwd=place,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home-url", type=home_page, metavar="URL", help="the repository that publishes this release")
    home = parser.parse_args().home_url
    wanted = re.search(r'^version = "(.+)"$', (PROJECT / "pyproject.toml").read_text(), re.MULTILINE)
    assert wanted is not None
    version = wanted[1]
    urls = project_urls(home, version) if home else {}
    shutil.rmtree(DIST, ignore_errors=True)
    packages = build(DIST, urls)
    print(*(f"{path.name}  {path.stat().st_size:,} bytes" for path in packages), sep="\n", flush=True)
    if {path.name for path in packages} != {f"kvbm-{version}-py3-none-any.whl", f"kvbm-{version}.tar.gz"}:
        raise SystemExit("expected one wheel and one sdist of this version")
    for package in packages:
        if urls_of(package) != urls:
            raise SystemExit(f"{package.name} has the addresses {urls_of(package)}, expected {urls}")
    print(*(f"{name}  {url}" for name, url in urls.items()), sep="\n", end="\n" if urls else "", flush=True)
    if not urls:
        print(
            "These packages name no home page. For a release: make dist HOME_URL=https://... with the address of the "
            "repository that publishes it",
            flush=True,
        )
    missing = []
    for each in PYTHONS:
        python = find_python(each)
        if python is None:
            missing.append(each)
            continue
        for package in packages:
            try_out(python, package, version)
            print(f"Python {each}  {package.name}  works", flush=True)
    if missing:
        print(f"not tried, because this machine has no Python {', '.join(missing)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
