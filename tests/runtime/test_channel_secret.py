"""The channel over TCP with a secret: both ends prove it, and an end without it gets nothing and is told why."""

from __future__ import annotations

import contextlib
import time
from contextlib import closing

import pytest
import zmq

from kvbm.plans import Hello, StepPlan, TierHello
from kvbm.runtime.channel import HandshakeTimeoutError, ZmqLeader, ZmqWorker
from tiernames import HOST

ANY = "tcp://127.0.0.1:*"
SECRET = "correct horse battery staple"


def worker_of(leader: ZmqLeader, secret: str) -> ZmqWorker:
    hello = Hello(0, 1, "a", [TierHello(HOST, 5)])
    return ZmqWorker(hello, leader.pub_url, leader.ack_url, timeout=60, secret=secret)


def until(is_so, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def stranger():
    """A context of ZeroMQ that has no keys."""
    made = zmq.Context()
    made.linger = 0
    yield made
    made.destroy(linger=0)


def test_ends_with_the_same_secret_meet_and_others_hear_nothing(stranger, caplog):
    with closing(ZmqLeader(1, ANY, ANY, timeout=60, secret=SECRET)) as leader:
        spy = stranger.socket(zmq.SUB)
        spy.setsockopt(zmq.SUBSCRIBE, b"")
        spy.connect(leader.pub_url)
        with closing(worker_of(leader, SECRET)) as worker:
            worker.wait(60)
            worker.confirm()
            leader.wait(60)
            leader.send(StepPlan(fences=[7]))
            got: list[StepPlan] = []
            until(lambda: got.extend(worker.receive()) or got)
            assert got == [StepPlan(fences=[7])]
            assert not spy.poll(200)
    assert "unauthenticated" not in caplog.text


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, "another secret altogether"), (SECRET, ""), ("", SECRET)])
def test_ends_with_different_secrets_do_not_meet_and_say_why(ours, theirs, caplog):
    with (
        closing(ZmqLeader(1, ANY, ANY, timeout=60, secret=ours)) as leader,
        closing(worker_of(leader, theirs)) as worker,
    ):
        until(lambda: "the other end has another secret, or none" in caplog.text)
        assert not leader.ready
        protected = leader if ours else worker
        with pytest.raises(HandshakeTimeoutError, match="connections were refused: the other end has another secret"):
            protected.wait(0.01)


def test_messages_without_the_secret_do_not_arrive(stranger):
    with closing(ZmqLeader(1, ANY, ANY, timeout=60, secret=SECRET)) as leader:
        push = stranger.socket(zmq.PUSH)
        push.connect(leader.ack_url)
        with contextlib.suppress(zmq.Again):
            push.send(b"\xff" * 100, zmq.NOBLOCK)
        with closing(worker_of(leader, SECRET)) as worker:
            worker.wait(60)
            worker.confirm()
            leader.wait(60)
        assert leader.malformed == 0
