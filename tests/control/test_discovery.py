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
from kvbm.cli.main import main
from kvbm.control import discovery
from kvbm.control.discovery import Card, FileRegistry, Registration
from kvbm.control.presence import Presence
from kvbm.control.socket import Controller
from kvbm.tiers.directory import CacheRefused


def card(role="leader", rank=0, pid=None, engine="e"):
    return Card(role=role, engine=engine, rank=rank, host="h", pid=pid or os.getpid())


def config(tmp_path, **more):
    given = {"discovery_backend": "file", "discovery_dir": str(tmp_path), **more}
    return settings.load(given, environ={}, files=())


def entered(tmp_path, count):
    deadline = time.monotonic() + 60
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


def test_an_engine_that_comes_again_takes_the_place_of_its_killed_forerunner(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = FileRegistry(tmp_path)
    left.enter({card(pid=gone.pid).name("dynamo"): msgspec.json.encode(card(pid=gone.pid))})
    kept = Registration(FileRegistry(tmp_path), [card()], "dynamo")
    assert [each.pid for each in entered(tmp_path, 1)] == [os.getpid()]
    left.withdraw()  # and who withdraws late takes nothing but its own
    assert len(discovery.find(config(tmp_path))) == 1
    kept.close()
    assert discovery.find(config(tmp_path)) == []


def test_a_card_is_not_written_again_while_it_is_there(tmp_path):
    place = FileRegistry(tmp_path)
    cards = {card().name("dynamo"): msgspec.json.encode(card())}
    place.enter(cards)
    (file,) = tmp_path.rglob("*.json")
    before = file.stat().st_ino
    place.enter(cards)
    assert file.stat().st_ino == before


def test_nobody_else_enters_our_directories_at_any_level(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "kvbm").mkdir(mode=0o755)  # of an earlier release
    place = FileRegistry(tmp_path)
    place.enter({card("worker").name("dynamo"): b"{}"})
    ours = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(ours) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in ours} == {0o700}
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


@pytest.mark.skipif(os.getuid() != 0, reason="takes the place of another user")
@pytest.mark.parametrize("level", ["kvbm", "kvbm/dynamo"])
def test_a_directory_of_somebody_else_is_not_used(tmp_path, level):
    (tmp_path / level).mkdir(parents=True)
    os.chown(tmp_path / level, 12345, 12345)
    with pytest.raises(OSError, match="DYN_FILE_KV"):
        FileRegistry(tmp_path).enter({card().name("dynamo"): b"{}"})
    assert list(tmp_path.rglob("*.json")) == []


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


def test_what_is_no_card_is_passed_over(tmp_path, monkeypatch):
    """Anybody may write to etcd."""
    entries = {"kvbm/dynamo/leaders/a": b"nonsense", "kvbm/dynamo/leaders/e": msgspec.json.encode(card())}
    monkeypatch.setattr(FileRegistry, "entries", lambda self, prefix: entries)
    assert discovery.find(config(tmp_path)) == [card()]


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


def tried_again(place, caplog):
    """How often the registry was tried, once it has been said that it cannot be reached."""
    tries = []
    enter = place.enter
    place.enter = lambda cards: (tries.append(1), enter(cards))
    kept = Registration(place, [card()], "dynamo", every=0.02)
    deadline = time.monotonic() + 60
    while len(tries) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    kept.close()
    assert caplog.text.count("KVBM is not registered for now") == 1
    return len(tries)


def test_an_etcd_that_is_none_costs_a_sentence_and_is_tried_again(stranger, caplog):
    assert tried_again(discovery.EtcdRegistry(stranger), caplog) >= 4
    assert "BadStatusLine" in caplog.text
    with pytest.raises(OSError, match="ETCD_ENDPOINTS wants addresses"):
        discovery.EtcdRegistry(stranger).entries("kvbm/")


