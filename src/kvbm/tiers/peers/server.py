"""The server beside an engine: maps its memory read-only and serves it to peers. A process of its own.

    python -m kvbm.tiers.peers.server FILE      # a file handle, from which it reads its :class:`Setup`

The leader starts it. When the engine dies, the server is an *orphan*: it serves what was valid until then, until an
engine that takes the dead one's place dismisses it, or ``orphan_seconds`` have passed. When the engine ends by itself,
its last word is `end`, and the server goes with it.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import mmap
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from kvbm.tiers.host.shared import map_ahead
from kvbm.tiers.peers.board import Board, read_only
from kvbm.tiers.peers.finder import Source
from kvbm.tiers.peers.finding.member_lists import SUFFIX
from kvbm.tiers.peers.finding.registration import Registry, register
from kvbm.tiers.peers.nixl_path import api
from kvbm.tiers.peers.serving import CONNECTIONS, Serving
from kvbm.tiers.peers.wire import About, Answer, Channel, Dismiss, PeerError, authenticate_server, digest

logger = logging.getLogger("kvbm.peers")

MAX_CONNECTIONS = 256
MAX_STRANGERS = 16  # connections that have not proved the secret yet
HANDSHAKE_SECONDS = 5.0
LOG_SUFFIX = ".log"
_TAKEOVER_SECONDS = 5.0
_CREDENTIALS = struct.Struct("3i")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What the leader hands to its server."""

    engine: int  # process
    control: int  # file: a socket; the leader's end says "end"
    board: int
    leases: int
    slabs: list[int]
    slots: int
    slot_bytes: list[int]
    fingerprint: dict[str, str | int]
    member: str
    machine: str
    generation: str
    directory: str
    listen: str = ""  # host:port
    advertise: str = ""  # host:port at which others reach it; empty: where it listens
    registry: Registry = Registry()
    secret: str = ""
    seconds: float = 1.0
    orphan_seconds: float = 600.0
    bytes_per_second: float = 0.0
    nice: int = 0
    nixl: bool = False


class Ready(msgspec.Struct, frozen=True):
    """The server's first word to the leader."""

    address: str  # empty: no TCP
    path: str
    problem: str = ""


class Server:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._is_orphan = False
        self._ending = threading.Event()
        self._wake, self._woken = os.pipe()
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self.path = str(Path(setup.directory) / (setup.generation + SUFFIX))
        self.about = About(
            setup.member, setup.machine, setup.generation, self.path, setup.slots, setup.slot_bytes,
            nixl=setup.nixl and api() is not None,
        )  # fmt: skip
        board = Board(setup.board, setup.leases, setup.slots)
        slabs = [
            mmap.mmap(file, setup.slots * size, access=mmap.ACCESS_READ)
            for file, size in zip(setup.slabs, setup.slot_bytes, strict=True)
        ]
        self.serving = Serving(
            board, slabs, self.about, setup.fingerprint,
            seconds=setup.seconds, bytes_per_second=setup.bytes_per_second, on_dismiss=self._dismissed,
        )  # fmt: skip
        for slab in slabs:
            address = np.frombuffer(slab, np.uint8).ctypes.data
            self._spawn(map_ahead, address, len(slab), self._ending.is_set)
        self.serving.files = [read_only(file) for file in (setup.board, *setup.slabs)]

    def run(self) -> None:
        setup = self._setup
        engine = os.pidfd_open(setup.engine)  # before the first word: the engine may die as soon as it has that
        dismiss_orphans(setup.directory, setup.member, digest(setup.fingerprint))
        local = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        local.bind(self.path)
        os.chmod(self.path, 0o600)
        local.listen(MAX_CONNECTIONS)
        self._spawn(self._accept, local, self._greet_neighbour)
        address, problem, remote = "", "", None
        if setup.listen:
            try:
                remote = _bind(setup.listen)
                address = join_address(*remote.getsockname()[:2])
            except (OSError, ValueError) as error:
                problem = f"KVBM_PEER_LISTEN={setup.listen}: {error}"
        if remote is not None:
            self._spawn(self._accept, remote, self._greet_stranger)
        control = socket.socket(fileno=setup.control)
        registration = None
        if address:
            address = setup.advertise or address
            own = Source(address, setup.member, setup.machine, digest(setup.fingerprint), setup.generation)
            registration = register(setup.registry, own)
        control.sendall(msgspec.msgpack.encode(Ready(address, self.path, problem)))
        try:
            self._follow_engine(control, engine)
        finally:
            if remote is not None:
                _let_go(remote)  # a successor waits until the path is gone, and binds the same port
            if registration is not None:
                registration.close()
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            if self._is_orphan:  # else the engine reads it
                with contextlib.suppress(OSError):
                    os.unlink(self.path.removesuffix(SUFFIX) + LOG_SUFFIX)

    def _follow_engine(self, control: socket.socket, engine: int) -> None:
        """Until there is no reason to serve any more. ``engine``: a handle of its process."""
        setup = self._setup
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(control, select.POLLIN)
        poll.register(engine, select.POLLIN)
        deadline: float | None = None
        while not self._ending.is_set():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = {file for file, _ in poll.poll(None if left is None else left * 1000)}
            if control.fileno() in ready:
                if control.recv(16) == b"end":
                    return
                poll.unregister(control)  # the engine's end is closed; its process says whether it is dead
            if engine in ready:
                poll.unregister(engine)
                if self.serving.board.is_retired:
                    return
                self._is_orphan = True
                self.serving.about = msgspec.structs.replace(self.about, orphan=True)
                deadline = time.monotonic() + setup.orphan_seconds
                logger.warning("engine %d is dead; its blocks are served for %g s or until its successor takes over",
                               setup.engine, setup.orphan_seconds)  # fmt: skip
            if deadline is not None and time.monotonic() >= deadline:
                return

    def end(self) -> None:
        self._ending.set()
        os.write(self._woken, b"\0")

    def _dismissed(self, message: Dismiss) -> bool:
        is_place = message.member == self._setup.member and message.fingerprint == digest(self._setup.fingerprint)
        if not self._is_orphan or not (is_place or message.any_engine):
            return False
        logger.warning("dismissed by the successor of engine %d", self._setup.engine)
        threading.Timer(0.05, self.end).start()  # after the answer
        return True

    # -- connections --------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket, greet: Callable[[Channel], None]) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                time.sleep(0.1)  # no file handle is free
                continue
            if not self._connections.acquire(blocking=False):
                self.serving.refuse("busy")
                connection.close()
                continue
            self._spawn(self._talk, connection, greet)

    def _talk(self, connection: socket.socket, greet: Callable[[Channel], None]) -> None:
        channel = Channel(connection, self._setup.seconds)
        try:
            greet(channel)
            self.serving.count(CONNECTIONS)
            self.serving.serve(channel, _machine_of(connection))
        except PeerError as error:
            if error.kind != "gone":
                self.serving.refuse(error.kind)
        except Exception:
            logger.exception("a connection has failed")
        finally:
            channel.close()
            self._connections.release()

    def _greet_neighbour(self, channel: Channel) -> None:
        if not is_same_user(channel.socket):
            raise PeerError("user", "a process of another user")

    def _greet_stranger(self, channel: Channel) -> None:
        if not self._strangers.acquire(blocking=False):
            raise PeerError("busy", "too many connections that have not proved the secret")
        give_up = threading.Timer(HANDSHAKE_SECONDS, lambda: channel.socket.shutdown(socket.SHUT_RDWR))
        try:
            channel.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            give_up.start()
            authenticate_server(channel, self._setup.secret)
        finally:
            give_up.cancel()
            self._strangers.release()

    def _spawn(self, call: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=call, args=arguments, name="kvbm-peer", daemon=True).start()


