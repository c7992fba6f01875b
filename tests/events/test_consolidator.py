"""The consolidator as a process: its formats, its numbers, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from kvbm import config as settings
from kvbm.core.keys import Scope
from kvbm.core.pool import Pool
from kvbm.events import launch
from kvbm.events.zmq_publisher import ZmqPublisher
from servers import free_port
from tiernames import HOST

PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(settings.__file__)))


def stored(names, tokens, parent=None, medium="GPU"):
    return {
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": 2, "medium": medium,
    }  # fmt: skip


def removed(names, medium="GPU"):
    return {"type": "BlockRemoved", "block_hashes": names, "medium": medium}


@pytest.mark.skipif(os.getuid() != 0, reason="takes the place of another user")
def test_our_own_events_are_for_processes_of_the_same_user():
    script = (
        "import os, sys, zmq\nos.setuid(int(sys.argv[2]))\ncontext = zmq.Context()\nsocket = context.socket(zmq.SUB)\n"
        "socket.subscribe(b'')\nsocket.connect(sys.argv[1])\nprint('connected', flush=True)\n"
        "print('heard' if socket.poll(int(sys.argv[3]) * 1000) else 'nothing')\ncontext.destroy(linger=0)"
    )
    pool = Pool(1)
    outlet = ZmqPublisher({HOST: pool}, block_size=2, rank=77)
    key = b"k" * 32
    pool.commit(pool.reserve([key]))
    outlet.follow([key], [1, 2], 0, 1, Scope())
    # The stranger comes first and waits until our own user has heard something.
    listeners = [
        subprocess.Popen(
            [sys.executable, "-c", script, outlet.endpoint, user, seconds], stdout=subprocess.PIPE, text=True
        )
        for user, seconds in (("12345", "3"), (str(os.getuid()), "60"))
    ]
    try:
        assert [listener.stdout.readline() for listener in listeners] == ["connected\n"] * 2
        deadline = time.monotonic() + 60
        while any(listener.poll() is None for listener in listeners) and time.monotonic() < deadline:
            outlet.ledger.tell_again()
            outlet.pump()
            time.sleep(0.02)
        assert [listener.stdout.read() for listener in listeners] == ["nothing\n", "heard\n"]
    finally:
        for listener in listeners:
            listener.kill()
            listener.wait()
            listener.stdout.close()
        outlet.close()


class Setup:
    """An engine's publisher, our own, the consolidator between them and a subscriber."""

    def __init__(self, folder, mode, *more):
        self.context = zmq.Context()
        self.numbers = {}
        self.publishers = {}
        arguments = ["--mode", mode, "--output", f"ipc://{folder}/out", *more]
        for name in ("engine", "kvbm"):
            socket = self.publishers[name] = self.context.socket(zmq.PUB)
            socket.bind(f"ipc://{folder}/{name}")
            arguments += [f"--{name}", f"ipc://{folder}/{name}"]
        self.subscriber = self.context.socket(zmq.SUB)
        self.subscriber.subscribe(b"")
        self.subscriber.connect(f"ipc://{folder}/out")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvbm.events.consolidator", *arguments],
            env={**os.environ, "PYTHONPATH": PACKAGE_ROOT},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.meet()

    def meet(self):
        """Publish until both ways are open: a subscriber that joins late misses what was sent before."""
        for name in self.publishers:
            deadline = time.monotonic() + 120
            while True:
                self.send(name, [stored([99], [7, 7], medium=name), removed([99], name)], number=False)
                if self.hear(0.2):
                    break
                assert time.monotonic() < deadline, "nothing comes through"
            # Behind this one nothing of the above is on its way any more.
            self.send(name, [stored([98], [8, 8], medium=name), removed([98], name)], number=False)
            while not any(event["type"] == "BlockRemoved" and event["block_hashes"] == [98] for event in self.events()):
                assert time.monotonic() < deadline, "nothing comes through"

    def send(self, name, events, rank=0, number=True, skip=0):
        frames = [b"kv-events"]
        if number:
            self.numbers[name] = self.numbers.get(name, -1) + 1 + skip
            frames.append(self.numbers[name].to_bytes(8, "big"))
        self.publishers[name].send_multipart([*frames, msgspec.msgpack.encode([time.time(), events, rank])])

    def hear(self, seconds=60.0):
        """The next message as (frames, decoded), None when there is none."""
        if not self.subscriber.poll(seconds * 1000):
            return None
        frames = self.subscriber.recv_multipart()
        return frames, msgspec.msgpack.decode(frames[-1])

    def events(self, seconds=60.0):
        heard = self.hear(seconds)
        return [] if heard is None else heard[1][1]

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)
        self.process.stderr.close()
        self.context.destroy(linger=0)


@pytest.fixture
def setup(tmp_path, request):
    made = Setup(tmp_path, *getattr(request, "param", ("dedup",)))
    yield made
    made.close()


