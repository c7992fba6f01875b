"""Registration in a real etcd: with a lease, and through its loss."""

from __future__ import annotations

import os
import re
import signal
from itertools import pairwise

import pytest
from stack import Servers, wait_until

from kvbm.control.discovery import Card, EtcdRegistry, Registration
from kvbm.tiers.peers.finder import Source
from kvbm.tiers.peers.finding.member_lists import EtcdList
from kvbm.tiers.peers.finding.registration import Registry, register

CARDS = [Card(role="leader", engine="e", host="h", pid=1), Card(role="worker", engine="e", rank=1, host="h", pid=1)]


@pytest.fixture
def etcd(tmp_path):
    made = Servers(tmp_path)
    yield made
    made.close()


def entries(etcd: Servers) -> list[str]:
    return sorted(EtcdRegistry(etcd.etcd).entries("kvbm/dynamo/"))


EVERYBODY = ["kvbm/dynamo/leaders/e", "kvbm/dynamo/workers/e/1"]


def test_entries_live_as_long_as_they_are_renewed(etcd):
    kept = Registration(EtcdRegistry(etcd.etcd, lease_seconds=2), CARDS, "dynamo", every=0.5)
    wait_until("they are there", lambda: entries(etcd) == EVERYBODY)
    kept._over.set()  # as if its process had died
    kept._thread.join()
    wait_until("their lease has run out", lambda: entries(etcd) == [], 60)


def test_entries_are_taken_back_at_the_end(etcd):
    kept = Registration(EtcdRegistry(etcd.etcd), CARDS, "dynamo")
    wait_until("they are there", lambda: entries(etcd) == EVERYBODY)
    kept.close()
    assert entries(etcd) == []


def test_entries_come_back_with_etcd(etcd, caplog):
    """etcd is gone for longer than the lease, and comes back; it is stopped for a while, and goes on."""
    caplog.set_level("INFO")
    kept = Registration(EtcdRegistry(etcd.etcd, lease_seconds=2), CARDS, "dynamo", every=0.3)
    try:
        wait_until("they are there", lambda: entries(etcd) == EVERYBODY)
        etcd.processes["etcd"].end()
        wait_until("it is noticed", lambda: "KVBM is not registered for now" in caplog.text)
        etcd.start_etcd()
        wait_until("that is said", lambda: "KVBM is registered again" in caplog.text)
        # A busy machine may delay a renewal for longer than the lease lasts.
        wait_until("they are there again", lambda: entries(etcd) == EVERYBODY, 60)
        noticed = caplog.text.count("KVBM is not registered for now")
        pid = etcd.processes["etcd"].popen.pid
        os.kill(pid, signal.SIGSTOP)
        wait_until("that is noticed too", lambda: caplog.text.count("KVBM is not registered for now") > noticed, 60)
        os.kill(pid, signal.SIGCONT)
        wait_until("they are there once more", lambda: entries(etcd) == EVERYBODY, 60)
    finally:
        kept.close()
    said = re.findall("not registered for now|registered again", caplog.text)
    assert all(one != other for one, other in pairwise(said)), "each change is said once"


def test_the_first_address_that_answers_is_taken(etcd):
    place = EtcdRegistry(f"http://127.0.0.1:1,{etcd.etcd}")
    place.enter({"kvbm/dynamo/leaders/e": b"{}"})
    assert place.entries("kvbm/dynamo/") == {"kvbm/dynamo/leaders/e": b"{}"}
    place.withdraw()


def test_members_of_a_fleet_find_each_other_while_their_leases_last(etcd, tmp_path):
    """Cards of a fleet's servers: of the same cache, while they live; and one key a member, however many blocks."""
    registry = Registry(etcd.etcd, "ns")
    members = [Source(f"10.0.0.{n}:23280", f"m{n}", f"machine{n}", "f" if n < 3 else "other", "g") for n in range(4)]
    entered = [register(registry, member) for member in members]
    found = EtcdList(etcd.etcd, "ns", "f")
    wait_until("all are there", lambda: sorted(found.read(), key=lambda each: each.address) == members[:3])
    assert EtcdList(etcd.etcd, "another namespace", "f").read() == []
    assert len(EtcdRegistry(etcd.etcd).entries("kvbm/ns/")) == 4
    entered[0].close()
    wait_until("one has left", lambda: sorted(found.read(), key=lambda each: each.address) == members[1:3])
    etcd.processes["etcd"].end()
    with pytest.raises(OSError):
        found.read()
    for each in entered[1:]:
        each.close()
    assert register(Registry(), members[0]) is None
