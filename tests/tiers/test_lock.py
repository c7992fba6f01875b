"""Locks on files end with the process that took them."""

from __future__ import annotations

import subprocess
import sys

from kvbm.tiers.lock import FileLock, is_locked

# One thread waits for the lock, the main thread forks, and the process dies with the lock; the child lives on.
FORK_WHILE_WAITING = """
import os, sys, threading, time
from pathlib import Path
from kvbm.tiers import lock
path, waiting, sleep, got = Path(sys.argv[1]), threading.Event(), time.sleep, []
def pause(seconds):
    waiting.set()
    sleep(seconds)
lock.time.sleep = pause
first = lock.FileLock(path)
thread = threading.Thread(target=lambda: got.append(lock.FileLock(path, patience=60)))
thread.start()
waiting.wait()
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
first.release()
thread.join()
assert lock.is_locked(path)
os._exit(len(got))
"""


def test_a_child_forked_while_a_thread_waits_does_not_keep_the_lock(tmp_path):
    path = tmp_path / "lock"
    script = [sys.executable, "-c", FORK_WHILE_WAITING, str(path)]
    with subprocess.Popen(script, stdin=subprocess.PIPE) as engine:
        assert engine.wait(60) == 1
        assert not is_locked(path)


def test_a_child_that_closes_its_copy_leaves_the_lock_to_its_parent(tmp_path):
    script = (
        "import os, sys; from pathlib import Path; from kvbm.tiers.lock import FileLock, is_locked\n"
        "path = Path(sys.argv[1])\n"
        "mine = FileLock(path)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    mine.release()\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "assert is_locked(path)\n"
        "mine.release()\n"
        "assert not is_locked(path)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "lock")], check=True, timeout=60)


def test_a_lock_that_was_not_had_leaves_no_file_open(tmp_path):
    path = tmp_path / "lock"
    held = FileLock(path)
    try:
        lock = FileLock.__new__(FileLock)
        try:
            lock.__init__(path)  # type: ignore[misc]
        except OSError:
            assert lock._file.closed
        else:
            raise AssertionError("two had the lock")
    finally:
        held.release()
