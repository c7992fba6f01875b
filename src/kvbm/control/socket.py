"""The control socket: commands that show the tiers, empty them, or announce their blocks again.

The leader listens on an abstract socket, which has no file and disappears with the process. Any user of the machine can
connect, so both ends ask the kernel for the user of the other (SO_PEERCRED) before they read or send a byte: the leader
accepts commands of its own user and of root, and a client talks to leaders of its own user only. A command is one line
of JSON, and so is its answer::

    {"do": "status"}                                      {"do": "reset", "tier": "host"}
    {"do": "reset", "tier": "host", "blocks": [17, ...]}  {"do": "reset"}        {"do": "announce"}

A command without a tier concerns every tier.

A command that changes a catalog takes the engine's lock between two calls of the engine, as the engine's reset does.
The control thread shares the engine's interpreter: it accepts one connection at a time, executes at most
COMMANDS_A_SECOND after a short burst, and rests after a command for REST times the CPU time of the command.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from kvbm.forks import close_in_children
from kvbm.pacing import Bucket
from kvbm.plans import DEVICE
from kvbm.runtime.leader import Leader
from kvbm.tiers import registry
from kvbm.tiers.directory import OVERFLOW_UID, maps_every_user

logger = logging.getLogger("kvbm")

PREFIX = "kvbm-control"
MAX_ORDER_BYTES = 1 << 20
MAX_ANSWER_BYTES = 8 << 20
MAX_ADDRESSES = 1000
CONNECTION_SECONDS = 5.0  # deadline of a whole connection, because the next client waits for it
COMMANDS_A_SECOND, COMMAND_BURST = 10, 10
REST = 9  # commands take at most a tenth of the CPU time


class CommandError(ValueError):
    """A command that is refused; the message says what is accepted."""


class Controller:
    """Executes commands on one leader.

    ``engine_lock`` is held while the engine is inside a call of KVBM, and while a command changes the catalogs.
    ``engine_blocks`` returns (all, free) blocks of the engine's own cache, where the engine reports them.
    """

    def __init__(
        self,
        engine_lock: AbstractContextManager[Any],
        leader: Callable[[], Leader | None],
        about: dict[str, Any],
        announce: Callable[[], bool],
        engine_blocks: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._engine_lock = engine_lock
        self._leader = leader
        self._about = about
        self._announce = announce
        self._engine_blocks = engine_blocks

    def carry_out(self, command: dict[str, Any]) -> dict[str, Any]:
        leader = self._leader()
        if leader is None:
            raise CommandError("KVBM is starting, or is disabled after a fault")
        what = command.get("do")
        if what == "status":
            return {**self._about, "pools": self._status(leader)}
        with self._engine_lock:
            if what == "reset":
                return self._reset(leader, command)
            if what == "announce":
                return {"announced": self._announce()}
        raise CommandError(f"do={what!r}: expected status, reset or announce")

    def _status(self, leader: Leader) -> dict[str, dict[str, int]]:
        """In upstream's terms: active blocks are read or written, inactive ones can be evicted, empty ones are free."""
        pools = {}
        if self._engine_blocks is not None:
            every, free = self._engine_blocks()
            pools[DEVICE] = {"active_blocks": every - free, "inactive_blocks": 0, "empty_blocks": free}
        for tier, catalog in leader.manager.catalogs.items():
            active, empty = catalog.pinned + catalog.writing, catalog.free
            pools[tier] = {
                "active_blocks": active,
                "inactive_blocks": max(0, catalog.size - active - empty),
                "empty_blocks": empty,
            }
        return pools

    def _reset(self, leader: Leader, command: dict[str, Any]) -> dict[str, Any]:
        catalogs = leader.manager.catalogs
        tiers = list(catalogs)
        if (name := command.get("tier")) is not None:
            tier = registry.resolve(str(name))
            if tier not in catalogs:
                hint = "; the engine's own cache is reset by the engine" if tier == DEVICE else ""
                raise CommandError(f"tier={name!r}: expected one of {', '.join(catalogs)}{hint}")
            tiers = [tier]
        if (blocks := command.get("blocks")) is None:
            return {"reset_blocks": sum(leader.forget(tier) for tier in tiers)}
        if not isinstance(blocks, list):
            raise CommandError(f"blocks={blocks!r}: expected a list of blocks")
        wanted = [_number(block) for block in blocks]
        endings = {block.to_bytes(8, "big") for block in wanted}
        found: set[int] = set()
        for tier in tiers:
            keys = [key for key in catalogs[tier].findable if key[-8:] in endings]
            leader.forget(tier, keys)
            found.update(int.from_bytes(key[-8:], "big") for key in keys)
        return {
            "reset_blocks": [block for block in wanted if block in found],
            "not_found_blocks": [block for block in wanted if block not in found],
            "not_reset_blocks": [],
        }