def test_two_streams_become_one(setup):
    setup.send("engine", [stored([1, 2], [1, 2, 3, 4])])
    frames, (at, events, rank) = setup.hear()
    assert frames[0] == b""
    assert len(frames) == 3
    assert abs(at - time.time()) < 60
    assert rank == 0
    assert [event["block_hashes"] for event in events] == [[1], [2]]
    first = int.from_bytes(frames[1], "big")
    setup.send("kvbm", [stored([1, 2], [1, 2, 3, 4], medium="CPU")])
    assert setup.hear(0.5) is None
    setup.send("engine", [removed([1, 2], "GPU")])
    assert setup.hear(0.5) is None
    setup.send("kvbm", [removed([2], "CPU")])
    frames, (_, events, _) = setup.hear()
    assert [event["block_hashes"] for event in events] == [[2]]
    assert int.from_bytes(frames[1], "big") == first + 1


def test_every_data_parallel_rank_has_its_own_blocks(setup):
    setup.send("engine", [stored([1], [1, 2])], rank=0)
    setup.send("engine", [stored([1], [1, 2])], rank=3)
    heard = [setup.hear()[1], setup.hear()[1]]
    assert sorted(rank for _, _, rank in heard) == [0, 3]
    assert [events[0]["block_hashes"] for _, events, _ in heard] == [[1], [1]]
    setup.send("engine", [removed([1], "GPU")], rank=3)
    assert setup.hear()[1][2] == 3


@pytest.mark.parametrize("setup", [("passthrough",)], indirect=True)
def test_passthrough_keeps_the_tier(setup):
    setup.send("kvbm", [stored([1], [1, 2], medium="CPU"), stored([1], [1, 2], medium="STORAGE")])
    assert [event["medium"] for event in setup.events()] == ["CPU_TIER1", "CPU_TIER2"]


def test_after_a_gap_nothing_is_believed_that_may_be_gone(setup):
    setup.send("engine", [stored([1], [1, 2])])
    setup.send("kvbm", [stored([5], [5, 6], medium="CPU")])
    found = setup.events()
    while len(found) < 2:
        found += setup.events()
    assert len(found) == 2
    setup.send("engine", [stored([9], [9, 9])], skip=3)
    found = setup.events()
    assert [(event["type"], event["block_hashes"]) for event in found] == [("BlockRemoved", [1]), ("BlockStored", [9])]


def test_a_broken_message_breaks_nothing(setup):
    for payload in (
        b"",
        b"\xc1",
        msgspec.msgpack.encode(5),
        msgspec.msgpack.encode([1.0, 7, 0]),
        b"\x93" + b"\xff" * 99,
    ):
        setup.publishers["engine"].send_multipart([b"", payload])
    setup.send("engine", [stored([1], [1, 2])])
    assert [event["block_hashes"] for event in setup.events()] == [[1]]


def test_it_ends_with_the_engine():
    """A consolidator whose parent is gone does not stay behind."""
    script = (
        "import subprocess, sys, os; "
        "p = subprocess.Popen([sys.executable, '-m', 'kvbm.events.consolidator', '--parent', str(os.getpid()), "
        "'--output', 'tcp://127.0.0.1:*', '--engine', 'tcp://127.0.0.1:1'], stderr=subprocess.PIPE, text=True); "
        "p.stderr.readline(); print(p.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": PACKAGE_ROOT},
    )  # fmt: skip
    pid = int(done.stdout)
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.05)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_taken_port_is_said_and_costs_nothing_else(monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", PACKAGE_ROOT)
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        config = settings.load({"leader_zmq_pub_port": port - 1000}, environ={}, files=())
        started = launch.start(config, ["tcp://127.0.0.1:1"])
        assert started is not None
        assert started._process.wait(120) == 1
        started.close()
    said = capfd.readouterr().err
    assert f"tcp://127.0.0.1:{port}" in said
    assert "DYN_KVBM_LEADER_ZMQ_PUB_PORT + 1000" in said


@pytest.mark.parametrize(
    ("how", "told"), [(signal.SIGKILL, ["the consolidator of KV events has ended"]), (signal.SIGTERM, []), (None, [])]
)
def test_a_consolidator_that_dies_is_spoken_of_once(monkeypatch, caplog, how, told):
    monkeypatch.setenv("PYTHONPATH", PACKAGE_ROOT)
    counted, port = [], free_port()
    config = settings.load({"leader_zmq_pub_port": port - 1000}, environ={}, files=())
    started = launch.start(config, ["tcp://127.0.0.1:1"], count=counted.append)
    assert started is not None
    watch = next(thread for thread in threading.enumerate() if thread.name == "kvbm-consolidator-watch")
    if how is not None:
        os.kill(started._process.pid, how)
    else:
        started.close()
    watch.join(60)
    assert not watch.is_alive()
    started.close()
    assert counted == told
    assert caplog.text.count(f"no more events of this engine on tcp://127.0.0.1:{port}") == len(told)


def test_each_rank_publishes_on_a_port_of_its_own():
    config = settings.load({}, environ={}, files=())
    assert [launch.output_endpoint(config, rank) for rank in (0, 1)] == [
        "tcp://127.0.0.1:57001",
        "tcp://127.0.0.1:57002",
    ]
