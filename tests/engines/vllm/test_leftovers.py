"""The watch over what a test run leaves behind notices what it is there for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LEAVES = {
    "process": "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)",
    "temporary file": "import tempfile; tempfile.mkstemp()",
    "shared memory": "open('/dev/shm/kvbm-left-behind', 'w').close()",
    "": "open('/dev/shm/vllm_dist_kvbm-left-behind', 'w').close()",
}
# What another program makes meanwhile, or vLLM: the run is not to blame for it, and does not touch it.
OTHERS = Path("/dev/shm/another-program")
VLLMS = Path("/dev/shm/vllm_dist_kvbm-left-behind")


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind or "nothing")
def test_a_run_that_leaves_something_behind_fails(kind, tmp_path):
    others = f"open({str(OTHERS)!r}, 'w').close()"
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    {LEAVES[kind]}\n    {others}\n")
    (tmp_path / "conftest.py").write_text("import leftovers\nfrom leftovers import *\nleftovers.PATIENCE_SECONDS = 1\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path)]
    try:
        done = subprocess.run(
            command, env={"PYTHONPATH": str(Path(__file__).parents[2])}, capture_output=True, text=True, timeout=60
        )
    finally:
        Path("/dev/shm/kvbm-left-behind").unlink(missing_ok=True)
        untouched = OTHERS.exists()
        OTHERS.unlink(missing_ok=True)
        untouched = untouched and VLLMS.exists() is not bool(kind)
        VLLMS.unlink(missing_ok=True)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert untouched
    assert (done.returncode == 1) is bool(kind), done.stdout
    assert ("left behind" in done.stdout) is bool(kind)
    assert kind in done.stdout
    for line in done.stdout.splitlines():
        if line.startswith("process "):
            subprocess.run(["kill", line.split()[1].rstrip(":")], check=True)
