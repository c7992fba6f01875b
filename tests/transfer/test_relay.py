"""Two streams that take turns keep one order, however the GPU runs them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from kvbm.transfer import relay


class Event:
    def __init__(self):
        self.recorded = 0  # how often, in the order of submission
        self.reached = 0  # how often, in that of the GPU

    def record(self, stream):
        self.recorded += 1
        stream.queue.append(("record", self, self.recorded))


class Stream:
    def __init__(self, device, priority):
        self.queue = []
        self.priority = priority
        self.synchronized = False

    def wait_event(self, event):
        self.queue.append(("wait", event, event.recorded))

    def synchronize(self):
        self.synchronized = True


@pytest.fixture
def made(monkeypatch):
    streams = []

    def make(device, priority):
        streams.append(Stream(device, priority))
        return streams[-1]

    monkeypatch.setattr(relay.torch, "cuda", SimpleNamespace(Stream=make, Event=Event))
    return streams


def run(streams, seed):
    """The work of all streams in the order in which a GPU may do it that picks one or the other at random."""
    done, source = [], random.Random(seed)
    while any(stream.queue for stream in streams):
        ready = []
        for stream in streams:
            if stream.queue:
                what, about, count = stream.queue[0]
                if what != "wait" or about.reached >= count:
                    ready.append(stream)
        assert ready, "they wait for each other"
        what, about, count = source.choice(ready).queue.pop(0)
        if what == "record":
            about.reached = max(about.reached, count)
        elif what == "work":
            done.append(about)
    return done


@pytest.mark.parametrize("seed", range(20))
def test_work_keeps_its_order(made, seed):
    two, source = relay.Relay("cuda:0", -5), random.Random(seed)
    for number in range(50):
        two.stream.queue.append(("work", number, 0))
        if source.random() < 0.5:
            two.hand_over()
    assert len(made) == 2
    assert run(made, seed) == list(range(50))


def test_the_streams_change(made):
    two = relay.Relay("cuda:0", -5)
    seen = [two.stream]
    for _ in range(3):
        two.hand_over()
        seen.append(two.stream)
    assert seen[0] is seen[2] is not seen[1] is seen[3]
    assert {stream.priority for stream in made} == {-5}


def test_who_cannot_hand_over_goes_on_where_he_is(made, monkeypatch):
    """In the other stream nothing would wait for what came before."""

    def broken(event):
        raise RuntimeError("no event")

    two = relay.Relay("cuda:0", -5)
    before = two.stream
    monkeypatch.setattr(made[1], "wait_event", broken)
    with pytest.raises(RuntimeError, match="no event"):
        two.hand_over()
    assert two.stream is before


def test_who_waits_waits_for_the_last(made):
    two = relay.Relay("cuda:0", 0)
    two.hand_over()
    two.wait()
    assert [stream.synchronized for stream in made] == [False, True]
