"""A source that stops in the middle of a transfer, and goes on when its destination belongs to another block."""

from __future__ import annotations

import ctypes
import os
import random
import signal

import pytest
from peer_member import Member, Reader

from kvbm.tiers.peers.client import NIXL, SOCKET
from kvbm.tiers.peers.nixl_path import api

SLOT_BYTES = 256 << 10
BLOCKS = 48  # 12 MiB: more than the buffers of both sockets hold


class Rounds:
    """Each round: read, stop the source in the middle, give up, use the slots for something else, let it go on."""

    def __init__(self, run_dir, way, blocks=BLOCKS) -> None:
        self.blocks = blocks
        self.member = Member(run_dir, slots=blocks, slot_bytes=SLOT_BYTES)
        self.member.store(*range(blocks))
        self.reader = Reader([self.member.tcp], blocks=blocks, slot_bytes=SLOT_BYTES, ways=(way,))
        self.random = random.Random(7)
        self.other = b"\x5a" * ((blocks - 1) * SLOT_BYTES)
        self.stopped = self.wrong = 0

    def run(self, number) -> None:
        pid, size = self.member.server.pid, self.blocks * SLOT_BYTES
        address = ctypes.addressof(self.reader.memory)
        ctypes.memset(address, 0, size)
        operation = self.reader.begin(range(self.blocks))
        # Wait until bytes arrive, up to a block that differs with each round.
        last = self.random.randrange(self.blocks // 2) * SLOT_BYTES + SLOT_BYTES - 1
        while self.reader.memory[last] == b"\0" and self.reader.memory[last - 1] == b"\0" and not operation.done():
            pass
        os.kill(pid, signal.SIGSTOP)
        try:
            self.stopped += not operation.done()
            operation.cancel()
            assert operation.wait(60)
            ctypes.memset(address, 0x5A, size)  # the slots hold other blocks now
        finally:
            os.kill(pid, signal.SIGCONT)
        again = self.reader.read([0], at=0)  # the source serves on, and what it still had to send has gone
        assert again.bad == [], again.reason
        self.wrong += self.reader.memory.raw[SLOT_BYTES:size] != self.other

    def close(self) -> None:
        self.reader.close()
        self.member.close()


@pytest.fixture(
    params=[SOCKET, pytest.param(NIXL, marks=pytest.mark.skipif(api() is None, reason="needs NIXL"))]
)  # fmt: skip
def rounds(run_dir, request, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    rounds = Rounds(run_dir, request.param)
    yield rounds
    rounds.close()


def test_a_source_that_stops_writes_to_no_slot_that_was_given_up(rounds):
    for number in range(20):
        rounds.run(number)
    assert rounds.stopped >= 10
    assert rounds.wrong == 0


@pytest.mark.peers
@pytest.mark.timeout(3600)
def test_a_thousand_rounds(rounds):
    for number in range(1000):
        rounds.run(number)
        if number % 100 == 99:
            print(f"{number + 1} rounds, {rounds.stopped} stopped in the middle, {rounds.wrong} wrong", flush=True)
    assert rounds.stopped >= 500
    assert rounds.wrong == 0


def test_the_rounds_notice_a_missing_quarantine(rounds, monkeypatch):
    """The same with an operation that ends as soon as it is given up, while its thread still receives."""
    from kvbm.tiers.base import Operation

    def cancel(operation):
        operation.cancelled = False  # the thread goes on
        operation._over.set()

    monkeypatch.setattr(Operation, "cancel", cancel)
    for number in range(20):
        rounds.run(number)
    assert rounds.wrong > 0
