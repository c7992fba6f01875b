"""The way between leader and workers: plans down, reports up.

One interface, two ways. *In-band*: the engine carries the bytes inside its own step metadata and step output (vLLM).
*ZeroMQ*: the two halves talk past the engine, for engines that carry nothing outside of a step (TensorRT-LLM).

What both promise: plans reach every rank, and reports the leader, in the order they were sent, none twice and none
missing, however late. Where that cannot be kept the rank is *lost*, for good: the leader is told so, and what the rank
still owed has failed (:meth:`kvbm.runtime.leader.Leader.fail_rank`). Nothing is ever dropped in silence, because a plan
that vanishes is a request that waits forever.

The ZeroMQ way
--------------
The leader binds PUB and PULL, each worker connects SUB and PUSH. A message is four frames: an 8-byte big-endian number,
the name of a function, its sender (protocol, rank, session), and a msgpack payload::

    leader -> workers                                      worker -> leader
    hello   0     -        who is there?                   hello   0    Hello    me
    agreed  0     _Agreed  allocate this                   ready   0    -        allocated
    refused 0     text     give up, and why                failed  0    text     cannot go on, and why
    plan    n     StepPlan the n-th plan                   report  n    [Report] the n-th report
    ping    last  _Ping    I live; heard so far            beat    last _Beat    I live; heard so far

Sessions are random. A worker obeys only the leader that has admitted it, and a leader believes only the workers it has
admitted, so two engines that were given the same ports cannot move each other's blocks. Neither side can be restarted
alone.

PUB drops what a slow or reconnecting subscriber cannot take, so plans and reports are numbered and kept until the other
side has *taken* them, and whoever sees a gap asks for everything behind it again. Pings and beats carry the last number
sent, so that a gap shows even if nothing follows it. Both directions hold at most ``WINDOW`` messages: a rank that has
left so many plans untaken is lost; reports beyond it are merged into one. No call waits for the other side.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import select
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from urllib.parse import urlsplit

import msgspec
import zmq

from kvbm.plans import Hello, Report, StepPlan, Tier, decode_hello, decode_reports, decode_step, encode

logger = logging.getLogger(__name__)

PUB_URL = "tcp://127.0.0.1:56001"
ACK_URL = "tcp://127.0.0.1:56002"

HOST_SETTING = "DYN_KVBM_LEADER_ZMQ_HOST"
PUB_SETTING = "DYN_KVBM_LEADER_ZMQ_PUB_PORT"
ACK_SETTING = "DYN_KVBM_LEADER_ZMQ_ACK_PORT"
TIMEOUT_SETTING = "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS"

# Plans a rank may leave untaken. Engines run in lockstep with their ranks, a few steps ahead at most: thousands means
# that the rank has stopped.
WINDOW = 8192


class ChannelError(RuntimeError):
    """The two halves cannot work together; says why and what to change."""


class HandshakeTimeoutError(ChannelError):
    """Leader and workers did not all meet in time."""


class Timing(msgspec.Struct, frozen=True):
    """How often things happen, in seconds."""

    round: float = 0.5  # between two rounds of the handshake
    progress: float = 5.0  # between two log lines about a handshake that is still waiting
    beat: float = 1.0  # between two pings or beats
    # A rank that was silent for so long is lost. Long, because there is no way back from it, and because a thread of a
    # healthy worker may go without the interpreter for many seconds while an engine compiles or loads kernels.
    silence: float = 60.0


TIMING = Timing()


# -- the contract -----------------------------------------------------------------------------------------------------


class LeaderChannel(ABC):
    """The leader's end. Called from the engine's scheduler thread, in every step; no method waits."""

    @abstractmethod
    def send(self, plan: StepPlan) -> None:
        """Deliver a plan to every rank. An empty one is not sent.

        Never fails because of a worker: one that is gone shows in :meth:`lost_ranks`. Ignored after :meth:`close`.
        """

    @abstractmethod
    def receive(self) -> list[Report]:
        """Every report that has arrived since the last call; those of one rank in the order they were sent."""

    @abstractmethod
    def lost_ranks(self) -> dict[int, str]:
        """Ranks that no plan reaches any more, and why. Ask in every step; a rank never comes back out of here.

        The caller hands each to ``Leader.fail_rank``, so that nobody waits for what the rank still owed.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of everything, at once: what was not delivered yet is not waited for. May be called twice."""


class WorkerChannel(ABC):
    """One rank's end. Called from the engine's worker thread; whether from others too is said by the implementation."""

    @abstractmethod
    def receive(self, timeout: float = 0.0) -> list[StepPlan]:
        """Every plan that has arrived since the last call, in order; waits up to ``timeout`` seconds for the first."""

    @abstractmethod
    def send(self, report: Report) -> None:
        """Deliver a report to the leader. An empty one is not sent. Never waits, never fails; ignored after a close."""

    @abstractmethod
    def close(self) -> None:
        """As the leader's."""


