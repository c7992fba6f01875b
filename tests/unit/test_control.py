"""Orders from outside, carried out on a real leader."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from kvbm.cli.main import main
from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from kvbm.plans import Tier
from kvbm.runtime.control import Controller, ControlServer, OrderError, addresses, ask
from kvbm.runtime.leader import Leader

HOST_KEYS = [bytes([i]) * 32 for i in range(6)]
DISK_KEYS = [bytes([i]) * 32 for i in range(4, 8)]


def number(key):
    return int.from_bytes(key[-8:], "big")


@pytest.fixture
def leader():
    host, disk = Pool(8), Pool(10)
    host.publish(host.allocate(HOST_KEYS))
    disk.publish(disk.allocate(DISK_KEYS))
    host.pin([host.find(HOST_KEYS[0])])
    return Leader(BlockManager({Tier.HOST: host, Tier.DISK: disk}), ranks=1)


@pytest.fixture
def controller(leader):
    about = {"engine": "e", "rank": 0, "model": "m", "kvbm": "2"}
    return Controller(threading.RLock(), lambda: leader, about, lambda: True, lambda: (100, 60))


@pytest.fixture
def server(controller):
    made = ControlServer(controller, "test")
    yield made
    made.close()


def held(leader):
    return {tier.name: set(pool.findable) for tier, pool in leader.manager.pools.items()}


def test_status_counts_every_slot_once(server):
    pools = ask(server.address, {"do": "status"})["pools"]
    assert pools == {
        "device": {"active_blocks": 40, "inactive_blocks": 0, "empty_blocks": 60},
        "host": {"active_blocks": 1, "inactive_blocks": 5, "empty_blocks": 2},
        "disk": {"active_blocks": 0, "inactive_blocks": 4, "empty_blocks": 6},
    }


@pytest.mark.parametrize("tier", ["host", "G2", "HOST"])
def test_a_tier_is_emptied_and_the_others_are_not(tier, server, leader):
    assert ask(server.address, {"do": "reset", "tier": tier}) == {"reset_blocks": 6}
    assert held(leader) == {"HOST": set(), "DISK": set(DISK_KEYS)}
    # A block that somebody is reading cannot be found any more, and its slot is free when they are done.
    assert leader.manager.pools[Tier.HOST].pinned == 1


def test_everything_is_emptied(server, leader):
    assert ask(server.address, {"do": "reset"}) == {"reset_blocks": 10}
    assert held(leader) == {"HOST": set(), "DISK": set()}


def test_an_emptied_tier_is_told_of_once_and_not_block_by_block(server, leader):
    told = []
    leader.manager.pools[Tier.HOST].on_gone = lambda keys: told.append(set(keys))
    ask(server.address, {"do": "reset", "tier": "host"})
    assert told == [set(HOST_KEYS)]


def test_single_blocks_are_forgotten_by_any_of_their_names(server, leader):
    blocks = [number(HOST_KEYS[1]), str(number(HOST_KEYS[2])), HOST_KEYS[3].hex(), 12345]
    answer = ask(server.address, {"do": "reset", "tier": "host", "blocks": blocks})
    assert answer["reset_blocks"] == [number(key) for key in HOST_KEYS[1:4]]
    assert answer["not_found_blocks"] == [12345]
    assert answer["not_reset_blocks"] == []
    assert held(leader)["HOST"] == {HOST_KEYS[0], *HOST_KEYS[4:]}


def test_single_blocks_are_forgotten_in_every_tier_and_no_others(server, leader):
    blocks = [number(HOST_KEYS[1]), number(HOST_KEYS[4]), number(DISK_KEYS[3]), 17]
    answer = ask(server.address, {"do": "reset", "blocks": blocks})
    assert answer == {"reset_blocks": blocks[:3], "not_found_blocks": [17], "not_reset_blocks": []}
    gone = {HOST_KEYS[1], HOST_KEYS[4], DISK_KEYS[3]}
    assert held(leader) == {"HOST": set(HOST_KEYS) - gone, "DISK": set(DISK_KEYS) - gone}


def test_a_block_that_was_being_written_comes_in_after_a_reset(server, leader):
    plan = leader.offload([b"n" * 32], [7])
    ask(server.address, {"do": "reset"})
    leader.manager.finish_store(plan.id, ok=True)
    assert held(leader)["HOST"] == {b"n" * 32}


@pytest.mark.parametrize(
    ("order", "complaint"),
    [
        ({"do": "dance"}, "do='dance': expected status, reset or announce"),
        ({}, "do=None: expected"),
        (
            {"do": "reset", "tier": "G1"},
            "tier='G1': expected one of host, disk; the engine's own cache is reset by the",
        ),
        ({"do": "reset", "tier": "tape"}, "tier='tape': expected one of host, disk"),
        ({"do": "reset", "tier": "host", "blocks": ["no"]}, "block 'no': expected the number of a block"),
        ({"do": "reset", "tier": "host", "blocks": [1.5]}, "block 1.5: expected"),
        ({"do": "reset", "blocks": ["no"]}, "block 'no': expected the number of a block"),
        ({"do": "reset", "blocks": "17"}, "blocks='17': expected a list"),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(order, complaint, server, leader):
    before = held(leader)
    with pytest.raises(OrderError) as refused:
        ask(server.address, order)
    assert complaint in str(refused.value)
    assert held(leader) == before


def test_nonsense_is_answered_and_the_next_order_is_heard(server):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(f"\0{server.address}")
        with client.makefile("rb") as lines:
            for line in (b"what?\n", b"[1]\n", b'{"do": "status"}\n'):
                client.sendall(line)
                answer = json.loads(lines.readline())
            assert answer["ok"] is True


def test_an_order_waits_for_the_engine_and_status_does_not(leader):
    """The engine is in one of our calls: nobody else touches the books until it is out again."""
    turn = threading.RLock()
    server = ControlServer(Controller(turn, lambda: leader, {}, lambda: True), "busy")
    try:
        with turn:
            done = threading.Thread(target=ask, args=(server.address, {"do": "reset"}))
            done.start()
            time.sleep(0.3)
            assert done.is_alive()
            assert leader.manager.pools[Tier.HOST].published == 6
        done.join(10)
        assert leader.manager.pools[Tier.HOST].published == 0
        with turn:
            assert ask(server.address, {"do": "status"})["pools"]["host"]["empty_blocks"] == 7
    finally:
        server.close()


def test_who_connects_and_says_nothing_holds_up_nobody_for_long(server, monkeypatch):
    monkeypatch.setattr("kvbm.runtime.control.PATIENCE_SECONDS", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(f"\0{server.address}")
        assert ask(server.address, {"do": "status"}, timeout=20)


@pytest.mark.skipif(os.getuid() != 0, reason="takes the place of another user")
def test_other_users_are_not_heard(controller, tmp_path):
    """The kernel says who is at the other end."""
    script = (
        "import os, sys\nfrom kvbm.runtime.control import ask\nos.setuid(12345)\n"
        "try: ask(sys.argv[1], {'do': 'reset'})\n"
        "except OSError as error: print('refused:', error)\nelse: print('heard')"
    )
    server = ControlServer(controller, "guarded")
    try:
        asked = subprocess.run(
            [sys.executable, "-c", script, server.address], capture_output=True, text=True, timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
    finally:
        server.close()
    assert "refused" in asked.stdout, asked.stderr


def test_a_leader_that_is_gone_is_not_listed(controller):
    server = ControlServer(controller, "listed")
    assert server.address in addresses()
    server.close()
    assert server.address not in addresses()
    with pytest.raises(ConnectionRefusedError):
        ask(server.address, {"do": "status"})


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_shows_and_empties_tiers(server, leader, capsys):
    name = ["--engine", server.address]
    assert main(["control", "list"]) == 0
    assert server.address in capsys.readouterr().out
    assert main(["control", "status", *name]) == 0
    shown = capsys.readouterr().out
    assert "m, engine e, rank 0" in shown
    assert ["host", "1", "5", "2"] in [line.split() for line in shown.splitlines()]
    assert main(["control", "reset", "host", "--block", str(number(HOST_KEYS[1])), "--block", "1", *name]) == 0
    assert capsys.readouterr().out == "1 blocks forgotten, 1 were not there\n"
    assert main(["control", "reset", "all", "--block", "17", *name]) == 0
    assert capsys.readouterr().out == "0 blocks forgotten, 1 were not there\n"
    assert main(["control", "reset", "disk", *name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"reset_blocks": 4}
    assert main(["control", "reset", "all", *name]) == 0
    assert capsys.readouterr().out == "5 blocks forgotten\n"
    assert main(["control", "announce", *name]) == 0
    assert "told again" in capsys.readouterr().out


def test_the_command_says_what_is_missing(server, capsys):
    assert main(["control", "reset", "--engine", server.address]) == 2
    assert "say which tier" in capsys.readouterr().err
    assert main(["control", "status", "--engine", "no such engine"]) == 1
    assert "no engine fits --engine 'no such engine'; `kvbm control list`" in capsys.readouterr().err
    assert main(["control", "reset", "tape", "--engine", server.address]) == 1
    assert "expected one of host, disk" in capsys.readouterr().err