def dismiss_orphans(directory: str, member: str, fingerprint: str, any_engine: bool = False) -> None:
    """Take over from the server of a dead engine in this directory. With ``any_engine`` from all of them: their memory
    is needed."""
    for path in sorted(Path(directory).glob("*" + SUFFIX)):
        try:
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
                connection.connect(str(path))
                channel = Channel(connection, HANDSHAKE_SECONDS)
                channel.send(Dismiss(member, fingerprint, any_engine))
                if not any(channel.receive(Answer).found):
                    continue
                with contextlib.suppress(PeerError):
                    channel.receive(Answer)  # closed
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                path.unlink()  # its process is gone
            continue
        except (OSError, PeerError):
            continue
        deadline = time.monotonic() + _TAKEOVER_SECONDS
        while path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        if not any_engine:
            break


def is_same_user(connection: socket.socket) -> bool:
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


def _machine_of(connection: socket.socket) -> str:
    return "local" if connection.family == socket.AF_UNIX else str(connection.getpeername()[0])


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _bind(listen: str) -> socket.socket:
    """Waits a while for a port in use: the process of a predecessor may be about to end."""
    host, port = split_address(listen)
    deadline = time.monotonic() + _TAKEOVER_SECONDS
    while True:
        try:
            return _listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(MAX_CONNECTIONS)
    except OSError:
        listener.close()
        raise
    return listener


def _let_go(listener: socket.socket) -> None:
    """Another process can bind the port from now on. A close alone is not enough: a thread that accepts keeps it."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _give_way(nice: int) -> None:
    """The engine comes first. Where the kernel schedules sessions as groups (sched_autogroup), the nice value of a
    thread counts inside its session only, and the server has a session of its own: that has a nice value too."""
    with contextlib.suppress(OSError):
        os.nice(nice)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))


def main() -> None:
    with open(int(sys.argv[1]), "rb") as file:
        setup = msgspec.msgpack.decode(file.read(), type=Setup)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _give_way(setup.nice)
    server = Server(setup)
    signal.signal(signal.SIGTERM, lambda *_: server.end())
    server.run()
    logging.shutdown()
    # Where NIXL is loaded, the interpreter takes long to end, and keeps the dead engine's memory meanwhile.
    os._exit(0)


if __name__ == "__main__":
    main()