@pytest.mark.parametrize("answer", [{}, {"result": None}, KeyError("ID"), ["?"]])
def test_an_etcd_that_talks_nonsense_is_tried_again(answer, caplog):
    place = discovery.EtcdRegistry("http://127.0.0.1:1")

    def call(method, body):
        if isinstance(answer, Exception):
            raise answer
        return answer

    place._call = call
    assert tried_again(place, caplog) >= 4


def test_an_address_that_is_none_is_named(caplog):
    assert tried_again(discovery.EtcdRegistry("http://etcd:port"), caplog) >= 4
    assert "http://etcd:port" in caplog.text


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


@pytest.mark.parametrize(
    ("given", "heard"),
    [
        ({}, False),
        ({"runtime_enabled": True}, True),
        ({"runtime_enabled": True, "control_dynamo": False}, False),
        ({"runtime_enabled": True, "control": False}, False),
    ],
)
def test_commands_through_dynamo_are_taken_where_nothing_forbids_it(given, heard, tmp_path, monkeypatch):
    opened = []

    class Endpoint:
        def __init__(self, control, namespace):
            opened.append(control)

        def close(self):
            pass

    monkeypatch.setattr("kvbm.control.dynamo.is_installed", lambda: True)
    monkeypatch.setattr("kvbm.control.dynamo.DynamoEndpoint", Endpoint)
    Presence(config(tmp_path, **given), controller(), "e", "m", 1).close()
    assert len(opened) == heard


def test_a_backend_that_is_not_ours_costs_a_sentence(tmp_path, caplog):
    presence = Presence(config(tmp_path, runtime_enabled=True, discovery_backend="mem"), controller(), "e", "m", 1)
    presence.close()
    assert "DYN_DISCOVERY_BACKEND=mem, expected etcd or file" in caplog.text


@pytest.mark.parametrize(
    ("given", "url"), [("localhost:2379", "http://localhost:2379"), ("https://e:1/", "https://e:1")]
)
def test_addresses_of_etcd_are_taken_as_dynamo_takes_them(given, url):
    assert discovery.EtcdRegistry(f" {given} ")._endpoints == [url]


# -- hostile directories ----------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_files_that_are_no_cards_do_not_block(tmp_path):
    """A pipe without a writer, a link, a directory, a file that is too large: neither finding nor entering waits."""
    place = FileRegistry(tmp_path)
    cards = {card().name("dynamo"): msgspec.json.encode(card())}
    place.enter(cards)
    (file,) = tmp_path.rglob("*.json")
    os.mkfifo(file.with_name("pipe.json"))
    os.symlink(file, file.with_name("link.json"))
    file.with_name("folder.json").mkdir()
    padding = card(engine="x" * (discovery.MAX_CARD_BYTES + 1))
    file.with_name("large.json").write_bytes(msgspec.json.encode(padding))
    assert [each.engine for each in discovery.find(config(tmp_path))] == ["e"]
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CacheRefused, match=r"'\w+\.json' in .*, so the content of the directory cannot be trusted"):
        place.enter(cards)
    place.withdraw()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_cards_of_another_user_are_left_out(tmp_path):
    FileRegistry(tmp_path).enter({card().name("dynamo"): msgspec.json.encode(card())})
    (file,) = tmp_path.rglob("*.json")
    os.chown(file, 65534, 65534)
    assert discovery.find(config(tmp_path)) == []
    os.chown(file, 0, 0)
    assert len(discovery.find(config(tmp_path))) == 1
    os.chown(tmp_path / "kvbm", 65534, 65534)
    assert discovery.find(config(tmp_path)) == []


def test_the_command_shows_no_escapes_of_a_card(tmp_path, capsys, monkeypatch):
    odd = card(engine="\x1b]0;title\x07\x9b31m")
    FileRegistry(tmp_path).enter({card().name("dynamo"): msgspec.json.encode(odd)})
    monkeypatch.setenv("DYN_RUNTIME_ENABLED_KVBM", "1")
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    assert main(["control", "list"]) == 0
    shown = capsys.readouterr().out
    assert "leader" in shown
    assert not [sign for sign in shown if sign != "\n" and not sign.isprintable()]