def _number(block: object) -> int:
    """A block by its name in events: a number of 64 bits, or the whole hash in hexadecimal."""
    if isinstance(block, int) and not isinstance(block, bool):
        return block & (2**64 - 1)
    if isinstance(block, str):
        with contextlib.suppress(ValueError):
            return int(block, 10) & (2**64 - 1) if block.isdigit() and len(block) <= 20 else int(block[-16:], 16)
    raise CommandError(f"block {block!r}: expected the number of a block as in events, or its hash in hexadecimal")


class ControlServer:
    """Listens in a thread from its construction on. ``name`` is the engine's unique name on this machine."""

    def __init__(self, controller: Controller, name: str) -> None:
        self.address = f"{PREFIX}/{os.geteuid()}/{os.getpid()}/{re.sub(_UNSAFE, '_', name)}"[:100]
        self._controller = controller
        self._pace = Bucket(COMMANDS_A_SECOND, COMMAND_BURST)
        self._over = threading.Event()
        self._socket = close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(8)
        self._thread = threading.Thread(target=self._serve, name="kvbm-control", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while self._wait_for_turn():
            try:
                client, _ = self._socket.accept()
            except OSError:
                return  # closed
            with close_in_children(client), contextlib.suppress(OSError):
                if (user := user_of(client)) == 0 or _is_us(user):
                    self._answer(client)
                else:
                    self._pace.take()  # a foreign connection wakes this thread too, so it counts

    def _wait_for_turn(self) -> bool:
        """False when the server is closed."""
        while (delay := self._pace.delay()) > 0:
            if self._over.wait(delay):
                return False
        return not self._over.is_set()

    def _answer(self, client: socket.socket) -> None:
        lines = _Lines(client, time.monotonic() + CONNECTION_SECONDS, MAX_ORDER_BYTES)
        self._pace.take()
        while line := lines.read():
            began = time.thread_time()
            answer = self._carry_out(line)
            lines.end += time.monotonic() - lines.read_at  # the wait for the engine does not count
            self._pace.take(REST * (time.thread_time() - began) * COMMANDS_A_SECOND)
            lines.send(msgspec.json.encode(answer) + b"\n")
            if not self._wait_for_turn():
                return
            self._pace.take()

    def _carry_out(self, line: bytes) -> dict[str, Any]:
        try:
            command = msgspec.json.decode(line, type=dict[str, Any])
            answer = {"ok": True, **self._controller.carry_out(command)}
            if command.get("do") != "status":
                logger.info("control command %s: %s", _shown(command), _shown(answer))
        except (CommandError, msgspec.MsgspecError) as error:
            answer = {"ok": False, "error": str(error)}
        except Exception as error:
            logger.warning("control command failed: %s", error, exc_info=True)
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        return answer

    def close(self) -> None:
        self._over.set()
        # A close alone does not wake a thread that waits in accept.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=CONNECTION_SECONDS)


class _Lines:
    """Lines of a peer that may be slow, endless or silent: at most ``max_bytes`` a line, and only until ``end``."""

    def __init__(self, peer: socket.socket, end: float, max_bytes: int) -> None:
        self.end = self.read_at = end
        self._peer, self._max_bytes = peer, max_bytes
        self._rest = bytearray()

    def read(self) -> bytes:
        """The next line; empty when the peer has closed. Raises OSError past the deadline or the maximum size."""
        seen = 0
        while (at := self._rest.find(b"\n", seen)) < 0:
            seen = len(self._rest)
            if seen > self._max_bytes:
                raise ConnectionError(f"a line of more than {self._max_bytes} bytes")
            self._peer.settimeout(self._left())
            part = self._peer.recv(65536)
            if not part:
                at = seen
                break
            self._rest += part
        line, is_last = bytes(self._rest[:at]), at == len(self._rest)
        del self._rest[: at + 1]
        self.read_at = time.monotonic()
        return line if line or is_last else b" "  # an empty line is an invalid command, and not the end

    def send(self, data: bytes) -> None:
        self._peer.settimeout(self._left())
        self._peer.sendall(data)

    def _left(self) -> float:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left


def _shown(what: dict[str, Any]) -> str:
    text = repr(what)
    return text if len(text) <= 500 else f"{text[:500]}… ({len(text)} characters)"


def user_of(peer: socket.socket) -> int:
    """The user of a client when it connected, or of a leader when it began to listen."""
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


def _is_us(user: int) -> bool:
    """A user namespace that maps only some users shows all others as OVERFLOW_UID, which can be our own number too."""
    return user == os.geteuid() and (user != OVERFLOW_UID or maps_every_user())


def open_control(controller: Controller, name: str) -> ControlServer | None:
    """None, with a log line, when the socket is unavailable: the engine runs without it."""
    try:
        return ControlServer(controller, name)
    except OSError as error:
        logger.warning("Control socket unavailable, `kvbm control` cannot reach this engine: %s", error)
        return None


# -- the client -------------------------------------------------------------------------------------------------------

# Any user of the machine can listen on any name and answer anything.
_UNSAFE = r"[^A-Za-z0-9_.:+-]"
_ADDRESS = re.compile(rf"@({PREFIX}/(?:0|[1-9][0-9]{{0,9}})/[1-9][0-9]{{0,9}}/[A-Za-z0-9_.:+-]{{1,100}})")
_LOOK_SECONDS = 2.0


def addresses() -> list[str]:
    """The addresses of this user's leaders on this machine."""
    return [address for address, user in look() if user is not None and _is_us(user)]


def look() -> list[tuple[str, int | None]]:
    """Sockets on this machine that have the name of a control socket, each with the user that listens there.

    The kernel reports the user; it is None if the socket accepts no connection in time. Nothing is sent to a socket."""
    found = set()
    with open("/proc/net/unix", encoding="ascii", errors="replace") as sockets:
        for line in sockets:
            name = _ADDRESS.fullmatch(line.rstrip("\n").rpartition(" ")[2])
            if name is not None:
                found.add(name[1])
            if len(found) == MAX_ADDRESSES:
                break
    users: dict[str, int | None] = dict.fromkeys(found)
    end = time.monotonic() + _LOOK_SECONDS
    while found:
        for address in list(found):
            with contextlib.suppress(BlockingIOError):  # its backlog is full
                users[address] = _listener(address)
                found.discard(address)
        if time.monotonic() > end:
            break
        time.sleep(0.01 if found else 0)
    # Sockets that were closed in the meantime are left out.
    return sorted((address, user) for address, user in users.items() if user != _GONE)


_GONE = -1


def _listener(address: str) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as leader:
        leader.setblocking(False)
        try:
            leader.connect(f"\0{address}")
            return user_of(leader)
        except BlockingIOError:
            raise
        except OSError:
            return _GONE


def ask(address: str, command: dict[str, Any], timeout: float = 60.0) -> dict[str, Any]:
    """Send a command and wait for its answer.

    Raises OSError if there is no answer or another user listens there, and CommandError if the command is refused."""
    end = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as leader:
        _connect(leader, address, timeout)
        if not _is_us(user := user_of(leader)):
            raise PermissionError(
                f"{address} belongs to user {user}, and this is user {os.geteuid()}: run this as the engine's user"
            )
        lines = _Lines(leader, end, MAX_ANSWER_BYTES)
        lines.send(msgspec.json.encode(command) + b"\n")
        line = lines.read()
    if not line:
        raise ConnectionError(f"{address} does not answer")
    try:
        answer = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConnectionError(f"{address} gave an invalid answer: {error}") from error
    if not answer.pop("ok", False):
        raise CommandError(str(answer.get("error", "refused without a reason")))
    return answer


def _connect(leader: socket.socket, address: str, timeout: float) -> None:
    """Connect with the kernel's timeout: a non-blocking connect fails at once while the backlog is full."""
    seconds = int(timeout)
    limit = struct.pack("ll", seconds, int(1e6 * (timeout - seconds)))
    leader.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    try:
        leader.connect(f"\0{address}")
    except BlockingIOError as error:
        raise TimeoutError(f"{address} did not accept the connection for {timeout:g} s") from error
