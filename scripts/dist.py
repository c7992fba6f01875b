#!/usr/bin/env python3
"""Build the wheel and the source distribution, and try both in clean environments of every supported Python.

    python scripts/dist.py                 # what `make dist` does

For each Python of 3.10 to 3.13 that this machine has, and for each of the two files: a new virtual environment, an
installation with its requirements, the command line, and an import of the public module paths. A Python that is missing
is named at the end. The release check list is in CONTRIBUTING.md.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
DIST = PROJECT / "dist"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# What a user of a fresh installation does first. No engine is installed, so doctor finds a fault: exit code 1.
TRIES = (
    (["--version"], 0, "kvbm {version}"),
    (["config", "--changed"], 0, "every setting is at its default"),
    (["doctor", "--quick"], 1, "None of vllm, tensorrt_llm, sglang is installed"),
    (["size", "."], 1, "has no config.json"),
    (["cache", "ls"], 0, ""),
)


def run(*command: object, cwd: Path | None = None, expect: int = 0) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=900)
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


def build() -> list[Path]:
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        python = Path(folder) / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "build", "hatchling")
        run(python, "-m", "build", "--no-isolation", "--outdir", DIST, PROJECT)
    return sorted(DIST.iterdir())


def try_out(python: str, package: Path, version: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run(python, "-m", "venv", place / "env")
        bin_ = place / "env" / "bin"
        run(bin_ / "pip", "install", "--quiet", f"{package}[cli]")
        for arguments, code, text in TRIES:
            found = run(bin_ / "kvbm", *arguments, cwd=place, expect=code)
            if text.format(version=version) not in found:
                raise SystemExit(f"kvbm {' '.join(arguments)} said:\n{found}")
        run(
            bin_ / "python",
            "-c",
            "import kvbm.config, kvbm.engines.session, kvbm.observe.web, kvbm.cli.screen",
            cwd=place,
        )


def main() -> int:
    wanted = re.search(r'^version = "(.+)"$', (PROJECT / "pyproject.toml").read_text(), re.MULTILINE)
    assert wanted is not None
    version = wanted[1]
    packages = build()
    print(*(f"{path.name}  {path.stat().st_size:,} bytes" for path in packages), sep="\n", flush=True)
    if {path.name for path in packages} != {f"kvbm-{version}-py3-none-any.whl", f"kvbm-{version}.tar.gz"}:
        raise SystemExit("expected one wheel and one sdist of this version")
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
