"""The engine's end of the metrics port: it owns the port and makes snapshots; a child process answers clients.

Every user of the machine can reach the port, and a thread that answers clients would take the interpreter from the
engine's scheduler. So the engine binds the port, passes it to a child process (:mod:`kvbm.observe.web`) and keeps one
thread that waits on a socket to that child. The child requests a snapshot when a client needs one; the thread makes at
most ``SNAPSHOTS_A_SECOND``, after a burst of ``SNAPSHOT_BURST``, at any rate of requests. Without clients
the thread sleeps. The child renders the text, so a snapshot costs the engine only the reading of its counters.

Messages: the child sends the number of latest requests that it needs, in two bytes. The engine answers with a byte
(``S``: a snapshot in MessagePack, ``E``: the text of an error), the length in four bytes, and the content. If the limit
delays the snapshot, ``W`` comes first, without content.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from kvbm.forks import close_in_children
from kvbm.observe.snapshot import Source
from kvbm.pacing import Bucket

logger = logging.getLogger("kvbm")

# One snapshot a second falls into one of 100 decode steps of 10 ms. More would show in the p99 of a step.
SNAPSHOTS_A_SECOND = 1
SNAPSHOT_BURST = 4  # the page and `kvbm top --once` do not wait
MAX_STARTS = 5  # in a row, of processes that end within SHORT_LIFE_SECONDS
SHORT_LIFE_SECONDS = 60.0
RESTART_SECONDS = 1.0
BACKLOG = 1024  # the child accepts in bursts; a full backlog delays a scraper by a second

_encode = msgspec.msgpack.Encoder().encode

# -I and -S: the child imports nothing from the working directory, which another user may write to. It gets the engine's
# own import path.
_PROGRAM = "import sys; sys.path[:] = sys.argv.pop().split(':'); from kvbm.observe.web import main; main()"


class Server:
    """Binds its port; raises OSError if it cannot. ``port`` 0 takes any free port."""

    def __init__(self, source: Source, host: str, port: int) -> None:
        self._source = source
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        close_in_children(self._socket)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(BACKLOG)
        except BaseException:
            self._socket.close()
            raise
        self._host, self.port = self._socket.getsockname()[:2]
        self._pace = Bucket(SNAPSHOTS_A_SECOND, SNAPSHOT_BURST)
        self._lock = threading.Lock()  # so that close does not miss a child that is starting
        self._over = threading.Event()
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._has_failed = False

    @property
    def url(self) -> str:
        host = "localhost" if self._host in ("0.0.0.0", "::") else self._host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def child(self) -> int | None:
        """The child's process; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Return at once; clients that connect now get their answer as soon as the child runs."""
        self._thread = threading.Thread(target=self._keep, name="kvbm-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._over.set()
            if self._channel is not None:
                with contextlib.suppress(OSError):
                    self._channel.shutdown(socket.SHUT_RDWR)  # wakes the thread, and ends the child
        if self._thread is not None:
            self._thread.join(timeout=5)
        self._socket.close()

    def _keep(self) -> None:
        """Keep a child running, and answer it."""
        short_lives = 0
        while short_lives < MAX_STARTS:
            began = time.monotonic()
            try:
                channel = self._start_child()
                if channel is None:
                    return
                try:
                    with channel, contextlib.suppress(OSError):
                        self._answer(channel)
                finally:
                    status: object = self._end_child()
            except Exception as error:
                status = error
            lived = time.monotonic() - began
            short_lives = 0 if lived > SHORT_LIFE_SECONDS else short_lives + 1
            if self._over.is_set():
                return
            logger.warning("the process that answers on the metrics port has ended (%s) after %.0f s", status, lived)
            if self._over.wait(RESTART_SECONDS):
                return
        self._socket.close()  # so that clients are refused instead of waiting in the backlog
        logger.error(
            "No metrics on %s: the process that answers there ended %d times in a row. The engine goes on; restart it "
            "to have metrics again.", self.url, MAX_STARTS,
        )  # fmt: skip

    def _start_child(self) -> socket.socket | None:
        """Our end of the channel; None when the server is closed."""
        root = str(Path(__file__).parents[2])
        path = ":".join([*(entry for entry in sys.path if os.path.isabs(entry)), root])
        with self._lock:
            if self._over.is_set():
                return None
            channel, theirs = map(close_in_children, socket.socketpair())
            with theirs:
                listening = self._socket.fileno()
                command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(listening), str(os.getpid())]
                try:
                    self._process = subprocess.Popen(
                        [*command, path], stdin=theirs.fileno(), stdout=subprocess.DEVNULL, pass_fds=(listening,)
                    )
                except BaseException:
                    channel.close()
                    raise
            self._channel = channel
        return channel

    def _end_child(self) -> int:
        process = self._process
        assert process is not None
        process.kill()  # it has no state to save
        status = process.wait()
        self._process = None
        return status

    def _answer(self, channel: socket.socket) -> None:
        while len(wanted := channel.recv(2, socket.MSG_WAITALL)) == 2:
            if self._pace.delay() > 0:
                channel.sendall(b"W" + bytes(4))
            while (delay := self._pace.delay()) > 0:
                if self._over.wait(delay):
                    return
            self._pace.take()
            channel.sendall(self._reply(int.from_bytes(wanted, "big")))

    def _reply(self, requests: int) -> bytes:
        try:
            kind, content = b"S", _encode(self._source.snapshot(requests))
            self._has_failed = False
        except Exception as error:
            if not self._has_failed:
                logger.warning("the metrics cannot be read: %s", error, exc_info=True)
            self._has_failed = True
            kind, content = b"E", f"{type(error).__name__}: {error}".encode()[:1000]
        return kind + len(content).to_bytes(4, "big") + content


def open_server(source: Source, host: str, port: int) -> Server | None:
    """A running server; None, with a log line, if the port is unavailable: the engine runs without it."""
    try:
        server = Server(source, host, port)
    except OSError as error:
        logger.warning(
            "no metrics: cannot listen on %s:%d (%s). Every engine on a host needs its own DYN_KVBM_METRICS_PORT; the "
            "address is KVBM_METRICS_HOST.", host, port, error.strerror or error,
        )  # fmt: skip
        return None
    server.start()
    return server
