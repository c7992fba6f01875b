"""The fleet's bookkeeping: who is asked for a prefix, and what a death, a lie or a hint changes."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from kvbm.core.catalog import Hint
from kvbm.core.key_filter import KeyFilter, Update
from kvbm.tiers.peers.finder import MAX_CANDIDATES, Source
from kvbm.tiers.peers.finding.fleet import MAX_MEMBERS, MAX_POLL_SECONDS, MAX_RETRY_SECONDS, Fleet


def keys(count: int, seed: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{seed}{i}".encode()).digest() for i in range(count)]


PROMPT = keys(100)


class Members:
    """Members with filters, and a fleet that follows them."""

    def __init__(self, *held: list[bytes], machine: str = "elsewhere") -> None:
        self.sources = [Source(f"10.0.0.{n}:1", f"m{n}", machine, "f", "g") for n in range(len(held))]
        self.filters = {source.address: KeyFilter(1000, epoch=n + 1) for n, source in enumerate(self.sources)}
        for source, some in zip(self.sources, held, strict=True):
            self.filters[source.address].add(some)
        self.fleet = Fleet("f")
        self.fleet.set_members(self.sources, 0.0)
        self.dead: set[str] = set()

    def poll(self, now: float) -> int:
        questions = self.fleet.take_due(now)
        for source, epoch, number in questions:
            if source.address in self.dead:
                self.fleet.failed(source, now)
            else:
                update = self.filters[source.address].since(epoch, number)
                self.fleet.answered(source, msgspec.msgpack.encode(update), now)
        return len(questions)

    def asked(self, names: list[bytes] = PROMPT, start: int = 0, hint: Hint | None = None) -> list[str]:
        return [source.address for source in self.fleet.candidates(names, start, hint)]


OTHERS = [keys(20, f"other {n}") for n in range(5)]  # of members that make the fleet too large to ask all of them


def test_the_member_with_the_longest_run_is_asked_first():
    members = Members(PROMPT[:10], PROMPT[:90], PROMPT[:50], *OTHERS)
    assert members.asked() == []  # nothing is known so far
    members.poll(0.0)
    assert members.asked() == ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.0:1"]
    assert members.asked(start=60) == ["10.0.0.1:1"]
    assert members.asked(start=95) == []
    assert members.asked(start=len(PROMPT)) == []


def test_holders_of_a_popular_prefix_share_the_work_and_neighbours_come_first():
    members = Members(*[PROMPT + keys(50, "p")] * 8)
    members.poll(0.0)
    assert len(members.asked()) == MAX_CANDIDATES
    first = {members.asked([PROMPT[n]])[0] for n in range(50)}
    assert len(first) >= 6
    here = Source("unix:/run/x", "m8", "here", "f")
    members.fleet.set_own(Source("10.0.0.99:1", "me", "here", "f"))
    members.fleet.set_members([*members.sources, here], 1.0)
    members.filters[here.address] = KeyFilter(1000, epoch=77)
    members.filters[here.address].add(PROMPT)
    members.poll(1.0)
    assert members.asked()[0] == "unix:/run/x"


def test_a_member_that_does_not_answer_is_not_asked_until_it_does():
    members = Members(PROMPT, PROMPT[:20], *OTHERS)
    members.poll(0.0)
    members.dead.add("10.0.0.0:1")
    now = 10.0
    members.poll(now)
    assert members.asked() == ["10.0.0.1:1"]
    assert [source.address for source in members.fleet.silent()] == ["10.0.0.0:1"]
    members.dead.clear()
    members.poll(now + MAX_RETRY_SECONDS)
    assert members.asked() == ["10.0.0.0:1", "10.0.0.1:1"]


def test_an_idle_fleet_asks_seldom_and_a_change_is_noticed():
    members = Members(PROMPT[:10], *OTHERS)
    questions = sum(members.poll(now / 10) for now in range(600))
    assert questions <= 6 * (60 / MAX_POLL_SECONDS + 5)
    members.filters["10.0.0.0:1"].add(PROMPT[10:20])
    members.poll(100.0)
    assert members.asked(start=10) == ["10.0.0.0:1"]


def test_own_entries_and_other_caches_are_left_out():
    fleet = Fleet("f")
    own = Source("10.0.0.1:1", "me", "here", "f")
    fleet.set_members([own, Source("10.0.0.2:1", fingerprint="other"), Source("10.0.0.3:1")], 0.0)
    fleet.set_own(own)
    assert [source.address for source in fleet.members()] == ["10.0.0.3:1"]
    fleet.set_members([own, Source("10.0.0.9:1", "me"), Source("10.0.0.3:1")], 0.0)
    assert [source.address for source in fleet.members()] == ["10.0.0.3:1"]
    assert fleet.candidates(PROMPT, 0, Hint("10.0.0.1:1", 50)) == [Source("10.0.0.3:1")]


def test_a_new_server_process_loses_the_filter_of_the_old_one():
    members = Members(PROMPT, *OTHERS)
    members.poll(0.0)
    source, *others = members.sources
    members.fleet.set_members([source, *others], 1.0)
    assert members.asked() != []
    members.fleet.set_members([msgspec.structs.replace(source, generation="new"), *others], 2.0)
    assert members.asked() == []


def test_a_hint_is_asked_first_and_may_name_a_stranger():
    members = Members(PROMPT[:30], PROMPT[:60], *OTHERS)
    members.poll(0.0)
    assert members.asked(hint=Hint("10.0.0.0:1", 80)) == ["10.0.0.0:1", "10.0.0.1:1"]
    assert members.asked(hint=Hint("10.9.9.9:1", 80))[0] == "10.9.9.9:1"
    assert members.asked(hint=Hint("10.9.9.9:1", 40)) == ["10.0.0.1:1", "10.9.9.9:1", "10.0.0.0:1"]
    assert members.asked(start=50, hint=Hint("10.9.9.9:1", 40)) == ["10.0.0.1:1"]
    assert members.fleet.members() == members.sources


def test_a_small_fleet_is_asked_as_a_whole_the_longest_run_first():
    members = Members(PROMPT[:10], PROMPT[:90], [])
    assert len(members.asked()) == 3
    members.poll(0.0)
    assert members.asked() == ["10.0.0.1:1", "10.0.0.0:1", "10.0.0.2:1"]
    members.dead.add("10.0.0.2:1")
    members.poll(10.0)
    assert members.asked() == ["10.0.0.1:1", "10.0.0.0:1"]


def test_a_member_with_two_addresses_is_asked_once_and_on_this_machine():
    members = Members(PROMPT, *OTHERS)
    here = Source("unix:/run/x", machine="here", generation="g")
    members.filters[here.address] = members.filters["10.0.0.0:1"]
    far = msgspec.structs.replace(members.sources[0], machine="")
    members.fleet.set_members([far, here, *members.sources[1:]], 0.0)
    members.poll(0.0)
    assert members.asked() == ["unix:/run/x"]


def test_a_clients_hint_only_chooses_among_members():
    members = Members(PROMPT[:30], PROMPT[:60], *OTHERS)
    members.poll(0.0)
    assert members.asked(hint=Hint("10.9.9.9:1", introduces=False)) == ["10.0.0.1:1", "10.0.0.0:1"]
    assert members.asked(hint=Hint("10.0.0.0:1", introduces=False))[0] == "10.0.0.0:1"


BAD_ANSWERS = [b"", b"\xff\xff", msgspec.msgpack.encode(7), msgspec.msgpack.encode(Update(1, 1, 1 << 50, b"", b""))]


@pytest.mark.parametrize("answer", BAD_ANSWERS, ids=range(len(BAD_ANSWERS)))
def test_a_member_whose_answer_makes_no_sense_counts_as_silent(answer):
    members = Members(PROMPT)
    ((source, _, _),) = members.fleet.take_due(0.0)
    members.fleet.answered(source, answer, 0.0)
    assert members.asked() == []
    assert members.fleet.refused == 1
    assert members.fleet.next_due() is not None


def test_the_number_of_members_is_bounded():
    fleet = Fleet("f")
    fleet.set_members((Source(f"10.0.{n >> 8}.{n & 255}:1") for n in range(MAX_MEMBERS + 50)), 0.0)
    assert len(fleet.members()) == MAX_MEMBERS
    assert fleet.refused == 50