# -- in-band ----------------------------------------------------------------------------------------------------------


class InBandLeader(LeaderChannel):
    """The leader's end where the engine carries the bytes, in both directions and in step with itself.

    Plain msgpack of what was sent since the last :meth:`pack`, no threads and no state beyond that. A rank that dies
    takes the engine with it, so none is ever lost here. Bytes that cannot be read raise: both ends are one
    installation, so that is a fault of the program, and a plan passed over in silence would never be answered.
    """

    def __init__(self) -> None:
        self._plans: list[StepPlan] = []
        self._reports: list[Report] = []
        self._closed = False

    def send(self, plan: StepPlan) -> None:
        if plan and not self._closed:
            self._plans.append(plan)

    def pack(self) -> bytes:
        """What this step's metadata must carry to every rank; empty when there is nothing to say."""
        payload = _encode(self._plans) if self._plans else b""
        self._plans.clear()
        return payload

    def unpack(self, payload: bytes) -> None:
        """Take in what one rank has packed. The order of the ranks does not matter."""
        if payload and not self._closed:
            self._reports += decode_reports(payload)

    def receive(self) -> list[Report]:
        reports, self._reports = self._reports, []
        return reports

    def lost_ranks(self) -> dict[int, str]:
        return {}

    def close(self) -> None:
        self._closed = True
        self._plans.clear()
        self._reports.clear()


class InBandWorker(WorkerChannel):
    """One rank's end where the engine carries the bytes. Engine thread only; ``receive`` has nothing to wait for."""

    def __init__(self) -> None:
        self._plans: list[StepPlan] = []
        self._reports: list[Report] = []
        self._closed = False

    def unpack(self, payload: bytes) -> None:
        """Take in what this step's metadata has brought."""
        if payload and not self._closed:
            self._plans += _decode_steps(payload)

    def receive(self, timeout: float = 0.0) -> list[StepPlan]:
        plans, self._plans = self._plans, []
        return plans

    def send(self, report: Report) -> None:
        if report and not self._closed:
            self._reports.append(report)

    def pack(self) -> bytes:
        """What this step's output must carry to the leader; empty when there is nothing to say."""
        payload = encode(self._reports) if self._reports else b""
        self._reports.clear()
        return payload

    def close(self) -> None:
        self._closed = True
        self._plans.clear()
        self._reports.clear()


# -- what ZeroMQ carries ----------------------------------------------------------------------------------------------


class Agreement(msgspec.Struct, frozen=True, array_like=True):
    """What all ranks have in common: the outcome of the handshake."""

    slots: dict[Tier, int]  # of every tier that all ranks have: as many as the poorest of them
    layout: str
    block_bytes: list[int]  # of one block, by rank


class _Agreed(msgspec.Struct, frozen=True, array_like=True):
    agreement: Agreement
    workers: list[bytes]  # the admitted senders, by rank


class _Ping(msgspec.Struct, frozen=True, array_like=True):
    arrived: list[int]  # reports of each rank up to this number are in
    taken: list[int]  # ... and were given to the leader: no need to keep them
    again: list[int]  # ranks with a gap: send everything after `arrived` again
    lost: list[int]  # ranks that are given up


class _Beat(msgspec.Struct, frozen=True, array_like=True):
    arrived: int
    taken: int
    again: bool


_PROTOCOL = 1
_NUMBER = struct.Struct(">Q")
_SENDER = struct.Struct(">BIQ")  # protocol, rank, session

_encode = msgspec.msgpack.Encoder().encode
_decode_steps = msgspec.msgpack.Decoder(list[StepPlan]).decode
_decode_agreed = msgspec.msgpack.Decoder(_Agreed).decode
_decode_ping = msgspec.msgpack.Decoder(_Ping).decode
_decode_beat = msgspec.msgpack.Decoder(_Beat).decode

_UNREADABLE = (ValueError, LookupError, RecursionError, msgspec.MsgspecError)


