#!/usr/bin/env python3
"""Make the virtual environment for the tests of the SGLang backend: SGLang over the packages of another environment.

    python3 scripts/sglang_env.py --venv .venvs/sglang --base .venv

SGLang's wheel is for GPUs, but HiCache's modules import without one. They import torchvision, whose CUDA build does not
import next to a CPU torch, so a stub of that name takes its place.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from setup_env import StepError, create_venv, installed, pip, say, site_packages

SGLANG = "0.5.23"
ALSO = ("orjson", "ipython", "traitlets")

STAND_IN = '''"""A stub of torchvision for text models: names to import, without functions."""

__version__ = "0.0"


class _Named(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Named(name, (), {})
'''
MODULES = ("", "io", "transforms", "transforms/functional", "transforms/v2", "transforms/v2/functional")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".venvs/sglang"))
    parser.add_argument("--base", type=Path, default=Path(".venv"))
    args = parser.parse_args()
    try:
        create_venv(args.venv, "--without-pip")
        packages = site_packages(args.venv)
        (packages / "base.pth").write_text(f"import site; site.addsitedir({str(site_packages(args.base))!r})\n")
        if not installed(args.venv, f"sglang=={SGLANG}"):
            say(f"installing SGLang {SGLANG} into {args.venv} (about 40 MB)")
            target = ("--no-deps", "--upgrade", "--target", str(packages))
            pip(args.base, "install", *target, f"sglang=={SGLANG}", *ALSO)
        for module in MODULES:
            folder = packages / "torchvision" / module
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").write_text(STAND_IN)
    except StepError as failure:
        print(f"\n{failure}\n", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
