"""Filters of real server processes, as another engine's finder follows them."""

from __future__ import annotations

import os
import signal
import time

import pytest
from peer_member import CACHE, SECRET, Member, key

from kvbm.tiers.host.shared import machine
from kvbm.tiers.peers.client import Identity
from kvbm.tiers.peers.finders import FilterClient
from kvbm.tiers.peers.finding.finder import FleetFinder
from kvbm.tiers.peers.finding.member_lists import AddressList, NeighbourList
from kvbm.tiers.peers.wire import VERSION, Who


def wait_for(is_so, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def members(tmp_path):
    made: list[Member] = []

    def make(**settings) -> Member:
        made.append(Member(tmp_path, **settings))
        return made[-1]

    yield make
    for member in made:
        member.close()


@pytest.fixture
def finders():
    made: list[FleetFinder] = []

    def make(lists, secret=SECRET, cache=CACHE) -> FleetFinder:
        me = Identity(Who(VERSION, dict(cache), ""), "another machine", secret, -1, 5.0)
        made.append(FleetFinder(lists, me.fingerprint, FilterClient(me).ask))
        return made[-1]

    yield make
    for finder in made:
        finder.close()


def test_the_order_follows_what_members_store_and_drop(members, finders, tmp_path):
    near, far = members(listen=""), members()
    finder = finders([NeighbourList(tmp_path, machine()), AddressList([far.server.address])])
    prompt = [key(number) for number in range(8)]
    # The second member is listed twice, at its socket and at its port: it is asked once, on this machine.
    far.store(*range(6))
    near.store(*range(3))
    sockets = [f"unix:{member.server.path}" for member in (far, near)]
    asked = lambda: [source.address for source in finder.candidates(prompt, 0, None)]  # noqa: E731
    wait_for(lambda: asked() == sockets)
    near.store(*range(3, 8))
    wait_for(lambda: asked() == sockets[::-1])
    near.pool.drop(prompt)
    wait_for(lambda: asked() == sockets)


def test_members_that_are_dead_or_keep_another_secret_or_cache_are_silent(members, finders):
    member = members()
    lists = [AddressList([member.server.address])]
    good = finders(lists)
    strangers = [finders(lists, secret="another secret altogether"), finders(lists, cache={**CACHE, "weights": "9"})]
    wait_for(lambda: all(finder.fleet.silent() for finder in strangers))
    assert all(finder.candidates([key(1)], 0, None) == [] for finder in strangers)
    wait_for(lambda: good.fleet.received_bytes > 0)
    assert not good.fleet.silent()
    os.kill(member.server.pid, signal.SIGSTOP)
    try:
        wait_for(good.fleet.silent)
    finally:
        os.kill(member.server.pid, signal.SIGCONT)
    wait_for(lambda: not good.fleet.silent())


def test_a_reset_engine_is_no_candidate(members, finders):
    member = members()
    member.store(1)
    finder = finders([AddressList([member.server.address])])
    wait_for(lambda: finder.candidates([key(1)], 0, None) and finder.fleet.received_bytes)
    member.board.retire()
    wait_for(lambda: not finder.candidates([key(1)], 0, None))
