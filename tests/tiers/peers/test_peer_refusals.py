"""What a peer must not get, and what must not be taken from one: each is refused and counted."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from peer_member import CACHE, SECRET, Member, Reader, content, key

from kvbm.tiers.peers import client, wire
from kvbm.tiers.peers.client import Identity, Link, Peer
from kvbm.tiers.peers.serving import KINDS, FairShare
from kvbm.tiers.peers.sources import refusals
from kvbm.tiers.peers.wire import VERSION, Ask, Channel, PeerError, Who, authenticate_client


def counted(member, kind) -> int:
    return member.counters()[8 + KINDS.index(kind)]


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def me(secret=SECRET, **cache) -> Identity:
    return Identity(Who(VERSION, {**CACHE, **cache}), "another machine", secret, 0, 60.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel 1 here and 2 there"),
        ({"layout": "4*f32"}, "layout '2\\*f32' here and '4\\*f32' there"),
        ({"weights": "5678"}, "weights '1234' here and '5678' there"),
    ],
)
@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_another_cache_is_refused_with_a_sentence(member, way, change, sentence):
    with pytest.raises(PeerError, match=sentence):
        Link.open(getattr(member, way).address, me(**change), 60)
    wait_for(lambda: counted(member, "fingerprint") == 1)


def test_a_client_without_the_secret_learns_nothing(member):
    with pytest.raises(PeerError, match="does not know the secret"):
        Link.open(member.tcp.address, me("another secret of the tests"), 60)
    # A client that does not mind, and goes on.
    connection = socket.create_connection(client.split_address(member.tcp.address))
    channel = Channel(connection, 60)
    channel.send(wire.Hello(VERSION, os.urandom(32), wire._key_pair()[1]))
    channel.receive(wire.Challenge)
    channel.send(wire.Proof(os.urandom(32)))
    with pytest.raises(PeerError):
        channel.receive(wire.About)
    channel.close()
    wait_for(lambda: counted(member, "secret") == 1)


def test_a_server_without_the_secret_gets_no_proof():
    """The server proves first: an address that a router names wrongly learns nothing either."""
    listener = socket.create_server(("127.0.0.1", 0))
    got = []

    def impostor():
        connection, _ = listener.accept()
        channel = Channel(connection, 60)
        channel.receive(wire.Hello)
        channel.send(wire.Challenge(os.urandom(32), wire._key_pair()[1], os.urandom(32)))
        got.append(connection.recv(1))
        connection.close()

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(PeerError, match="does not know the secret"):
        Link.open("{}:{}".format(*listener.getsockname()), me(), 60)
    thread.join()
    assert got == [b""]
    listener.close()


class Tap:
    """Stands between a client and a server, keeps what the client sends and may change what comes back."""

    def __init__(self, address, change=None) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self.listener.getsockname())
        self.sent = bytearray()
        self.change = change
        self._to = client.split_address(address)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._to)
            threading.Thread(target=self._pass, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()

    def _pass(self, source, target, is_client) -> None:
        passed = 0
        try:
            while data := source.recv(1 << 16):
                if is_client:
                    self.sent += data
                elif self.change is not None:
                    data = self.change(bytearray(data), passed)
                passed += len(data)
                target.sendall(data)
        except OSError:
            pass
        finally:
            target.close()

    def close(self) -> None:
        self.listener.close()


def test_a_recorded_conversation_is_refused(member):
    member.store(1)
    tap = Tap(member.tcp.address)
    peer = Peer(member.tcp.__class__(tap.address), me())
    assert peer.ask([key(1)], 60) == [True]
    with socket.create_connection(client.split_address(member.tcp.address)) as replay:
        replay.sendall(tap.sent)
        replay.settimeout(60)
        answers = b""
        with contextlib.suppress(ConnectionResetError):
            while data := replay.recv(1 << 16):
                answers += data
    assert len(answers) < 300  # the challenge of this connection, and no answer
    wait_for(lambda: counted(member, "secret") == 1)
    peer.close()
    tap.close()


def test_a_repeated_frame_is_refused(member):
    member.store(1)
    connection = socket.create_connection(client.split_address(member.tcp.address))
    channel = Channel(connection, 60)
    authenticate_client(channel, SECRET)
    channel.send(me().who)
    channel.receive(wire.About)
    frames = []
    send_all = channel._send_all
    channel._send_all = lambda data: (frames.append(bytes(data)), send_all(data))
    channel.send(Ask(key(1)))
    assert channel.receive(wire.Answer).found == b"\1"
    send_all(frames[0])
    with pytest.raises(PeerError):
        channel.receive(wire.Answer)
    channel.close()
    wait_for(lambda: counted(member, "damaged") == 1)


def test_a_bit_that_flips_on_the_way_is_refused(member):
    member.store(1)

    def flip(data, passed):
        if passed + len(data) > 20_000 and not done:
            data[-1] ^= 1
            done.append(True)
        return data

    done: list = []
    tap = Tap(member.tcp.address, flip)
    reader = Reader([member.tcp.__class__(tap.address)])
    assert reader.read([1]).bad == [0]
    assert refusals(reader.counts()) == {"damaged": 1}
    assert reader.read([1]).bad == []  # over a new connection
    reader.close()
    tap.close()


def test_a_bit_that_flips_in_a_neighbours_memory_is_refused(member):
    member.store(1)
    reader = Reader([member.unix])
    assert reader.read([1]).bad == []
    at = member.address(member.slot_of(1)) + 1000
    ctypes.memset(at, ctypes.string_at(at, 1)[0] ^ 4, 1)
    assert reader.read([1]).bad == [0]
    assert refusals(reader.counts()) == {"damaged": 1}
    reader.close()


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_block_that_is_withdrawn_while_it_is_copied_is_refused(run_dir, way, monkeypatch):
    """The source withdraws the block at the worst moment. Sixteen blocks are more than sockets hold."""
    member = Member(run_dir, slots=4, slot_bytes=2 << 20)
    member.store(1, 2)
    reader = Reader([getattr(member, way)], slot_bytes=2 << 20)
    if way == "unix":
        copy = client.copy_and_sum

        def overwritten(target, source, size, name):
            total = copy(target, source, size, name)
            if name == key(1):
                member.pool.drop([key(1)])
            return total

        monkeypatch.setattr(client, "copy_and_sum", overwritten)
    else:
        receive = Channel.receive_block

        def overwritten(channel, target, bound):
            if bound.startswith(key(1)):
                member.pool.drop([key(1)])
            receive(channel, target, bound)

        monkeypatch.setattr(Channel, "receive_block", overwritten)
    operation = reader.read([1, 2] * 8)
    assert set(operation.bad) <= set(range(0, 16, 2))
    assert operation.bad
    assert reader.block(1) == content(2, member.slot_bytes)
    assert refusals(reader.counts()) == {"withdrawn": len(operation.bad)}
    reader.close()
    member.close()


def test_a_leased_block_is_evicted_last(member):
    member.store(*range(member.slots))
    reader = Reader([member.tcp])
    last = member.slots - 1  # the first to be evicted
    assert reader.read([last]).bad == []
    member.store("new")
    assert member.slot_of(last) is not None
    assert member.slot_of(last - 1) is None
    reader.close()


def test_a_source_that_is_killed_costs_the_blocks_and_no_more(run_dir):
    member = Member(run_dir, slots=64, slot_bytes=256 << 10)
    member.server._closing.set()  # do not start it anew
    member.store(*range(64))
    reader = Reader([member.tcp], blocks=64, slot_bytes=256 << 10)
    operation = reader.begin(range(64))
    os.kill(member.server.pid, signal.SIGKILL)
    assert operation.wait(60)
    good = [i for i in range(64) if i not in operation.bad]
    assert all(reader.block(i) == content(i, 256 << 10) for i in good)
    assert reader.read([0]).bad == [0]
    reader.close()
    member.close()


def test_no_listener_but_the_configured_one(run_dir):
    member = Member(run_dir, listen="")
    files = [os.readlink(f"/proc/{member.server.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{member.server.pid}/fd")]
    inodes = {file.removeprefix("socket:[").rstrip("]") for file in files if file.startswith("socket:")}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    assert [line[1] for line in lines if line[9] in inodes] == []
    assert os.stat(member.server.path).st_mode & 0o777 == 0o600
    member.close()


def test_the_server_needs_no_torch():
    code = "import kvbm.tiers.peers.server, sys; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_an_idle_server_uses_no_cpu(member):
    member.store(1)
    readers = [Reader([source]) for source in (member.tcp, member.unix)]
    assert all(reader.read([1]).bad == [] for reader in readers)

    def ticks():
        fields = Path(f"/proc/{member.server.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def is_idle():
        before = ticks()
        time.sleep(1)
        return ticks() - before <= 1  # of 100: one percent of a core

    assert any(is_idle() for _ in range(30))  # what it has been asked to do may take it a while
    for reader in readers:
        reader.close()


def test_a_reader_that_is_killed_in_the_middle_leaves_the_source_as_it_was(run_dir):
    member = Member(run_dir, slots=64, slot_bytes=256 << 10)
    member.store(*range(64))
    files = len(os.listdir(f"/proc/{member.server.pid}/fd"))
    child = os.fork()
    if child == 0:
        reader = Reader([member.tcp], blocks=64, slot_bytes=256 << 10)
        while True:
            reader.read(range(64))
    time.sleep(1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_for(lambda: len(os.listdir(f"/proc/{member.server.pid}/fd")) <= files)
    reader = Reader([member.tcp], blocks=64, slot_bytes=256 << 10)
    assert reader.read(range(64)).bad == []
    reader.close()
    member.close()


def test_machines_share_a_limited_rate_in_turn():
    """One machine waits with four connections, another with two: they take turns."""
    share, order = FairShare(bytes_per_second=1e6), []

    def read(machine, size):
        share.wait(machine, size)
        order.append(machine)

    def start(machine, size=50_000):
        threads.append(threading.Thread(target=read, args=(machine, size)))
        threads[-1].start()

    threads: list[threading.Thread] = []
    start("first", 2_000_000)  # two seconds, in which the others come
    for machine in ("many", "many", "many", "many", "one", "one"):
        start(machine)
    wait_for(lambda: sum(map(len, share._waiting.values())) == 6)
    for thread in threads:
        thread.join()
    assert order == ["first", "many", "one", "many", "one", "many", "many"]


def test_the_server_gives_way_to_its_engine(run_dir):
    """By the nice value of its session too: where the kernel groups these, that of a thread counts inside one."""
    own = Path("/proc/self/autogroup")
    before = own.read_text() if own.exists() else ""
    member = Member(run_dir, nice=7)
    pid = member.server.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == 7
    if before:
        assert Path(f"/proc/{pid}/autogroup").read_text().split()[-2:] == ["nice", "7"]
        assert own.read_text() == before
    member.close()
