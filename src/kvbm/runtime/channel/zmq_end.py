"""What both ends of the ZeroMQ way share: two sockets, the lock around them, a thread that informs the other side.

Sockets are only touched under the lock, and only in ways that do not wait, so any thread may call any method; the lock
is held for microseconds. The thread is a daemon and ends with :meth:`ZmqEnd.close`.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from itertools import islice

import zmq

from kvbm.runtime import channel
from kvbm.runtime.channel import zmq_wire as wire
from kvbm.runtime.channel.base import Agreement, ChannelError, HandshakeTimeoutError, Timing
from kvbm.runtime.channel.curve import SECRET_SETTING, Curve

logger = logging.getLogger(__name__)

HOST_SETTING = "DYN_KVBM_LEADER_ZMQ_HOST"
PUB_SETTING = "DYN_KVBM_LEADER_ZMQ_PUB_PORT"
ACK_SETTING = "DYN_KVBM_LEADER_ZMQ_ACK_PORT"
TIMEOUT_SETTING = "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS"

TICK = 0.05  # of the thread during the handshake, and of a wait for plans
_BATCH = 1024  # messages read in one go: a flood of messages does not hold up a step
_REPEATS = 512  # messages sent again in one go; a peer that misses more asks again
_OTHER_SECRET = (
    f"the other end has another secret, or none; set the same {SECRET_SETTING} for the leader and all workers"
)
_LARGEST = 64 << 20  # bytes of a message; the plan of a million blocks has 10 MiB


class ZmqEnd(ABC):
    """One end. Private methods run under the lock, but for what builds the sockets and the loop of the thread."""

    # Of the subclass: its sockets, and the functions that carry its numbered messages and its signs of life.
    _in: zmq.Socket[bytes]
    _out: zmq.Socket[bytes]
    _in_url: str
    _numbered: bytes
    _pulse: bytes

    def __init__(self, rank: int, timeout: float, timing: Timing, secret: str = "") -> None:
        self.malformed = 0  # messages that could not be read or came from strangers; they are dropped
        self._last_malformed = ""
        self._curve = Curve(secret) if secret else None  # for TCP
        self._me = wire.new_sender(rank)
        self._timeout = timeout
        self._timing = timing
        self._window = channel.WINDOW  # looked up late: the package is not complete while it imports this file
        self._begun = time.monotonic()
        self._agreement: Agreement | None = None
        self._confirmed = False  # the agreed memory is allocated: on this rank; for the leader, on all of them
        self._settled = threading.Event()  # the handshake has ended, one way or another
        self.error: ChannelError | None = None  # why the handshake has failed, for callers that do not wait
        self._out_box = wire.Outbox()
        self._said_refused = False
        self._told = float("-inf")  # when the last sign of life went out
        self._given_since = 0  # messages given to the caller since then
        self._closed = False
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._context = zmq.Context(io_threads=1)
        self._thread = threading.Thread(target=self._run, name=f"kvbm-{type(self).__name__}-{rank}", daemon=True)

    # -- what the two ends do differently -----------------------------------------------------------------------------

    @abstractmethod
    def _turn(self, now: float) -> None:
        """The thread's work after it has handled all received messages."""

    @abstractmethod
    def _handle(self, number: int, function: bytes, sender: bytes, payload: bytes) -> None:
        """One message. Raises one of ``wire.UNREADABLE`` when it is to be dropped."""

    @abstractmethod
    def _heard(self) -> wire.Ping | wire.Beat:
        """A sign of life, with the last number received from the other side."""

    @abstractmethod
    def _break(self, why: str) -> None:
        """No message can be trusted to arrive any more."""

    @abstractmethod
    def _late(self) -> str:
        """The text of a handshake that takes too long."""

    # -- the handshake ------------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> Agreement:
        """Block until the workers have agreed and, on the leader, until every one of them has allocated.

        Raises :class:`ChannelError` when the handshake has failed. With a ``timeout`` the wait may also end early with
        :class:`HandshakeTimeoutError`, and the handshake goes on.
        """
        self._settled.wait(timeout)
        with self._lock:
            if self.error is not None:
                raise self.error
            if self._closed:
                raise ChannelError("the channel was closed before leader and workers had met")
            if not self._settled.is_set():
                raise HandshakeTimeoutError(self._late())
            assert self._agreement is not None
            return self._agreement

    def _end(self, error: ChannelError | None) -> None:
        self.error = self.error or error
        self._settled.set()

    def _check_time(self, now: float) -> None:
        if self.error is None and now - self._begun > self._timeout:
            self._end(HandshakeTimeoutError(self._late()))

    def _unread(self) -> str:
        failures = 0 if self._curve is None else self._curve.failures
        refused = f" {failures} connections were refused: {_OTHER_SECRET}." if failures else ""
        if not self.malformed:
            return refused
        return f" {self.malformed} messages were dropped, the last one because: {self._last_malformed}.{refused}"

    # -- messages -----------------------------------------------------------------------------------------------------

    def _socket(self, kind: int, url: str, listens: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        if self._curve is not None and url.startswith("tcp:"):
            self._curve.protect(socket, listens)
        socket.setsockopt(zmq.LINGER, 0)
        # Above the window, so that only a broken connection or a flood loses messages; both show as gaps.
        socket.setsockopt(zmq.SNDHWM, 2 * self._window)
        socket.setsockopt(zmq.RCVHWM, 2 * self._window)
        socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
        socket.setsockopt(zmq.IPV6, "[" in url)
        # Of the library's own thread: a host that vanished without a word is noticed, and the connection made anew.
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        return socket

    def _note_refused(self) -> None:
        if self._curve is not None and self._curve.note_failures() and not self._said_refused:
            self._said_refused = True
            logger.warning("KVBM: a connection to %s was refused: %s", self._in_url, _OTHER_SECRET)

    def _drain(self) -> None:
        for _ in range(_BATCH):
            if self._closed or not int(self._in.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            frames = self._in.recv_multipart(zmq.NOBLOCK)
            try:
                self._handle(*wire.read(frames))
            except wire.UNREADABLE as error:
                self._drop(str(error))

    def _drop(self, why: str) -> None:
        self.malformed += 1
        self._last_malformed = why
        if self.malformed == 1:
            logger.warning("KVBM: dropped a message on %s: %s; further ones are only counted", self._in_url, why)

    def _post(self, number: int, function: bytes, payload: bytes = b"") -> None:
        # Full: the other side will see the gap, or this is repeated anyway.
        with suppress(zmq.Again):
            if not self._closed:
                self._out.send_multipart(wire.write(number, function, self._me, payload), zmq.NOBLOCK)

    def _post_numbered(self, payload: bytes) -> None:
        self._post(self._out_box.add(payload), self._numbered, payload)

    def _repeat(self, after: int) -> None:
        for number, payload in islice(self._out_box.after(after), _REPEATS):
            self._post(number, self._numbered, payload)

    def _beat(self, now: float) -> None:
        """Send a sign of life with the last number received."""
        self._told, self._given_since = now, 0
        self._post(self._out_box.last, self._pulse, wire.encode(self._heard()))

    def _beat_if_due(self, now: float, gap: bool) -> None:
        if gap or now - self._told >= self._timing.beat:
            self._beat(now)

    def _gave(self, count: int) -> None:
        """The caller has received so many messages; the other side hears of it before its window is full."""
        self._given_since += count
        if self._given_since > self._window // 8:
            self._beat(time.monotonic())

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(min(self._timing.beat / 4, 1.0) if self._confirmed else TICK):
            with self._lock:
                try:
                    self._note_refused()
                    self._drain()
                    self._turn(time.monotonic())
                except Exception:
                    # A bug in KVBM. End the channel: callers must not wait for a thread that has ended.
                    logger.exception("KVBM: the channel's thread has failed")
                    self._end(ChannelError("the channel's thread has failed; see the log"))
                    self._break("the channel's thread has failed")
                    return

    def close(self) -> None:
        """Release all resources at once, without waiting for undelivered messages. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._stop.set()
            self._settled.set()
        self._thread.join()
        self._context.destroy(linger=0)
