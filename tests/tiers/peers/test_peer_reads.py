"""Blocks of other engines: over mapped memory and over sockets, from the real server process."""

from __future__ import annotations

import ctypes
import sys
import time

import pytest
from peer_member import CACHE, Reader, content, key

from kvbm.tiers.peers import client
from kvbm.tiers.peers.checksum import checksum, copy_and_sum
from kvbm.tiers.peers.client import NIXL, SOCKET
from kvbm.tiers.peers.finder import Source
from kvbm.tiers.peers.nixl_path import api
from kvbm.tiers.peers.sources import BLOCKS, SourceTable, refusals

WAYS = ["unix", "tcp", pytest.param("nixl", marks=pytest.mark.skipif(api() is None, reason="needs NIXL"))]


@pytest.fixture(params=WAYS)
def reader(request, member, monkeypatch):
    is_nixl = request.param == "nixl"
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    reader = Reader([member.unix if request.param == "unix" else member.tcp], ways=(NIXL,) if is_nixl else (SOCKET,))
    yield reader
    reader.close()


def test_blocks_arrive_whole(member, reader):
    member.store(1, 2, 3)
    operation = reader.read([1, 2, 3])
    assert operation.bad == [], operation.reason
    assert [reader.block(i) for i in range(3)] == [content(n, member.slot_bytes) for n in (1, 2, 3)]
    assert reader.counts()[BLOCKS] == 3


def test_a_block_that_is_not_there_costs_itself(member, reader):
    member.store(1, 3)
    operation = reader.read([1, 2, 3])
    assert operation.bad == [1]
    assert reader.block(2) == content(3, member.slot_bytes)
    assert refusals(reader.counts()) == {"withdrawn": 1}


def test_turns_are_short_from_the_call_of_a_read_to_its_end(member):
    """The engine's thread computes on, and the threads that read must get the interpreter nevertheless."""
    usual, seen = sys.getswitchinterval(), []
    reader = Reader([member.unix])
    post = reader.store._threads.post
    reader.store._threads.post = lambda *task: (seen.append(sys.getswitchinterval()), post(*task))
    member.store(1)
    assert reader.read([1]).bad == []
    assert reader.read([2]).bad == [0]
    assert max(seen) < usual
    reader.close()
    assert reader.begin([1]).bad == [0]
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_an_evicted_block_is_not_served_from_its_slot(member, reader):
    member.store(*range(member.slots))
    assert reader.read([0]).bad == []
    time.sleep(2.1)  # its lease
    slot = member.slot_of(0)
    member.pool.drop([key(0)])
    ctypes.memset(member.address(slot), 7, member.slot_bytes)
    assert reader.read([0]).bad == [0]


def test_a_reset_ends_the_service(member, reader):
    member.store(1)
    assert reader.read([1]).bad == []
    member.board.retire()
    assert reader.read([1]).bad == [0]
    member.store(2)
    assert reader.read([2]).bad == [0]


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_neighbour_that_is_found_by_its_address_is_read_from_memory(member, way):
    member.store(1)
    reader = Reader([getattr(member, way)], elsewhere=False)
    assert reader.read([1]).bad == []
    assert reader.store._peers[0].path == "mapped memory"
    reader.close()


def test_another_fingerprint_is_refused_with_a_sentence(member, caplog):
    reader = Reader([member.tcp], cache={**CACHE, "tensor_parallel": 2})
    operation = reader.read([1])
    assert operation.bad == [0]
    assert "fingerprint" in operation.reason
    assert refusals(reader.counts()) == {"fingerprint": 1}
    reader.close()


def test_another_secret_is_refused(member):
    member.store(1)
    reader = Reader([member.tcp], secret="another secret of the tests")
    assert "secret" in reader.read([1]).reason
    assert refusals(reader.counts()) == {"secret": 1}
    reader.close()


@pytest.mark.skipif(api() is None, reason="needs NIXL")
def test_the_faster_way_is_taken_after_a_few_reads(member, monkeypatch, caplog):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    member.store(1)
    reader = Reader([member.tcp], ways=(SOCKET, NIXL))
    with caplog.at_level("INFO", "kvbm"):
        for _ in range(7):
            operation = reader.read([1])
            assert operation.bad == [], operation.reason
            assert reader.block(0) == content(1, member.slot_bytes)
    [said] = [record.getMessage() for record in caplog.records if "blocks come over" in record.getMessage()]
    assert "socket" in said
    assert "NIXL" in said
    reader.close()


@pytest.mark.parametrize("size", [1, (2 << 20) + 5, (3 << 20) - 1, 3 << 20, (5 << 20) + 7])
def test_a_copy_in_pieces_has_the_checksum_of_the_whole(size):
    source, target = ctypes.create_string_buffer(content(size, size), size), ctypes.create_string_buffer(size)
    found = copy_and_sum(ctypes.addressof(target), ctypes.addressof(source), size, key(1))
    assert target.raw == source.raw
    assert found == checksum(memoryview(source).cast("B"), key(1))


def test_what_a_connection_takes_is_not_in_the_rate_of_a_source(member, monkeypatch):
    """The first read of a large prompt would make the source look slower than computing."""
    reader = Reader([member.unix])
    order = []
    for owner, name in (client.Peer, "_open"), (client.Peer, "_map"), (SourceTable, "begin_read"):
        real = getattr(owner, name)

        def noted(*arguments, real=real, name=name):
            order.append(name)
            return real(*arguments)

        monkeypatch.setattr(owner, name, noted)
    member.store(1)
    assert reader.read([1]).bad == []
    assert order[:3] == ["_open", "_map", "begin_read"]
    reader.close()


def test_a_source_that_is_not_reached_is_no_read_under_way():
    reader = Reader([Source("unix:/nowhere")])
    assert reader.read([1]).bad == [0]
    assert reader.store._table._flows == {}
    reader.close()


def test_a_read_that_fails_half_way_is_over_for_the_rate_of_its_source(member, monkeypatch):
    """Otherwise all time until the next read would count as that of a read."""
    reader = Reader([member.unix])
    member.store(1)

    def fail(peer, tags, addresses, given_up, begin):
        begin()
        raise OSError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(client.Peer, "read", fail)
        operation = reader.read([1])
    assert (operation.bad, operation.reason) == ([0], "OSError: broken on purpose")
    assert reader.store._table._flows[0].reads == 0
    assert reader.read([1]).bad == []
    reader.close()
