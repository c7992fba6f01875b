"""A signal ends `vllm serve` also while it starts, with every process below it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvbm.engines.vllm.start_signals import end_start_on_signals
from kvbm.processes import PARENT, STARTED, command_line, running, stat
from servers import PROJECT

# As vLLM: the signal becomes a KeyboardInterrupt, which a wait catches. A grandchild stands for a worker that is busy.
SCRIPT = """
import os, signal, subprocess, sys, time
from kvbm.engines.vllm import start_signals
start_signals.GRACE_SECONDS = 0.2

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, interrupt)
start_signals.end_start_on_signals(["vllm", "serve", "m", "--kv-transfer-config", "{}"])
busy = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {busy!r}]).wait()"
if sys.argv[1] != "serves":
    below = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
    below.stdout.readline()

def wait():
    try:
        print("on", flush=True)  # here, so that no signal comes earlier
        time.sleep(600)
    except KeyboardInterrupt:
        print("caught", flush=True)

if sys.argv[1] == "has served":
    code = {"__name__": "uvicorn.server", "signal": signal}
    exec("def end(): signal.raise_signal(15)", code)
    print("on", flush=True)
    for again in (code["end"], lambda: signal.raise_signal(15)):
        try:
            again()
        except KeyboardInterrupt:
            time.sleep(3 * start_signals.GRACE_SECONDS)
            print("cleans up", flush=True)
    below.kill()
    os.killpg(0, signal.SIGKILL)
wait()
while sys.argv[1] == "waits":
    time.sleep(600)
if sys.argv[1] == "ends":
    below.terminate()
else:
    signal.signal(signal.SIGTERM, lambda *_: (print("in order", flush=True), os._exit(0)))
    time.sleep(600)
"""


def run(what: str, signalled: bool = True) -> tuple[int, str]:
    """(exit code, what was printed), when every process has ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, what], env={**os.environ, "PYTHONPATH": str(PROJECT / "src")},
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "on\n"
        if signalled:
            process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        deadline = time.monotonic() + 60
        while _group(process.pid):
            assert time.monotonic() < deadline, "processes are left"
            time.sleep(0.05)
        return code, process.stdout.read()
    finally:
        for pid in _group(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.stdout.close()


def _group(leader: int) -> list[int]:
    """The processes of a group that still run."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            state, _, group = (each / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(group) == leader and state != "Z":
            found.append(int(each.name))
    return found


def test_a_start_that_goes_on_is_ended_with_all_its_processes():
    assert run("waits") == (128 + signal.SIGTERM, "caught\n")


def test_processes_that_are_left_behind_are_ended():
    assert run("ends") == (0, "caught\n")


def test_a_server_that_runs_by_then_ends_in_order():
    assert run("serves") == (0, "caught\nin order\n")


def test_a_server_that_has_served_is_left_alone():
    assert run("has served", signalled=False) == (-signal.SIGKILL, "cleans up\ncleans up\n")


@pytest.mark.parametrize("argv", [["python", "script.py"], ["vllm", "bench"]])
def test_other_programs_keep_their_handlers(argv):
    before = signal.getsignal(signal.SIGINT)
    end_start_on_signals(argv)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_kernel_tells_the_parent_and_the_start_of_a_process():
    def uptime():
        return float(Path("/proc/uptime").read_text().split()[0])

    before = uptime()
    program = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:  # its end closes the pipe
        fields, after = stat(child.pid), uptime()
        assert child.stdout.readline() == b"\n"  # the kernel shows a program's arguments some time after its start
        assert child.pid in running()
        assert command_line(child.pid) == [*program, ""]
        child.kill()
    assert int(fields[PARENT]) == os.getpid()
    assert before - 0.02 <= int(fields[STARTED]) / os.sysconf("SC_CLK_TCK") <= after + 0.02
    assert (stat(child.pid), command_line(child.pid)) == ([], [])
