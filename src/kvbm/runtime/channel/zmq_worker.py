"""One rank's end over ZeroMQ: finds its leader, takes plans, sends reports."""

from __future__ import annotations

import logging
import select
import time
from collections import Counter

import zmq

from kvbm.plans import Hello, Report, StepPlan, decode_step, encode
from kvbm.runtime.channel import local
from kvbm.runtime.channel import zmq_wire as wire
from kvbm.runtime.channel.base import TIMING, ChannelError, Timing
from kvbm.runtime.channel.zmq_end import ACK_SETTING, HOST_SETTING, PUB_SETTING, TICK, TIMEOUT_SETTING, ZmqEnd

logger = logging.getLogger(__name__)


class ZmqWorker(ZmqEnd):
    """One rank's end over ZeroMQ. Safe from any thread.

    In order: construct it with this rank's Hello, :meth:`wait` for the agreement, allocate the agreed memory,
    :meth:`confirm`, then receive plans and send reports. Leader and workers may start in any order.

    A worker that the leader has given up gets no more plans (:attr:`lost` says why): the engine was told that they
    failed, and their blocks may belong to other requests by now.
    """

    _numbered = b"report"
    _pulse = b"beat"

    def __init__(
        self,
        hello: Hello,
        pub_url: str,
        ack_url: str,
        timeout: float = 1800.0,
        timing: Timing = TIMING,
        secret: str = "",
    ) -> None:
        super().__init__(hello.rank, timeout, timing, secret)
        self.hello = hello
        self.pub_url, self.ack_url = pub_url, ack_url
        self.lost: str | None = None
        self._leader: bytes | None = None
        self._foreign = False
        self._inbox = wire.Inbox()
        self._plans: list[StepPlan] = []
        self._held: Report | None = None  # what waits for room in the window
        try:
            for path in filter(None, map(local.path_of, (pub_url, ack_url))):
                local.prepare(path)
            self._in = self._socket(zmq.SUB, pub_url, listens=False)
            self._in.setsockopt(zmq.SUBSCRIBE, b"")
            self._in.connect(pub_url)
            self._out = self._socket(zmq.PUSH, ack_url, listens=False)
            self._out.connect(ack_url)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ChannelError(
                f"rank {hello.rank} cannot connect to {pub_url} and {ack_url}: {zmq.strerror(error.errno or 0)}; check "
                f"{HOST_SETTING}, {PUB_SETTING} and {ACK_SETTING}"
            ) from error
        except ChannelError:
            self._context.destroy(linger=0)
            raise
        self._in_url = pub_url
        self._notice = int(self._in.getsockopt(zmq.FD))
        # Unasked, and again whenever the leader asks: a message to a peer that has not started waits in the socket.
        self._post(0, b"hello", encode(hello))
        self._thread.start()

    # -- meeting ------------------------------------------------------------------------------------------------------

    def confirm(self) -> None:
        """This rank has allocated the agreed memory: plans may come."""
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
            f"engine on its host uses the same ports.{local.hint(self.pub_url)}"
        )

    def _shake_hands(self, function: bytes, sender: bytes, payload: bytes) -> None:
        if self.error is not None:
            return  # wait() has raised: the caller will not allocate
        if function == b"hello":
            self._post(0, b"hello", encode(self.hello))
        elif function == b"refused":
            self._end(ChannelError(payload.decode(errors="replace")))
        elif function == b"agreed" and self._me in (agreed := wire.decode_agreed(payload)).workers:
            self._leader, self._agreement = sender, agreed.agreement
            self._end(None)
        elif not self._foreign:
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
        """Every plan that has arrived since the last call, in order; waits up to ``timeout`` seconds for the first."""
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
            poll.poll(min(left, TICK) * 1000)

    def _take(self) -> list[StepPlan]:
        plans, self._plans = self._plans, []
        self._inbox.given = self._inbox.arrived
        self._gave(len(plans))
        return plans

    def send(self, report: Report) -> None:
        """Deliver a report to the leader. An empty one is not sent. Never waits, never fails; ignored after a close."""
        if not report:
            return
        with self._lock:
            if self._closed or self.lost is not None:
                return
            self._held = report if self._held is None else _merge(self._held, report)
            self._flush()

    def _flush(self) -> None:
        if self._held is not None and len(self._out_box) < self._window:
            payload = encode([self._held])
            self._held = None
            self._post_numbered(payload)

    def _break(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
            self._plans.clear()
            logger.error("KVBM: rank %d takes no more plans: %s", self.hello.rank, why)

    def _heard(self) -> wire.Beat:
        return wire.Beat(self._inbox.arrived, self._inbox.given, self._inbox.gap)

    def _turn(self, now: float) -> None:
        if self._leader is None:
            self._check_time(now)
        elif self.lost is None:
            self._beat_if_due(now, self._inbox.gap)

    def _handle(self, number: int, function: bytes, sender: bytes, payload: bytes) -> None:
        if self._leader is None:
            self._shake_hands(function, sender, payload)
            return
        if sender != self._leader:
            raise ValueError("a message from a leader that has not admitted this worker")
        if self.lost is not None:
            return
        if function == b"plan":
            if self._inbox.is_next(number):
                try:
                    self._plans.append(decode_step(payload))
                except wire.UNREADABLE as error:
                    # Asking again would bring the same bytes.
                    why = f"a plan cannot be read: {error}"
                    self._break(why)
                    self._post(0, b"failed", why.encode())
                    raise
                self._inbox.arrived = number
        elif function == b"ping":
            ping = wire.decode_ping(payload)
            rank = self.hello.rank
            self._inbox.announced(number)
            self._out_box.taken(ping.taken[rank])
            if rank in ping.again:
                self._repeat(ping.arrived[rank])
            self._flush()
            if rank in ping.lost:
                self._break("the leader has given this rank up")
        elif function == b"agreed":
            if self._confirmed:
                self._post(0, b"ready")  # the first one was lost
        elif function == b"refused":
            self._break(payload.decode(errors="replace"))
        elif function != b"hello":
            raise ValueError(f"unknown function {function[:16]!r}")


def _merge(first: Report, second: Report) -> Report:
    return Report(
        first.rank,
        first.loads + second.loads,
        first.stores + second.stores,
        dict(Counter(first.faults) + Counter(second.faults)),
        first.moves + second.moves,
        {**first.adapters, **second.adapters},
        max(first.weight_changes, second.weight_changes),
    )
