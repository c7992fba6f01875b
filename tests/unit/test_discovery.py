"""Being found: cards in files. With etcd: tests/dynamo."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
import time

import msgspec
import pytest

from kvbm import config as settings
from kvbm.runtime import discovery
from kvbm.runtime.control import Controller
from kvbm.runtime.discovery import Card, FileRegistry, Registration
from kvbm.runtime.presence import Presence


def card(role="leader", rank=0, pid=None, engine="e"):
    return Card(role=role, engine=engine, rank=rank, host="h", pid=pid or os.getpid())


def config(tmp_path, **more):
    given = {"discovery_backend": "file", "discovery_dir": str(tmp_path), **more}
    return settings.load(given, environ={}, files=())


def entered(tmp_path, count):
    deadline = time.monotonic() + 10
    while len(found := discovery.find(config(tmp_path))) != count:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def test_cards_are_there_as_long_as_they_are_meant_to_be(tmp_path):
    kept = Registration(FileRegistry(tmp_path), [card(), card("worker", 0), card("worker", 1)], "dynamo")
    found = entered(tmp_path, 3)
    assert [(each.role, each.rank) for each in found] == [("leader", 0), ("worker", 0), ("worker", 1)]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    kept.close()
    assert list(tmp_path.iterdir()) == []


def test_the_card_of_a_dead_process_is_not_there(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    FileRegistry(tmp_path).enter({card(pid=gone.pid).name("dynamo"): msgspec.json.encode(card(pid=gone.pid))})
    assert discovery.find(config(tmp_path)) == []


def test_a_card_that_was_taken_away_comes_back(tmp_path):
    kept = Registration(FileRegistry(tmp_path), [card()], "dynamo", every=0.05)
    try:
        entered(tmp_path, 1)
        (file,) = tmp_path.rglob("*.json")
        file.unlink()
        entered(tmp_path, 1)
    finally:
        kept.close()


def test_namespaces_do_not_see_each_other(tmp_path):
    kept = Registration(FileRegistry(tmp_path), [card()], "dynamo")
    try:
        entered(tmp_path, 1)
        assert discovery.find(config(tmp_path, dynamo_namespace="other")) == []
    finally:
        kept.close()


def test_a_registry_that_cannot_be_reached_costs_a_sentence(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")

    def wait_for_complaints(count):
        deadline = time.monotonic() + 60
        while caplog.text.count("KVBM is not registered for now") < count and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.3)  # it is tried again, and not said again
        assert caplog.text.count("KVBM is not registered for now") == count

    kept = Registration(FileRegistry(blocked), [card()], "dynamo", every=0.05)
    wait_for_complaints(1)
    kept.close()
    etcd = Registration(discovery.EtcdRegistry("http://127.0.0.1:1"), [card()], "dynamo", every=0.05)
    wait_for_complaints(2)
    etcd.close()


def controller():
    return Controller(threading.RLock(), lambda: None, {}, lambda: False)


def test_without_the_switch_nobody_is_told(tmp_path):
    presence = Presence(config(tmp_path), controller(), "e", "m", 2)
    try:
        assert presence.control is not None
        assert list(tmp_path.iterdir()) == []
    finally:
        presence.close()


def test_with_the_switch_leader_and_workers_are_entered(tmp_path):
    presence = Presence(config(tmp_path, runtime_enabled=True), controller(), "e", "m", 2, "http://m")
    try:
        leader, *workers = entered(tmp_path, 3)
        assert (leader.role, leader.model, leader.metrics) == ("leader", "m", "http://m")
        assert leader.control == presence.control.address
        assert [worker.rank for worker in workers] == [0, 1]
    finally:
        presence.close()
    assert list(tmp_path.iterdir()) == []


def test_a_backend_that_is_not_ours_costs_a_sentence(tmp_path, caplog):
    presence = Presence(config(tmp_path, runtime_enabled=True, discovery_backend="mem"), controller(), "e", "m", 1)
    presence.close()
    assert "DYN_DISCOVERY_BACKEND=mem, expected etcd or file" in caplog.text


@pytest.mark.parametrize(
    ("given", "url"), [("localhost:2379", "http://localhost:2379"), ("https://e:1/", "https://e:1")]
)
def test_addresses_of_etcd_are_taken_as_dynamo_takes_them(given, url):
    assert discovery.EtcdRegistry(f" {given} ")._endpoints == [url]
