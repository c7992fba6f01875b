"""The web server of the metrics port: a process beside the engine, outside its interpreter.

One thread serves non-blocking sockets. Clients are not trusted: any user of the machine can connect, or of the network
if the port is open to it. There are bounds on connections, on the bytes and seconds of a request, on the seconds of an
answer and on answers a second. When all connections are taken, a new client replaces the connection that has been idle
or slow for the longest, but never one that waits for its answer. So slow clients cannot keep a scraper out.

Each answer uses a snapshot from after the arrival of its request; requests that arrive together share one. The engine
limits how often it makes one. While that limit delays a snapshot, clients get the last one if it is recent: scrapers
have short timeouts. If the engine does not answer in time, clients get the last snapshot, and /healthz reports it. The
process ends when the engine's process does.

The server takes a snapshot every few seconds and keeps a few figures of each, so that a page that was just opened shows
the last minutes.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import resource
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvbm.observe.answers import Answer, Point, Wanted, find, refusal, render_history, renderer
from kvbm.observe.snapshot import Snapshot
from kvbm.pacing import Bucket

MAX_HEADER_BYTES = 16_384
MAX_ACCEPTS = 128  # in a row, before the server serves its connections
SWEEP_SECONDS = 0.25  # between checks of the deadlines and of the engine's process
HISTORY_EVERY_SECONDS = 5.0  # a snapshot costs the engine 50 µs
HISTORY_POINTS = 61  # five minutes

_END_OF_HEADER = re.compile(rb"\r?\n\r?\n")
_decode = msgspec.msgpack.Decoder(Snapshot).decode


class Limits(NamedTuple):
    connections: int = 256
    answers_a_second: int = 500
    idle_seconds: float = 75.0  # more than a minute, the longest usual scrape interval
    header_seconds: float = 10.0  # from the first byte of a request to its last
    send_seconds: float = 10.0  # until the client has received an answer
    engine_seconds: float = 2.0  # until the last snapshot replaces a new one


class Request(NamedTuple):
    is_head: bool
    keep: bool
    answer: Answer | Wanted


class Connection(msgspec.Struct, eq=False):
    """Reads a request, waits for its answer, sends it, and begins again."""

    socket: socket.socket
    since: float  # start of the current phase: idle, request or answer
    received: bytes = b""
    request: Request | None = None
    waits: bool = False  # for its answer; then it is not replaced
    output: memoryview = memoryview(b"")
    is_open: bool = True


class Web:
    """``listening`` and ``channel`` come from the engine; ``parent`` is its process."""

    def __init__(
        self, listening: socket.socket, channel: socket.socket, parent: int, limits: Limits | None = None
    ) -> None:
        self._listening, self._channel, self._parent = listening, channel, parent
        self._limits = limits or Limits()
        self._connections: dict[int, Connection] = {}
        self._unasked: list[Connection] = []  # wait for a snapshot that is not requested yet
        self._asked: list[Connection] = []  # wait for the snapshot that the engine is making
        self._ready: deque[Connection] = deque()  # have their answer, which is sent at a bounded rate
        self._pace = Bucket(self._limits.answers_a_second, self._limits.answers_a_second // 5)
        self._asked_at: float | None = None
        self._is_delayed = False  # the engine has said that its limit delays the next snapshot
        self._heard_at = -math.inf  # when the last snapshot came
        self._requests = self._asked_requests = 0  # latest requests in that snapshot, and in the one being made
        self._incoming = bytearray()
        self._renderer: Callable[[Wanted], Answer] | None = None  # of the last snapshot
        self._history: deque[Point] = deque(maxlen=HISTORY_POINTS)
        self._failure: Answer | None = None  # the engine's error, in place of its last snapshot
        self._is_accepting = True
        self._selector = selectors.DefaultSelector()
        for each in (listening, channel):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the engine closes the channel or ends.

        A process forked from the engine may hold the channel open after its end, so this checks the parent as well."""
        sweep, started = 0.0, time.monotonic()
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._channel:
                    if not self._hear():
                        return
                elif key.fileobj is self._listening:
                    self._accept()
                elif (connection := key.data).is_open:
                    self._go_on(connection)
            now = time.monotonic()
            if now >= sweep:
                sweep = now + SWEEP_SECONDS
                if os.getppid() != self._parent:
                    return
                self._drop_late(now)
                self._accept_again()
            self._ask(now, is_due=now - max(self._heard_at, started) >= HISTORY_EVERY_SECONDS)
            self._send_ready()

    def _patience(self) -> float | None:
        if self._ready:
            return max(0.005, self._pace.delay())
        return SWEEP_SECONDS if self._connections else min(2.0, HISTORY_EVERY_SECONDS)

    # -- the engine ---------------------------------------------------------------------------------------------------

    def _ask(self, now: float, is_due: bool) -> None:
        """Request a snapshot if a client needs one. ``is_due``: the history does."""
        if self._asked_at is not None:
            if now - self._asked_at > self._limits.engine_seconds:
                self._release([*self._asked, *self._unasked])
                self._asked, self._unasked = [], []
            elif self._is_delayed and now - self._heard_at < self._limits.engine_seconds:
                self._asked = self._serve_recent(self._asked)
                self._unasked = self._serve_recent(self._unasked)
        elif self._unasked or is_due:
            wanted = (each.request.answer for each in self._unasked if each.request is not None)
            requests = max((each.requests for each in wanted if isinstance(each, Wanted)), default=0)
            self._asked, self._unasked = self._unasked, []
            self._asked_at, self._asked_requests = now, requests
            with contextlib.suppress(OSError):  # then reading the channel says so
                self._channel.send(requests.to_bytes(2, "big"))

    def _hear(self) -> bool:
        """Receive from the engine. False when it has closed the channel."""
        try:
            part = self._channel.recv(1 << 20)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._incoming += part
        while len(self._incoming) >= 5:
            end = 5 + int.from_bytes(self._incoming[1:5], "big")
            if len(self._incoming) < end:
                break
            content, kind = bytes(self._incoming[5:end]), bytes(self._incoming[:1])
            del self._incoming[:end]
            self._is_delayed = kind == b"W"
            if self._is_delayed:
                continue
            self._asked_at = None
            if kind == b"S":
                snapshot = _decode(content)
                self._renderer, self._failure = renderer(snapshot), None
                self._heard_at, self._requests = time.monotonic(), self._asked_requests
                if not self._history or snapshot.at - self._history[-1].at >= 0.9 * HISTORY_EVERY_SECONDS:
                    self._history.append(Point.of(snapshot))
            else:
                self._failure = Answer(500, content + b"\n")
            self._release(self._asked)
            self._asked = []
        return bool(part)

    def _serve_recent(self, connections: list[Connection]) -> list[Connection]:
        """Answer from the last snapshot. Returns those that want more of the latest requests than it holds."""
        few: list[Connection] = []
        more: list[Connection] = []
        for each in connections:
            wanted = None if each.request is None else each.request.answer
            (more if isinstance(wanted, Wanted) and wanted.requests > self._requests else few).append(each)
        self._release(few)
        return more

    def _release(self, connections: list[Connection]) -> None:
        self._ready.extend(each for each in connections if each.is_open)

    # -- clients ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            slowest = self._slowest() if len(self._connections) >= self._limits.connections else None
            if slowest is None and len(self._connections) >= self._limits.connections:
                # All connections wait for answers, for engine_seconds at most.
                self._selector.unregister(self._listening)
                self._is_accepting = False
                return
            try:
                client, _ = self._listening.accept()
            except OSError as error:  # no client is left, or it has disconnected
                if error.errno in (errno.EMFILE, errno.ENFILE):  # the client stays in the backlog and would wake us
                    self._selector.unregister(self._listening)
                    self._is_accepting = False
                return
            if slowest is not None:
                self._close(slowest)
            client.setblocking(False)
            with contextlib.suppress(OSError):
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(client, time.monotonic())
            self._connections[client.fileno()] = connection
            self._selector.register(client, selectors.EVENT_READ, connection)
            self._go_on(connection)

    def _slowest(self) -> Connection | None:
        return min((c for c in self._connections.values() if not c.waits), key=lambda c: c.since, default=None)

    def _drop_late(self, now: float) -> None:
        limits = self._limits
        for connection in list(self._connections.values()):
            if connection.waits:
                continue
            allowed = limits.header_seconds if connection.received else limits.idle_seconds
            if now - connection.since > (limits.send_seconds if connection.output else allowed):
                self._close(connection)

    def _close(self, connection: Connection) -> None:
        del self._connections[connection.socket.fileno()]
        connection.is_open = False
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection.socket)
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_WR)
        connection.socket.close()
        self._accept_again()

    def _accept_again(self) -> None:
        if not self._is_accepting:
            self._selector.register(self._listening, selectors.EVENT_READ)
            self._is_accepting = True

    def _go_on(self, connection: Connection) -> None:
        """Read or write as much as possible."""
        try:
            if connection.output:
                self._write(connection)
            else:
                self._read(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)

    def _read(self, connection: Connection) -> None:
        part = connection.socket.recv(MAX_HEADER_BYTES)
        if not part:
            self._close(connection)
            return
        if not connection.received:
            connection.since = time.monotonic()
        connection.received += part
        self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        """Begin with the next request if it has arrived completely."""
        end = _END_OF_HEADER.search(connection.received)
        if end is None and len(connection.received) < MAX_HEADER_BYTES:
            return
        if end is None or end.end() > MAX_HEADER_BYTES:
            text = "the request is too long or incomplete\n"
            connection.request = Request(is_head=False, keep=False, answer=refusal(400, text))
        else:
            connection.request = self._parse(connection.received[: end.start()])
            connection.received = connection.received[end.end() :]
        connection.waits = True
        self._selector.unregister(connection.socket)
        if isinstance(connection.request.answer, Wanted):
            self._unasked.append(connection)
        else:
            self._ready.append(connection)

    def _parse(self, header: bytes) -> Request:
        first, *lines = header.decode("latin-1").split("\n")
        method, _, rest = first.rstrip("\r").partition(" ")
        target, _, version = rest.rpartition(" ")
        keep = version == "HTTP/1.1"
        for line in lines:
            name, _, value = line.lower().partition(":")
            if name == "connection":
                keep = "close" not in value and (keep or "keep-alive" in value)
            elif (name == "content-length" and value.strip() != "0") or name == "transfer-encoding":
                keep = False  # the server does not read the body that follows
        if not version.startswith("HTTP/1.") or not target.startswith("/"):
            return Request(is_head=False, keep=False, answer=refusal(400, "this is not an HTTP request\n"))
        answer: Answer | Wanted
        try:
            if method not in ("GET", "HEAD"):
                answer = refusal(405, "only GET and HEAD are supported\n")
            elif target.partition("?")[0] == "/healthz":
                answer = self._health()
            elif target.partition("?")[0] == "/api/history":
                answer = render_history(self._history)
            else:
                answer = find(target)
        except ValueError as error:  # the target is not a URL
            answer = refusal(400, f"{error}\n")
        return Request(method == "HEAD", keep, answer)

    def _health(self) -> Answer:
        late = 0.0 if self._asked_at is None else time.monotonic() - self._asked_at
        if late > self._limits.engine_seconds:
            return refusal(503, f"the engine has not answered for {late:.0f} s; the metrics are of its last answer\n")
        return Answer(200, b"ok\n")

    def _send_ready(self) -> None:
        while self._ready and not self._pace.delay():
            connection = self._ready.popleft()
            self._pace.take()
            request = connection.request
            assert request is not None
            if not self._is_accepting:  # a busy client must make room for others
                connection.request = request = request._replace(keep=False)
            answer = request.answer
            if isinstance(answer, Wanted):
                answer = self._render(answer)
            head = answer.head(request.keep)
            connection.output = memoryview(head if request.is_head else head + answer.body)
            connection.since, connection.waits = time.monotonic(), False
            self._selector.register(connection.socket, selectors.EVENT_WRITE, connection)
            self._go_on(connection)

    def _render(self, wanted: Wanted) -> Answer:
        if self._failure is not None:
            return self._failure
        if self._renderer is None:
            return refusal(503, "the engine does not answer yet\n")
        return self._renderer(wanted)

    def _write(self, connection: Connection) -> None:
        connection.output = connection.output[connection.socket.send(connection.output) :]
        if connection.output:
            return
        assert connection.request is not None
        if not connection.request.keep:
            self._close(connection)
            return
        connection.request, connection.since = None, time.monotonic()
        self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
        if connection.received:
            self._begin(connection)


def main() -> None:
    """``sys.argv``: the descriptor of the listening socket, and the engine's process. Standard input is the channel."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; this process ends when the engine does
    with contextlib.suppress(OSError):
        os.nice(19)  # the engine comes first
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    listening, parent = int(sys.argv[1]), int(sys.argv[2])
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limits = Limits(connections=min(Limits().connections, max(1, files - 16)))
    with socket.socket(fileno=listening) as port, socket.socket(fileno=0) as channel:
        Web(port, channel, parent, limits).run()
    os._exit(0)
