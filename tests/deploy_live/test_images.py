"""The images as far as a machine without Docker and without a GPU can tell: one set of packages, one CUDA."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from conftest import PROJECT

TEXT = (PROJECT / "deploy" / "Containerfile.vllm").read_text()
ARGS = dict(re.findall(r"^ARG (\w+)=(\S+)$", TEXT, re.MULTILINE))
VLLM = ARGS["ENGINE_IMAGE"].rpartition(":v")[2]
INSTALLED = [
    re.sub(r"\$\{(\w+)\}", lambda found: ARGS[found[1]], each) for each in re.findall(r'"([\w-]+[<>=]=?[^"]+)"', TEXT)
]
IMAGE_PYTHON = "3.12"  # of vLLM's image


def uv(*command: object) -> subprocess.CompletedProcess:
    program = Path(sys.executable).with_name("uv")
    if not program.exists():
        pytest.fail("uv is not installed; `make test-deploy` installs it")
    return subprocess.run([program, *map(str, command)], capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def resolved(tmp_path_factory) -> dict[str, str]:
    """Every package of the image with its version, for vLLM's Python and Linux."""
    folder = tmp_path_factory.mktemp("resolved")
    dynamo = f"ai-dynamo[vllm]=={ARGS['DYNAMO_VERSION']}"
    wanted = [f"vllm=={VLLM}", dynamo, f"nixl[cu13]=={ARGS['NIXL_VERSION']}", *INSTALLED, str(PROJECT)]
    (folder / "in.txt").write_text("\n".join(wanted))
    # Dynamo asks for certificates of a certain day; an index that is a few weeks behind does not have them.
    (folder / "override.txt").write_text("certifi\n")
    done = uv(
        "pip", "compile", "--quiet", "--no-python-downloads", "--python-version", IMAGE_PYTHON, "--python-platform",
        "x86_64-manylinux_2_35", "--override", folder / "override.txt", "--no-annotate", folder / "in.txt",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE))


def test_all_packages_of_the_image_go_together(resolved):
    assert resolved["vllm"] == VLLM
    assert resolved["ai-dynamo"] == resolved["ai-dynamo-runtime"] == ARGS["DYNAMO_VERSION"]
    assert {"msgspec", "pyzmq", "xxhash", "numpy"} <= set(resolved)  # KVBM's own


def test_nixl_is_of_the_engines_cuda(resolved):
    cuda = resolved["nvidia-cuda-runtime"].split(".")[0]
    assert f"nixl-cu{cuda}" in {each.partition("==")[0] for each in INSTALLED}
    assert not [each for each in INSTALLED if each.startswith("nixl-cu") and not each.startswith(f"nixl-cu{cuda}=")]
    assert resolved["nixl"] == resolved[f"nixl-cu{cuda}"] == ARGS["NIXL_VERSION"]


def test_what_is_installed_without_its_requirements_has_them(resolved):
    """The Containerfile installs these by hand, because pip must not touch the engine's packages."""
    for each in INSTALLED:
        name, sign, version = re.fullmatch(r"([\w-]+)([<>=]=?)(.+)", each).groups()
        found = tuple(map(int, resolved[name].split(".")[:3]))
        bound = tuple(map(int, version.split(".")))
        good = {"==": resolved[name] == version, "<": found < bound, "<=": found <= bound, ">=": found >= bound}
        assert good[sign], f"{each}, but the image has {name} {resolved[name]}"


def test_nixl_loads_under_cuda_13(tmp_path):
    """A clean environment with the packages of the image, and a stub of torch that says CUDA 13."""
    venv.create(tmp_path / "env", with_pip=True)
    venv_python = tmp_path / "env" / "bin" / "python"
    alone = [each for each in INSTALLED if each.startswith("nixl")]
    install = [venv_python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "--no-deps", *alone], check=True, timeout=600)
    subprocess.run([*install, "numpy", str(PROJECT)], check=True, timeout=600)
    stub = tmp_path / "stub" / "torch"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text(
        "import types\n__version__ = '2.13.0'\nversion = types.SimpleNamespace(cuda='13.0')\n"
        "Tensor = type('Tensor', (), {})\ndevice = dtype = object\n"
        "cuda = types.SimpleNamespace(is_available=lambda: False)\n"
    )
    program = (
        "import sys, nixl, kvbm\n"
        "loaded = sorted(name for name in sys.modules if name.startswith('nixl_cu') and '.' not in name)\n"
        "from nixl._api import nixl_agent\nprint(loaded, nixl_agent.__module__.split('.')[0], kvbm.__version__)\n"
    )
    done = subprocess.run(
        [venv_python, "-c", program], capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": str(stub.parent), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['nixl_cu13']"), done.stdout
