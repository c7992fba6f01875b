"""The finder follows its lists and its members from a thread, and lookups never wait for it."""

from __future__ import annotations

import hashlib
import threading
import time

import msgspec
import pytest

from kvbm.core.key_filter import KeyFilter
from kvbm.tiers.peers.finder import Source
from kvbm.tiers.peers.finding.finder import FleetFinder
from kvbm.tiers.peers.finding.member_lists import AddressList, FileList, NeighbourList, card_name, parse_addresses
from kvbm.tiers.peers.wire import PeerError

PROMPT = [hashlib.sha256(str(i).encode()).digest() for i in range(50)]


def wait_for(is_so, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


class Servers:
    """Answers for any member; some hang until the test ends."""

    def __init__(self) -> None:
        self.filters: dict[str, KeyFilter] = {}
        self.hanging: set[str] = set()
        self.refusing: set[str] = set()
        self.over = threading.Event()

    def ask(self, source: Source, epoch: int, number: int) -> bytes:
        if source.address in self.hanging:
            self.over.wait(60)
        if source.address in self.refusing:
            raise ConnectionRefusedError(source.address)
        if source.address not in self.filters:
            made = self.filters[source.address] = KeyFilter(100, epoch=5 + len(self.filters))
            made.add(PROMPT)
        return msgspec.msgpack.encode(self.filters[source.address].since(epoch, number))


@pytest.fixture
def servers():
    made = Servers()
    yield made
    made.over.set()


@pytest.fixture
def finders(monkeypatch):
    for each in (AddressList, FileList, NeighbourList):
        monkeypatch.setattr(each, "seconds", 0.02)
    made: list[FleetFinder] = []
    yield made
    for finder in made:
        finder.close()


def asked(finder: FleetFinder) -> set[str]:
    return {source.address for source in finder.candidates(PROMPT, 0, None)}


def test_members_of_a_file_come_and_go_and_a_broken_file_changes_nothing(tmp_path, servers, finders, caplog):
    path = tmp_path / "peers"
    path.write_text("127.0.0.2:1, 127.0.0.3:1  # two of them\n")
    finder = FleetFinder([FileList(path)], "f", servers.ask)
    finders.append(finder)
    wait_for(lambda: asked(finder) == {"127.0.0.2:1", "127.0.0.3:1"})
    path.write_text("127.0.0.3:1\n127.0.0.4:1\n")
    wait_for(lambda: asked(finder) == {"127.0.0.3:1", "127.0.0.4:1"})
    path.write_text("127.0.0.3:1 nonsense\n")
    wait_for(lambda: "'nonsense' is no address; expected host:port" in caplog.text)
    assert asked(finder) == {"127.0.0.3:1", "127.0.0.4:1"}
    path.unlink()
    path.write_text("127.0.0.4:1\n")
    wait_for(lambda: asked(finder) == {"127.0.0.4:1"})
    assert caplog.text.count("cannot be read") == 1


def test_members_that_hang_or_refuse_do_not_delay_the_others(servers, finders):
    servers.hanging = {"127.0.0.2:1", "127.0.0.3:1"}
    servers.refusing = {"127.0.0.4:1"}
    finder = FleetFinder([AddressList([f"127.0.0.{n}:1" for n in range(2, 9)])], "f", servers.ask)
    finders.append(finder)
    wait_for(lambda: asked(finder) == {f"127.0.0.{n}:1" for n in range(5, 9)})
    assert [source.address for source in finder.fleet.silent()] == ["127.0.0.4:1"]
    servers.refusing.clear()
    wait_for(lambda: not finder.fleet.silent())


def test_the_log_says_once_why_a_member_refuses(finders, caplog):
    """No lookup asks it, so no lookup could say it."""
    asked_times = []

    def refuse(source, epoch, number):
        asked_times.append(source.address)
        raise PeerError("fingerprint", "tensor_parallel 2 here and 1 there")

    finder = FleetFinder([AddressList(["127.0.0.2:1"])], "f", refuse)
    finders.append(finder)
    wait_for(lambda: len(asked_times) >= 3)
    assert caplog.text.count("peer 127.0.0.2:1 is not used for now: tensor_parallel 2 here and 1 there") == 1


def test_this_engine_is_not_a_member_under_any_of_its_names(servers, finders):
    finder = FleetFinder([AddressList(["127.0.0.1:7", "localhost:7", "127.0.0.1:8"])], "f", servers.ask)
    finders.append(finder)
    finder.announce(Source("127.0.0.9:7", "me"), PROMPT)
    wait_for(lambda: asked(finder) == {"127.0.0.1:8"})


def test_neighbours_are_the_sockets_in_the_directory_but_not_our_own(tmp_path, servers, finders):
    for name in ("a1", "b2", "mine"):
        (tmp_path / f"{name}.sock").touch()
    (tmp_path / "a1.log").touch()
    finder = FleetFinder([NeighbourList(tmp_path, "here")], "f", servers.ask)
    finders.append(finder)
    finder.announce(Source("10.0.0.1:7", "me", "here", "f", "mine"), PROMPT)
    wait_for(lambda: {source.generation for source in finder.members()} == {"a1", "b2"})
    (tmp_path / "a1.sock").unlink()
    wait_for(lambda: {source.generation for source in finder.members()} == {"b2"})


def test_a_name_stands_for_all_its_addresses(monkeypatch):
    places = {"peers.example": ["10.0.0.1", "10.0.0.2"], "six.example": ["fd00::1"]}

    def resolve(host, port, type):
        if host not in places:
            raise OSError("unknown name")
        return [(10 if ":" in place else 2, 1, 6, "", (place, port)) for place in places[host]]

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    found = AddressList(["peers.example:5", "six.example:6", "gone.example:7"]).read()
    assert [source.address for source in found] == ["10.0.0.1:5", "10.0.0.2:5", "[fd00::1]:6"]
    with pytest.raises(OSError, match=r"gone.example:7: unknown name"):
        AddressList(["gone.example:7"]).read()


def test_addresses_are_checked():
    assert parse_addresses("h:1,[fd00::1]:2\n# none\nunix:/run/x", "KVBM_PEERS") == [
        "h:1",
        "[fd00::1]:2",
        "unix:/run/x",
    ]
    for bad in ("h", "h:0", "h:99999", "0.0.0.0:1", "http://h:1"):
        with pytest.raises(OSError, match=r"KVBM_PEERS: .* is no address"):
            parse_addresses(bad, "KVBM_PEERS")


def test_the_card_of_a_member_has_a_name_of_its_own():
    assert card_name("ns", Source("h:1", "e/1 x", fingerprint="f0")) == "kvbm/ns/peers/f0/e_1_x"
    assert card_name("ns", Source("h:1", fingerprint="f0")) == "kvbm/ns/peers/f0/h:1"