def agree(hellos: Sequence[Hello]) -> Agreement:
    """What ranks with these hellos can do together. Raises :class:`ChannelError` when that is nothing."""
    hellos = sorted(hellos, key=lambda hello: hello.rank)
    layouts: dict[str, list[int]] = {}
    for hello in hellos:
        layouts.setdefault(hello.layout, []).append(hello.rank)
    if len(layouts) > 1:
        found = "; ".join(f"{_ranks(ranks)}: {layout!r}" for layout, ranks in layouts.items())
        raise ChannelError(
            f"the workers disagree on the layout of a block: {found}. A block must mean the same on every rank: start "
            "all workers with the same engine, model and cache settings"
        )
    slots: dict[Tier, int] = {}
    for tier in sorted({tier for hello in hellos for tier in hello.slots}):
        without = [hello.rank for hello in hellos if hello.slots.get(tier, 0) < 1]
        if without:
            logger.warning("%s is not used: %s without a slot in it", tier.name, _ranks(without))
        else:
            slots[tier] = min(hello.slots[tier] for hello in hellos)
    if not slots:
        raise ChannelError(
            "no cache tier has a slot on every rank; give all workers the same DYN_KVBM_CPU_CACHE_GB or "
            "DYN_KVBM_DISK_CACHE_GB, large enough for at least one block a rank"
        )
    return Agreement(slots, hellos[0].layout, [hello.block_bytes for hello in hellos])


class _Outbox:
    """Numbered messages that the other side has not taken yet."""

    def __init__(self) -> None:
        self.last = 0
        self._kept: deque[bytes] = deque()

    def add(self, payload: bytes) -> int:
        self._kept.append(payload)
        self.last += 1
        return self.last

    def taken(self, number: int) -> None:
        while self._kept and self.last - len(self._kept) < number:
            self._kept.popleft()

    def after(self, number: int) -> Iterator[tuple[int, bytes]]:
        first = self.last - len(self._kept) + 1
        for at, payload in enumerate(self._kept, first):
            if at > number:
                yield at, payload

    def __len__(self) -> int:
        return len(self._kept)


class _Inbox:
    """How far the other side's numbered messages are in."""

    def __init__(self) -> None:
        self.arrived = 0
        self.gap = False

    def is_next(self, number: int) -> bool:
        self.gap = number > self.arrived + 1
        return number == self.arrived + 1

    def announced(self, last: int) -> None:
        # Messages keep their order, so what was sent before this announcement would be here.
        self.gap = last > self.arrived


# -- ZeroMQ, both ends ------------------------------------------------------------------------------------------------

_TICK = 0.05  # of the background thread while the halves are meeting, and of a wait for plans
_BATCH = 1024  # messages read in one go: a stranger who floods the socket does not hold up a step
_REPEATS = 512  # messages sent again in one go; whoever misses more asks again
_LARGEST = 64 << 20  # bytes of a message; the plan of a million blocks has 10 MiB


