"""The server of a dead engine serves on, and its successor gets its address however long its process takes to end."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from peer_member import Member

from kvbm.tiers.peers.server import _let_go, _listen
from servers import free_port

# As an end with NIXL on a busy machine, and as that of a process whose memory takes the kernel long to free.
SLOW = {
    "interpreter": "import atexit, time\natexit.register(time.sleep, 600)\n",
    "kernel": "import os, time\nos._exit = lambda status: time.sleep(600)\n",
    "handle": "import os, time\nopen_ = os.pidfd_open\nos.pidfd_open = lambda pid: (time.sleep(3), open_(pid))[1]\n",
}


@pytest.fixture
def orphan(run_dir, tmp_path, monkeypatch):
    """Makes a server whose engine is dead, and whose process is slow in one thing."""
    made = []

    def make(slow: str, listen: str = "127.0.0.1:0") -> Member:
        folder = tmp_path / "slow"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(SLOW[slow])
        engine = subprocess.Popen(["sleep", "600"])
        with monkeypatch.context() as environment:
            environment.setenv("PYTHONPATH", str(folder), prepend=":")
            member = Member(run_dir, listen=listen, name="a", engine=engine.pid)
        made.append(member)
        member.server._closing.set()  # do not start it anew
        engine.kill()
        engine.wait()
        deadline, log = time.monotonic() + 60, Path(run_dir / f"{member.generation}.log")
        while "is dead" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return member

    yield make
    for member in made:
        member.server._process.kill()
        member.close()


def test_the_engine_may_die_as_soon_as_its_server_is_ready(orphan):
    assert orphan("handle").server._process.poll() is None


@pytest.mark.parametrize("end", ["interpreter", "kernel"])
def test_a_successor_gets_the_address_while_the_orphans_process_ends(orphan, run_dir, end):
    listen = f"127.0.0.1:{free_port()}"
    before = orphan(end, listen)
    assert before.server.address == listen
    heir = Member(run_dir, listen=listen, name="a")
    assert heir.server.address == listen
    heir.close()


def test_the_process_of_an_orphan_ends_without_the_interpreters_end(orphan, run_dir):
    before = orphan("interpreter")
    Member(run_dir, name="a").close()
    before.server._process.wait(60)


def test_a_port_is_free_while_a_thread_accepts():
    listener = _listen("127.0.0.1", free_port())
    host, port = listener.getsockname()
    ended = []

    def accept():
        listener.accept()[0].close()
        try:
            listener.accept()
        except OSError as error:
            ended.append(error)

    thread = threading.Thread(target=accept)
    thread.start()
    with socket.create_connection((host, port)) as connection:
        connection.recv(1)  # the thread is in its loop
    _let_go(listener)
    _listen(host, port).close()
    thread.join(60)
    assert len(ended) == 1
