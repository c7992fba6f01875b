"""The leader's end over ZeroMQ: admits the workers, sends plans, collects reports, gives up ranks that are gone."""

from __future__ import annotations

import errno
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from kvbm.plans import Hello, Report, StepPlan, decode_hello, decode_reports, encode
from kvbm.runtime.channel import local
from kvbm.runtime.channel import zmq_wire as wire
from kvbm.runtime.channel.base import TIMING, ChannelError, Timing, agree, name_ranks
from kvbm.runtime.channel.curve import SECRET_SETTING
from kvbm.runtime.channel.zmq_end import ACK_SETTING, HOST_SETTING, PUB_SETTING, TIMEOUT_SETTING, ZmqEnd

logger = logging.getLogger(__name__)


@dataclass
class _Peer:
    """One worker as the leader knows it."""

    hello: Hello
    sender: bytes
    seen: float
    ready: bool = False
    taken: int = 0  # plans up to this number were taken by the worker
    inbox: wire.Inbox = field(default_factory=wire.Inbox)


class ZmqLeader(ZmqEnd):
    """The leader's end over ZeroMQ. Safe from any thread.

    The constructor binds and returns at once; the handshake goes on in the background, since an engine may build leader
    and worker side by side. :meth:`wait` for it, or look at :attr:`ready` from time to time. When it fails (time is up,
    workers do not fit together), the workers are told why, so that they do not wait in vain.
    """

    _numbered = b"plan"
    _pulse = b"ping"

    def __init__(
        self,
        ranks: int,
        pub_url: str,
        ack_url: str,
        timeout: float = 1800.0,
        timing: Timing = TIMING,
        secret: str = "",
    ) -> None:
        super().__init__(0, timeout, timing, secret)
        self.ranks = ranks
        self._by_rank: dict[int, _Peer] = {}
        self._reports: list[Report] = []
        self._lost: dict[int, str] = {}
        self._looked = self._begun
        self._called = (self._begun, b"")  # the last round of the handshake
        self._said = (self._begun, "")  # the last line about its progress
        self._stranger = False
        self._claims: list[local.Claim] = []
        try:
            self._out, self.pub_url = self._bind(zmq.PUB, pub_url, PUB_SETTING)
            self._in, self.ack_url = self._bind(zmq.PULL, ack_url, ACK_SETTING)
        except BaseException:
            self._context.destroy(linger=0)
            self._let_go()
            raise
        self._in_url = self.ack_url
        self._thread.start()

    def _bind(self, kind: int, url: str, setting: str) -> tuple[zmq.Socket[bytes], str]:
        host = urlsplit(url).hostname or ""
        if (path := local.path_of(url)) is not None:
            self._claim(path, setting)
        elif self._curve is None:
            logger.warning(
                "KVBM: the leader listens on %s. The channel is then open to that network, and unauthenticated: "
                "any host that reaches the port can read plans and make workers move blocks. Set %s for the leader "
                "and all workers, and keep %s on 127.0.0.1 unless workers run on other machines",
                url,
                SECRET_SETTING,
                HOST_SETTING,
            )
        socket = self._socket(kind, url, listens=True)
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

    def _claim(self, path: Path, setting: str) -> None:
        try:
            self._claims.append(local.Claim(path))
        except local.CacheInUse as error:
            raise ChannelError(
                f"the leader cannot listen on {path}: another engine of this user has it. Every leader on a host needs "
                f"its own pair of ports: set {setting} to a free one"
            ) from error
        except OSError as error:
            raise ChannelError(f"the leader cannot listen on {path}: {error.strerror}") from error

    def _let_go(self) -> None:
        while self._claims:
            self._claims.pop().release()

    def close(self) -> None:
        super().close()
        self._let_go()

    # -- meeting ------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True once every worker has allocated: plans may be sent. Stays False when the handshake has failed."""
        return self._confirmed

    @property
    def hellos(self) -> list[Hello]:
        """The workers' handshakes, by rank. Complete after the agreement."""
        with self._lock:
            return [self._by_rank[rank].hello for rank in sorted(self._by_rank)]

    def _shake_hands(self, now: float) -> None:
        self._check_time(now)
        if self.error is not None:
            function, payload = b"refused", str(self.error).encode()
        elif self._agreement is None:
            function, payload = b"hello", b""
        else:
            workers = [peer.sender for peer in self._by_rank.values()]
            function, payload = b"agreed", wire.encode(wire.Agreed(self._agreement, workers))
        at, before = self._called
        # Send a new state in this turn: the channel may close after it.
        if function != before or now - at >= self._timing.round:
            self._called = (now, function)
            self._post(0, function, payload)
            self._say_progress(now)

    def _say_progress(self, now: float) -> None:
        at, before = self._said
        if self.error is not None or now - at < self._timing.progress:
            return
        state = self._state()
        # Unchanged for minutes while a model loads: one line in six.
        if state != before or now - at >= 6 * self._timing.progress:
            self._said = (now, state)
            logger.info("KVBM: %s, %.0f s of %.0f s", state, now - self._begun, self._timeout)

    def _state(self) -> str:
        missing = self._missing()
        done = "answered" if self._agreement is None else "allocated their tiers"
        count = self.ranks - len(missing)
        return f"{count} of {self.ranks} workers have {done} (missing: {name_ranks(missing)})"

    def _missing(self) -> list[int]:
        if self._agreement is None:
            return [rank for rank in range(self.ranks) if rank not in self._by_rank]
        return [rank for rank, peer in self._by_rank.items() if not peer.ready]

    def _late(self) -> str:
        return (
            f"{self._state()} after {time.monotonic() - self._begun:.0f} s; {TIMEOUT_SETTING} allows "
            f"{self._timeout:.0f} s. The leader sends on {self.pub_url} and listens on {self.ack_url}.{self._unread()} "
            f"Check that the missing workers run and have not failed (their logs), that they were started with the "
            f"same {HOST_SETTING}, {PUB_SETTING} and {ACK_SETTING}.{local.hint(self.pub_url)} If they only need longer "
            f"to load the model or to allocate, raise {TIMEOUT_SETTING}"
        )

    def _meet(self, known: _Peer | None, sender: bytes, hello: Hello) -> None:
        if hello.rank != wire.rank_of(sender):
            raise ValueError(f"a hello of rank {hello.rank} from another rank")
        if known is not None and known.sender == sender:
            return
        if self._agreement is not None or self.error is not None:
            self._turn_away(hello.rank)
        elif known is not None:
            self._end(
                ChannelError(
                    f"two workers call themselves rank {hello.rank}. If two engines on this host share {self.pub_url} "
                    f"and {self.ack_url}, give each its own {PUB_SETTING} and {ACK_SETTING}; if a worker was restarted "
                    "alone, restart the engine"
                )
            )
        elif hello.rank >= self.ranks:
            self._end(
                ChannelError(
                    f"a worker calls itself rank {hello.rank}, but this leader has the ranks 0 to {self.ranks - 1}. "
                    f"Most likely it belongs to another engine: give each its own {PUB_SETTING} and {ACK_SETTING}"
                )
            )
        else:
            self._by_rank[hello.rank] = _Peer(hello, sender, time.monotonic())
            if len(self._by_rank) == self.ranks:
                self._by_rank = dict(sorted(self._by_rank.items()))
                try:
                    self._agreement = agree([peer.hello for peer in self._by_rank.values()])
                except ChannelError as error:
                    self._end(error)

    def _turn_away(self, rank: int) -> None:
        if not self._stranger:
            self._stranger = True
            logger.warning(
                "KVBM: a worker that calls itself rank %d came to the leader on %s after its own workers had met. "
                "It is ignored; if it belongs to another engine on this host, give that engine its own %s and %s",
                rank,
                self.ack_url,
                PUB_SETTING,
                ACK_SETTING,
            )

    def _begin(self) -> None:
        self._confirmed = True
        self._looked = time.monotonic()
        for peer in self._by_rank.values():
            peer.seen = self._looked
        self._end(None)
        logger.info("KVBM: all %d workers are ready after %.1f s", self.ranks, self._looked - self._begun)
        self._beat(self._looked)

    # -- working ------------------------------------------------------------------------------------------------------

    def send(self, plan: StepPlan) -> None:
        """Deliver a plan to every rank. An empty one is not sent. Never fails because of a worker: one that is gone
        shows in :meth:`lost_ranks`. Ignored after :meth:`close`."""
        if not plan:
            return
        payload = encode(plan)
        with self._lock:
            if self._closed:
                return
            if not self._confirmed:
                raise ChannelError("a plan was sent before the workers were ready")
            self._post_numbered(payload)
            if len(self._out_box) > self._window:
                for rank, peer in self._by_rank.items():
                    if self._out_box.last - peer.taken > self._window:
                        self._lose(rank, f"has left {self._window} plans untaken")

    def receive(self) -> list[Report]:
        """Every report that has arrived since the last call; those of one rank in the order they were sent."""
        with self._lock:
            self._drain()
            if self._closed or not self._reports:
                return []
            reports, self._reports = self._reports, []
            for peer in self._by_rank.values():
                peer.inbox.given = peer.inbox.arrived
            self._gave(len(reports))
            return reports

    def lost_ranks(self) -> dict[int, str]:
        """Ranks that no plan reaches any more, and why. Ask in every step, and hand each to ``Leader.fail_rank``, which
        ends the loads and stores that wait for it; a rank never comes back out of here."""
        with self._lock:
            if self._confirmed and not self._closed:
                self._drain()
                self._look(time.monotonic())
            return dict(self._lost)

    def _look(self, now: float) -> None:
        """Declare ranks lost that have been silent for too long."""
        away = now - self._looked
        self._looked = now
        if away > self._timing.silence / 4:
            # This process itself was stopped or starved: the silence of that time says nothing about the workers.
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

    def _break(self, why: str) -> None:
        for rank in range(self.ranks):
            self._lose(rank, f"cannot be reached: {why}")

    def _heard(self) -> wire.Ping:
        inboxes = [peer.inbox for peer in self._by_rank.values()]
        return wire.Ping(
            arrived=[inbox.arrived for inbox in inboxes],
            taken=[inbox.given for inbox in inboxes],
            again=[rank for rank, inbox in enumerate(inboxes) if inbox.gap],
            lost=list(self._lost),
        )

    def _turn(self, now: float) -> None:
        if self._confirmed:
            self._look(now)
            self._beat_if_due(now, any(peer.inbox.gap for peer in self._by_rank.values()))
        else:
            self._shake_hands(now)

    def _handle(self, number: int, function: bytes, sender: bytes, payload: bytes) -> None:
        rank = wire.rank_of(sender)
        peer = self._by_rank.get(rank)
        if function == b"hello":
            self._meet(peer, sender, decode_hello(payload))
            return
        if peer is None or peer.sender != sender:
            raise ValueError(f"a {function[:16]!r} from a worker that was not admitted")
        if rank in self._lost:
            return
        peer.seen = time.monotonic()
        if function == b"report":
            if peer.inbox.is_next(number):
                try:
                    self._reports += decode_reports(payload)
                except wire.UNREADABLE as error:
                    self._lose(rank, f"has sent a report that cannot be read: {error}")
                    raise
                peer.inbox.arrived = number
        elif function == b"beat":
            beat = wire.decode_beat(payload)
            peer.inbox.announced(number)
            peer.taken = max(peer.taken, min(beat.taken, self._out_box.last))
            self._trim()
            if beat.again:
                self._repeat(beat.arrived)
        elif function == b"ready":
            if self._agreement is not None and self.error is None and not peer.ready:
                peer.ready = True
                if not self._missing():
                    self._begin()
        elif function == b"failed":
            self._lose(rank, f"has given up: {payload.decode(errors='replace')}")
        else:
            raise ValueError(f"unknown function {function[:16]!r}")
