"""The watch over what a test run leaves behind notices what it is there for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEAVES = {
    "process": "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)",
    "temporary file": "import tempfile; tempfile.mkstemp()",
    "shared memory": "open('SHM/kvbm-left-behind', 'w').close()",
    "": "open('SHM/vllm_dist_kvbm-left-behind', 'w').close()",
}
# What another program makes meanwhile, or vLLM: the run is not to blame for it, and does not touch it.
OTHERS, VLLMS = ("another-program", "kvbm-bench-beside"), "vllm_dist_kvbm-left-behind"


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind or "nothing")
def test_a_run_that_leaves_something_behind_fails(kind, workers, tmp_path):
    pytest.importorskip("xdist")
    shm = tmp_path / "shm"  # in place of /dev/shm, which other runs of these tests use as well
    shm.mkdir()
    others = "; ".join(f"open({str(shm / name)!r}, 'w').close()" for name in OTHERS)
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    {LEAVES[kind].replace('SHM', str(shm))}\n    {others}\n")
    (tmp_path / "conftest.py").write_text(
        "import leftovers\nfrom pathlib import Path\nfrom leftovers import *\nleftovers.PATIENCE_SECONDS = 1\n"
        f"leftovers.SHARED_MEMORY = Path({str(shm)!r})\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path)]
    command += ["-n", str(workers)]
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    untouched = all((shm / name).exists() for name in OTHERS) and (shm / VLLMS).exists() is not bool(kind)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert untouched
    assert (done.returncode == 1) is bool(kind), done.stdout
    assert ("left behind" in done.stdout) is bool(kind)
    assert kind in done.stdout
    for line in done.stdout.splitlines():
        if line.startswith("process "):
            subprocess.run(["kill", line.split()[1].rstrip(":")], check=True)