class _Zmq(ABC):
    """What both ends share: two sockets, the lock around them, a thread that keeps the other side informed.

    Sockets are only touched under the lock, and only in ways that do not wait, so any thread may call any method; the
    lock is held for microseconds. The thread is a daemon and ends with :meth:`close`.
    """

    def __init__(self, rank: int, timeout: float, timing: Timing) -> None:
        self.malformed = 0  # frames that could not be read or came from strangers; they are dropped
        self._me = _SENDER.pack(_PROTOCOL, rank, int.from_bytes(os.urandom(8), "big"))
        self._timeout = timeout
        self._timing = timing
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._settled = threading.Event()  # the handshake has ended, one way or another
        self._error: ChannelError | None = None
        self._closed = False
        self._last_malformed = ""
        self._context = zmq.Context(io_threads=1)
        self._out_box = _Outbox()
        self._told = float("-inf")  # when the last ping or beat went out
        self._taken_since = 0  # messages handed to the caller since then
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"kvbm-{type(self).__name__}-{rank}", daemon=True)

    def _socket(self, kind: int, url: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        # Above the window, so that only a broken connection or a flood loses messages; both show as gaps.
        socket.setsockopt(zmq.SNDHWM, 2 * WINDOW)
        socket.setsockopt(zmq.RCVHWM, 2 * WINDOW)
        socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
        socket.setsockopt(zmq.IPV6, "[" in url)
        # Of the library's own thread: a host that vanished without a word is noticed, and the connection made anew.
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        return socket

    def _run(self) -> None:
        while not self._stop.wait(self._pause()):
            with self._lock:
                try:
                    self._drain()
                    self._turn(time.monotonic())
                except Exception:
                    # A fault of this program. Nobody may be left waiting for a thread that is gone.
                    logger.exception("KVBM: the channel's thread has failed")
                    self._end(ChannelError("the channel's thread has failed; see the log"))
                    self._break("the channel's thread has failed")
                    return

    def _drain(self) -> None:
        for _ in range(_BATCH):
            if self._closed or not int(self._in.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            frames = self._in.recv_multipart(zmq.NOBLOCK)
            try:
                self._handle(*_read(frames))
            except _UNREADABLE as error:
                self._drop(str(error))

    def _post(self, number: int, function: bytes, payload: bytes = b"") -> None:
        # Full: the other side will see the gap, or this is repeated anyway.
        with suppress(zmq.Again):
            if not self._closed:
                self._out.send_multipart([_NUMBER.pack(number), function, self._me, payload], zmq.NOBLOCK)

    def _repeat(self, after: int) -> None:
        for number, payload in islice(self._out_box.after(after), _REPEATS):
            self._post(number, self._numbered, payload)

    def _drop(self, why: str) -> None:
        self.malformed += 1
        self._last_malformed = why
        if self.malformed == 1:
            logger.warning("KVBM: dropped a message on %s: %s; further ones are only counted", self._in_url, why)

    def _end(self, error: ChannelError | None) -> None:
        self._error = self._error or error
        self._settled.set()

    def _await(self, timeout: float | None) -> None:
        self._settled.wait(timeout)
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise ChannelError("the channel was closed before leader and workers had met")
            if not self._settled.is_set():
                raise HandshakeTimeoutError(self._late())

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._stop.set()
            self._settled.set()
        if self._thread.is_alive():
            self._thread.join()
        self._context.destroy(linger=0)

    # What the two ends do differently.
    _in: zmq.Socket[bytes]
    _out: zmq.Socket[bytes]
    _in_url: str
    _numbered: bytes  # the function that carries numbered messages

    @abstractmethod
    def _pause(self) -> float:
        """Seconds until the thread's next turn."""

    @abstractmethod
    def _turn(self, now: float) -> None:
        """What the thread does when everything that came in has been handled."""

    @abstractmethod
    def _handle(self, number: int, function: bytes, sender: bytes, payload: bytes) -> None:
        """One message. Raises one of ``_UNREADABLE`` when it is to be dropped."""

    @abstractmethod
    def _break(self, why: str) -> None:
        """No message can be trusted to arrive any more."""

    @abstractmethod
    def _late(self) -> str:
        """The text of a handshake that takes too long."""

    def _unread(self) -> str:
        if not self.malformed:
            return ""
        return f" {self.malformed} messages were dropped, the last one because: {self._last_malformed}."


def _read(frames: list[bytes]) -> tuple[int, bytes, bytes, bytes]:
    if len(frames) != 4 or len(frames[0]) != _NUMBER.size or len(frames[2]) != _SENDER.size:
        raise ValueError(f"{len(frames)} frames of {[len(frame) for frame in frames[:8]]} bytes are no message of KVBM")
    if frames[2][0] != _PROTOCOL:
        raise ValueError(
            f"the sender speaks version {frames[2][0]} of the protocol and this side {_PROTOCOL}; install the same "
            "release of kvbm everywhere"
        )
    return _NUMBER.unpack(frames[0])[0], frames[1], frames[2], frames[3]


def _ranks(ranks: Iterable[int]) -> str:
    named = sorted(ranks)
    return f"rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}"


# -- ZeroMQ, the leader -----------------------------------------------------------------------------------------------


class _Peer:
    """One worker as the leader knows it."""

    def __init__(self, hello: Hello, sender: bytes, now: float) -> None:
        self.hello = hello
        self.sender = sender
        self.ready = False
        self.seen = now
        self.inbox = _Inbox()
        self.given = 0  # reports up to this number were given to the leader
        self.taken = 0  # plans up to this number were taken by the worker


class ZmqLeader(_Zmq, LeaderChannel):
    """The leader's end over ZeroMQ. Safe from any thread.

    The constructor binds and returns at once; the handshake goes on in the background, since an engine may build leader
    and worker side by side. :meth:`wait` for it, or look at :attr:`ready` from time to time. When it fails (time is up,
    workers do not fit together), the workers are told why, so that they do not wait in vain.
    """

    _numbered = b"plan"

    def __init__(
        self,
        ranks: int,
        pub_url: str = PUB_URL,
        ack_url: str = ACK_URL,
        timeout: float = 1800.0,
        timing: Timing = TIMING,
    ) -> None:
        super().__init__(0, timeout, timing)
        self.ranks = ranks
        self._peers: dict[bytes, _Peer] = {}
        self._by_rank: dict[int, _Peer] = {}
        self._agreement: Agreement | None = None
        self._reports: deque[Report] = deque()
        self._lost: dict[int, str] = {}
        self._ready = False
        self._round = float("-inf")
        self._looked = self._begun
        self._said = (self._begun, "")
        self._stranger = False
        try:
            self._out, self.pub_url = self._bind(zmq.PUB, pub_url, PUB_SETTING)
            self._in, self.ack_url = self._bind(zmq.PULL, ack_url, ACK_SETTING)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._in_url = self.ack_url
        self._thread.start()

    def _bind(self, kind: int, url: str, setting: str) -> tuple[zmq.Socket[bytes], str]:
        host = urlsplit(url).hostname or ""
        if not _is_loopback(host):
            logger.warning(
                "KVBM: the leader listens on %s, beyond this machine. The channel is unauthenticated: whoever reaches "
                "the port can make workers move blocks. Keep %s on 127.0.0.1 unless workers run on other machines",
                url,
                HOST_SETTING,
            )
        socket = self._socket(kind, url)
        try:
            socket.bind(url)
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                raise ChannelError(
                    f"the leader cannot listen on {url}: the port is taken, most likely by another engine on this "
                    f"host. Every leader on a host needs its own pair of ports: set {setting} to a free one"
                ) from error
            raise ChannelError(
                f"the leader cannot listen on {url}: {zmq.strerror(error.errno or 0)}. {HOST_SETTING} (here {host!r}) "
                f"must be an IP address of the machine the leader runs on, and {setting} a port it may use"
            ) from error
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    # -- meeting ------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True once every worker has allocated: plans may be sent. Stays False when the handshake has failed."""
        return self._ready

    @property
    def error(self) -> ChannelError | None:
        """Why the handshake has failed, for callers that do not :meth:`wait`."""
        return self._error

    def wait(self, timeout: float | None = None) -> Agreement:
        """Block until every worker is ready. Raises :class:`ChannelError` when the handshake has failed.

        With a ``timeout`` the wait may also end early with :class:`HandshakeTimeoutError`, and the handshake goes on.
        """
        self._await(timeout)
        assert self._agreement is not None
        return self._agreement

    def _shake_hands(self, now: float) -> None:
        if self._error is None and now - self._begun > self._timeout:
            self._end(HandshakeTimeoutError(self._late()))
            self._round = float("-inf")
        if now - self._round < self._timing.round:
            return
        self._round = now
        if self._error is not None:
            self._post(0, b"refused", str(self._error).encode())
        elif self._agreement is None:
            self._post(0, b"hello")
        else:
            workers = [self._by_rank[rank].sender for rank in range(self.ranks)]
            self._post(0, b"agreed", _encode(_Agreed(self._agreement, workers)))
        self._say_progress(now)

    def _say_progress(self, now: float) -> None:
        at, before = self._said
        if self._error is not None or now - at < self._timing.progress:
            return
        state = self._state()
        # Unchanged for minutes while a model loads: one line in six.
        if state != before or now - at >= 6 * self._timing.progress:
            self._said = (now, state)
            logger.info("KVBM: %s, %.0f s of %.0f s", state, now - self._begun, self._timeout)

    def _state(self) -> str:
        missing = self._missing()
        if self._agreement is None:
            return f"{self.ranks - len(missing)} of {self.ranks} workers have answered (missing: {_ranks(missing)})"
        done = self.ranks - len(missing)
        return f"{done} of {self.ranks} workers have allocated their tiers (missing: {_ranks(missing)})"

    def _missing(self) -> list[int]:
        if self._agreement is None:
            return [rank for rank in range(self.ranks) if rank not in self._by_rank]
        return [rank for rank, peer in self._by_rank.items() if not peer.ready]

    def _late(self) -> str:
        return (
            f"{self._state()} after {time.monotonic() - self._begun:.0f} s; {TIMEOUT_SETTING} allows "
            f"{self._timeout:.0f} s. The leader sends on {self.pub_url} and listens on {self.ack_url}.{self._unread()} "
            f"Check that the missing workers run and have not failed (their logs), that they were started with the "
            f"same {HOST_SETTING}, {PUB_SETTING} and {ACK_SETTING}, and that no firewall is in between. If they only "
            f"need longer to load the model or to allocate, raise {TIMEOUT_SETTING}"
        )

    def _meet(self, sender: bytes, payload: bytes) -> None:
        hello = decode_hello(payload)
        if hello.rank != _SENDER.unpack(sender)[1]:
            raise ValueError(f"a hello of rank {hello.rank} from another rank")
        known = self._by_rank.get(hello.rank)
        if known is not None and known.sender == sender:
            return
        if self._agreement is not None or self._error is not None:
            if not self._stranger:
                self._stranger = True
                logger.warning(
                    "KVBM: a worker that calls itself rank %d came to the leader on %s after its own workers had met. "
                    "It is ignored; if it belongs to another engine on this host, give that engine its own %s and %s",
                    hello.rank,
                    self.ack_url,
                    PUB_SETTING,
                    ACK_SETTING,
                )
            return
        try:
            if known is not None:
                raise ChannelError(
                    f"two workers call themselves rank {hello.rank}. If two engines on this host share {self.pub_url} "
                    f"and {self.ack_url}, give each its own {PUB_SETTING} and {ACK_SETTING}; if a worker was restarted "
                    "alone, restart the engine"
                )
            if not 0 <= hello.rank < self.ranks:
                raise ChannelError(
                    f"a worker calls itself rank {hello.rank}, but this leader has the ranks 0 to {self.ranks - 1}. "
                    f"Most likely it belongs to another engine: give each its own {PUB_SETTING} and {ACK_SETTING}"
                )
            self._by_rank[hello.rank] = self._peers[sender] = _Peer(hello, sender, time.monotonic())
            if len(self._by_rank) == self.ranks:
                self._agreement = agree([peer.hello for peer in self._by_rank.values()])
        except ChannelError as error:
            self._end(error)
        if self._agreement is not None or self._error is not None:
            self._round = float("-inf")  # tell them in this turn, before anybody closes

    # -- working ------------------------------------------------------------------------------------------------------

    def send(self, plan: StepPlan) -> None:
        if not plan:
            return
        payload = encode(plan)
        with self._lock:
            if self._closed:
                return
            if not self._ready:
                raise ChannelError("a plan was sent before the workers were ready")
            self._post(self._out_box.add(payload), b"plan", payload)
            if len(self._out_box) > WINDOW:
                for rank, peer in self._by_rank.items():
                    if self._out_box.last - peer.taken > WINDOW:
                        self._lose(rank, f"has left {WINDOW} plans untaken")

    def receive(self) -> list[Report]:
        with self._lock:
            self._drain()
            reports = [] if self._closed else list(self._reports)
            self._reports.clear()
            if reports:
                for peer in self._by_rank.values():
                    peer.given = peer.inbox.arrived
                self._taken_since += len(reports)
                if self._taken_since > WINDOW // 8:
                    self._ping(time.monotonic())
            return reports

    def lost_ranks(self) -> dict[int, str]:
        with self._lock:
            if self._ready and not self._closed:
                self._drain()
                self._look(time.monotonic())
            return dict(self._lost)

    def _look(self, now: float) -> None:
        """Who has been silent for too long?"""
        away = now - self._looked
        self._looked = now
        if away > self._timing.silence / 4:
            # This process itself was stopped or starved. What it did not hear meanwhile says nothing about the workers.
            for peer in self._by_rank.values():
                peer.seen = min(peer.seen + away, now)
        for rank, peer in self._by_rank.items():
            if now - peer.seen > self._timing.silence:
                self._lose(rank, f"has been silent for {now - peer.seen:.0f} s")

    def _lose(self, rank: int, why: str) -> None:
        if rank not in self._lost:
            self._lost[rank] = why
            logger.error("KVBM: rank %d is lost: it %s. Its plans under way have failed", rank, why)
            self._trim()

    def _trim(self) -> None:
        live = [peer.taken for rank, peer in self._by_rank.items() if rank not in self._lost]
        self._out_box.taken(min(live, default=self._out_box.last))

    def _ping(self, now: float) -> None:
        self._told, self._taken_since = now, 0
        peers = [self._by_rank[rank] for rank in range(self.ranks)]
        arrived = [peer.inbox.arrived for peer in peers]
        again = [rank for rank, peer in enumerate(peers) if peer.inbox.gap]
        ping = _Ping(arrived, [peer.given for peer in peers], again, list(self._lost))
        self._post(self._out_box.last, b"ping", _encode(ping))

    def _pause(self) -> float:
        return min(self._timing.beat / 4, 1.0) if self._ready else _TICK

    def _turn(self, now: float) -> None:
        if not self._ready:
            self._shake_hands(now)
            return
        self._look(now)
        if now - self._told >= self._timing.beat or any(peer.inbox.gap for peer in self._by_rank.values()):
            self._ping(now)

    def _break(self, why: str) -> None:
        for rank in range(self.ranks):
            self._lose(rank, f"cannot be reached: {why}")

    def _handle(self, number: int, function: bytes, sender: bytes, payload: bytes) -> None:
        if function == b"hello":
            self._meet(sender, payload)
            return
        peer = self._peers.get(sender)
        if peer is None:
            raise ValueError(f"a {function[:16]!r} from a worker that was not admitted")
        rank = peer.hello.rank
        if rank in self._lost:
            return
        peer.seen = time.monotonic()
        if function == b"report":
            if peer.inbox.is_next(number):
                try:
                    self._reports.extend(decode_reports(payload))
                except _UNREADABLE as error:
                    self._lose(rank, f"has sent a report that cannot be read: {error}")
                    raise
                peer.inbox.arrived = number
        elif function == b"beat":
            beat = _decode_beat(payload)
            peer.inbox.announced(number)
            peer.taken = max(peer.taken, min(beat.taken, self._out_box.last))
            self._trim()
            if beat.again:
                self._repeat(beat.arrived)
        elif function == b"ready":
            if self._agreement is not None and not peer.ready:
                peer.ready = True
                if not self._missing():
                    self._begin()
        elif function == b"failed":
            self._lose(rank, f"has given up: {payload.decode(errors='replace')}")
        else:
            raise ValueError(f"unknown function {function[:16]!r}")

    def _begin(self) -> None:
        if self._error is not None:
            return
        self._ready = True
        self._looked = time.monotonic()
        for peer in self._by_rank.values():
            peer.seen = self._looked
        self._end(None)
        logger.info("KVBM: all %d workers are ready after %.1f s", self.ranks, self._looked - self._begun)
        self._ping(self._looked)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# -- ZeroMQ, a worker -------------------------------------------------------------------------------------------------


class ZmqWorker(_Zmq, WorkerChannel):
    """One rank's end over ZeroMQ. Safe from any thread.

    In order: construct it with what this rank has to offer, :meth:`wait` for what was agreed, allocate that,
    :meth:`confirm`, then receive plans and send reports. Leader and workers may start in any order.

    A worker that the leader has given up gets no more plans (:attr:`lost` says why): the engine was told that they
    failed, and their blocks may belong to somebody else by now.
    """

    _numbered = b"report"

    def __init__(
        self,
        hello: Hello,
        pub_url: str = PUB_URL,
        ack_url: str = ACK_URL,
        timeout: float = 1800.0,
        timing: Timing = TIMING,
    ) -> None:
        super().__init__(hello.rank, timeout, timing)
        self.hello = hello
        self.pub_url, self.ack_url = pub_url, ack_url
        self.lost: str | None = None
        self._leader: bytes | None = None
        self._agreement: Agreement | None = None
        self._confirmed = False
        self._foreign = False
        self._inbox = _Inbox()
        self._plans: deque[StepPlan] = deque()
        self._held: Report | None = None
        try:
            self._in = self._socket(zmq.SUB, pub_url)
            self._in.setsockopt(zmq.SUBSCRIBE, b"")
            self._in.connect(pub_url)
            self._out = self._socket(zmq.PUSH, ack_url)
            self._out.connect(ack_url)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ChannelError(
                f"rank {hello.rank} cannot connect to {pub_url} and {ack_url}: {zmq.strerror(error.errno or 0)}; check "
                f"{HOST_SETTING}, {PUB_SETTING} and {ACK_SETTING}"
            ) from error
        self._in_url = pub_url
        self._notice = int(self._in.getsockopt(zmq.FD))
        # Unasked, and again whenever the leader asks: whoever comes first waits in the socket.
        self._post(0, b"hello", encode(hello))
        self._thread.start()

    # -- meeting ------------------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> Agreement:
        """Block until the leader has heard all ranks. Raises :class:`ChannelError` when it refuses or stays silent."""
        self._await(timeout)
        assert self._agreement is not None
        return self._agreement

    def confirm(self) -> None:
        """This rank has allocated what was agreed: plans may come."""
        with self._lock:
            if self._agreement is None:
                raise ChannelError(f"rank {self.hello.rank} confirmed before anything was agreed")
            self._confirmed = True
            self._post(0, b"ready")

    def _late(self) -> str:
        foreign = " A leader does answer there, but it works with other workers." if self._foreign else ""
        return (
            f"rank {self.hello.rank} has waited {time.monotonic() - self._begun:.0f} s for its leader; "
            f"{TIMEOUT_SETTING} allows {self._timeout:.0f} s. It listens to {self.pub_url} and answers to "
            f"{self.ack_url}.{foreign}{self._unread()} Check that the leader runs (its log names the ranks it misses), "
            f"that it was started with the same {HOST_SETTING}, {PUB_SETTING} and {ACK_SETTING}, and that no other "
            "engine on its host uses the same ports"
        )

    def _meet(self, sender: bytes, agreed: _Agreed) -> None:
        if self._me not in agreed.workers:
            self._met_foreign()
            return
        if self._agreement is None:
            self._leader, self._agreement = sender, agreed.agreement
            self._end(None)
        if self._confirmed:
            self._post(0, b"ready")

    def _met_foreign(self) -> None:
        if not self._foreign and self._leader is None:
            self._foreign = True
            logger.warning(
                "KVBM: the leader on %s works with other workers; rank %d keeps waiting for its own. If another engine "
                "on this host uses the same ports, give each its own %s and %s",
                self.pub_url,
                self.hello.rank,
                PUB_SETTING,
                ACK_SETTING,
            )

    # -- working ------------------------------------------------------------------------------------------------------

    def receive(self, timeout: float = 0.0) -> list[StepPlan]:
        until = time.monotonic() + timeout
        while True:
            with self._lock:
                self._drain()
                if self._plans and not self._closed:
                    return self._take()
                left = until - time.monotonic()
                if self._closed or left <= 0:
                    return []
            # Outside of the lock, on the socket's descriptor: others may send meanwhile. In short stretches, since the
            # background thread may have read what would have woken this one.
            poll = select.poll()
            poll.register(self._notice, select.POLLIN)
            poll.poll(min(left, _TICK) * 1000)

    def _take(self) -> list[StepPlan]:
        plans = list(self._plans)
        self._plans.clear()
        self._taken_since += len(plans)
        if self._taken_since > WINDOW // 8:
            self._beat(time.monotonic())
        return plans

    def send(self, report: Report) -> None:
        if not report:
            return
        with self._lock:
            if self._closed or self.lost is not None:
                return
            self._held = report if self._held is None else _merge(self._held, report)
            self._flush()

    def _flush(self) -> None:
        if self._held is not None and len(self._out_box) < WINDOW:
            payload = encode([self._held])
            self._held = None
            self._post(self._out_box.add(payload), b"report", payload)

    def _beat(self, now: float) -> None:
        self._told, self._taken_since = now, 0
        arrived = self._inbox.arrived
        beat = _Beat(arrived, arrived - len(self._plans), self._inbox.gap)
        self._post(self._out_box.last, b"beat", _encode(beat))

    def _break(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
            self._plans.clear()
            logger.error("KVBM: rank %d takes no more plans: %s", self.hello.rank, why)

    def _pause(self) -> float:
        return min(self._timing.beat / 4, 1.0) if self._confirmed else _TICK

    def _turn(self, now: float) -> None:
        if self._leader is None:
            if self._error is None and now - self._begun > self._timeout:
                self._end(HandshakeTimeoutError(self._late()))
            return
        if self.lost is None and (self._inbox.gap or now - self._told >= self._timing.beat):
            self._beat(now)

    def _handle(self, number: int, function: bytes, sender: bytes, payload: bytes) -> None:
        if self._leader is None:
            if self._error is not None:
                return  # wait() has ended badly: nobody is going to allocate any more
            if function == b"hello":
                self._post(0, b"hello", encode(self.hello))
            elif function == b"agreed":
                self._meet(sender, _decode_agreed(payload))
            elif function == b"refused":
                self._end(ChannelError(payload.decode(errors="replace")))
            else:
                self._met_foreign()
            return
        if sender != self._leader:
            raise ValueError("a message from a leader that has not admitted this worker")
        if self.lost is not None:
            return
        if function == b"plan":
            if self._inbox.is_next(number):
                try:
                    self._plans.append(decode_step(payload))
                except _UNREADABLE as error:
                    # Asking again would bring the same bytes.
                    self._break(f"a plan cannot be read: {error}")
                    self._post(0, b"failed", f"a plan cannot be read: {error}".encode())
                    raise
                self._inbox.arrived = number
        elif function == b"ping":
            ping = _decode_ping(payload)
            rank = self.hello.rank
            self._inbox.announced(number)
            self._out_box.taken(ping.taken[rank])
            if rank in ping.again:
                self._repeat(ping.arrived[rank])
            self._flush()
            if rank in ping.lost:
                self._break("the leader has given this rank up")
        elif function == b"agreed":
            self._meet(sender, _decode_agreed(payload))
        elif function == b"refused":
            self._break(payload.decode(errors="replace"))
        elif function != b"hello":
            raise ValueError(f"unknown function {function[:16]!r}")


def _merge(first: Report, second: Report) -> Report:
    faults = Counter(first.faults)
    faults.update(second.faults)
    return Report(first.rank, first.loads + second.loads, first.stores + second.stores, dict(faults))
