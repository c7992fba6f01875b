"""Commands of the control socket, carried out on a real leader."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from kvbm.cli.main import main
from kvbm.control import socket as control
from kvbm.control.socket import CommandError, Controller, ControlServer, addresses, ask, look
from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from kvbm.runtime.leader import Leader
from tiernames import DISK, HOST, Gone

HOST_KEYS = [bytes([i]) * 32 for i in range(6)]
DISK_KEYS = [bytes([i]) * 32 for i in range(4, 8)]


def number(key):
    return int.from_bytes(key[-8:], "big")


@pytest.fixture
def leader():
    host, disk = Pool(8), Pool(10)
    host.commit(host.reserve(HOST_KEYS))
    disk.commit(disk.reserve(DISK_KEYS))
    host.pin([host.find(HOST_KEYS[0])])
    return Leader(BlockManager({HOST: host, DISK: disk}), ranks=1)


@pytest.fixture
def controller(leader):
    about = {"engine": "e", "rank": 0, "model": "m", "kvbm": "2", "pid": 4711, "metrics": 6881}
    return Controller(threading.RLock(), lambda: leader, about, lambda: True, lambda: (100, 60))


@pytest.fixture
def server(controller):
    made = ControlServer(controller, "test")
    yield made
    made.close()


def held(leader):
    return {tier: set(pool.findable) for tier, pool in leader.manager.catalogs.items()}


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
    assert held(leader) == {HOST: set(), DISK: set(DISK_KEYS)}
    # A block that somebody is reading cannot be found any more, and its slot is free when they are done.
    assert leader.manager.catalogs[HOST].pinned == 1


def test_everything_is_emptied(server, leader):
    assert ask(server.address, {"do": "reset"}) == {"reset_blocks": 10}
    assert held(leader) == {HOST: set(), DISK: set()}


def test_an_emptied_tier_is_told_of_once_and_not_block_by_block(server, leader):
    told = []
    leader.manager.catalogs[HOST].journal = Gone(lambda keys: told.append(set(keys)))
    ask(server.address, {"do": "reset", "tier": "host"})
    assert told == [set(HOST_KEYS)]


def test_single_blocks_are_forgotten_by_any_of_their_names(server, leader):
    blocks = [number(HOST_KEYS[1]), str(number(HOST_KEYS[2])), HOST_KEYS[3].hex(), 12345]
    answer = ask(server.address, {"do": "reset", "tier": "host", "blocks": blocks})
    assert answer["reset_blocks"] == [number(key) for key in HOST_KEYS[1:4]]
    assert answer["not_found_blocks"] == [12345]
    assert answer["not_reset_blocks"] == []
    assert held(leader)[HOST] == {HOST_KEYS[0], *HOST_KEYS[4:]}


def test_single_blocks_are_forgotten_in_every_tier_and_no_others(server, leader):
    blocks = [number(HOST_KEYS[1]), number(HOST_KEYS[4]), number(DISK_KEYS[3]), 17]
    answer = ask(server.address, {"do": "reset", "blocks": blocks})
    assert answer == {"reset_blocks": blocks[:3], "not_found_blocks": [17], "not_reset_blocks": []}
    gone = {HOST_KEYS[1], HOST_KEYS[4], DISK_KEYS[3]}
    assert held(leader) == {HOST: set(HOST_KEYS) - gone, DISK: set(DISK_KEYS) - gone}


def test_a_block_that_was_being_written_comes_in_after_a_reset(server, leader):
    plan = leader.offload([b"n" * 32], [7])
    ask(server.address, {"do": "reset"})
    leader.manager.finish_store(plan.id, ok=True)
    assert held(leader)[HOST] == {b"n" * 32}


@pytest.mark.parametrize(
    ("command", "complaint"),
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
def test_what_cannot_be_done_is_refused_and_changes_nothing(command, complaint, server, leader):
    before = held(leader)
    with pytest.raises(CommandError) as refused:
        ask(server.address, command)
    assert complaint in str(refused.value)
    assert held(leader) == before


def test_nonsense_is_answered_and_the_next_command_is_heard(server):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(f"\0{server.address}")
        with client.makefile("rb") as lines:
            for line in (b"what?\n", b"[1]\n", b"\n", b'{"do": "status"}'):
                client.sendall(line)
                if not line.endswith(b"\n"):
                    client.shutdown(socket.SHUT_WR)
                answer = json.loads(lines.readline())
            assert answer["ok"] is True


def test_a_command_waits_for_the_engine_and_status_does_not(leader):
    """The engine is in one of our calls: nobody else touches the books until it is out again."""
    turn = threading.RLock()
    server = ControlServer(Controller(turn, lambda: leader, {}, lambda: True), "busy")
    try:
        with turn:
            done = threading.Thread(target=ask, args=(server.address, {"do": "reset"}))
            done.start()
            time.sleep(0.3)
            assert done.is_alive()
            assert leader.manager.catalogs[HOST].published == 6
        done.join(60)
        assert leader.manager.catalogs[HOST].published == 0
        with turn:
            assert ask(server.address, {"do": "status"})["pools"]["host"]["empty_blocks"] == 7
    finally:
        server.close()


@pytest.mark.parametrize("kind", ["says nothing", "drips", "never reads"])
def test_a_slow_client_keeps_another_out_no_longer_than_its_deadline(server, monkeypatch, kind):
    monkeypatch.setattr("kvbm.control.socket.CONNECTION_SECONDS", 0.5, raising=False)
    over = threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as slow:
        slow.connect(f"\0{server.address}")

        def drip():
            with contextlib.suppress(OSError):
                while not over.wait(0.05):
                    slow.sendall(b"x" if kind == "drips" else b'{"do": "status"}\n' * 2)

        thread = threading.Thread(target=drip)
        if kind != "says nothing":
            thread.start()
        try:
            assert ask(server.address, {"do": "status"})
        finally:
            over.set()
            if kind != "says nothing":
                thread.join()


# -- how often --------------------------------------------------------------------------------------------------------


def ask_until(server, end):
    while time.monotonic() < end:
        ask(server.address, {"do": "status"}, timeout=60)


def hammered(controller, name, clients, seconds, carry_out):
    """(commands that were carried out, seconds) while so many clients send them without a pause."""
    done = []
    whole = controller.carry_out
    controller.carry_out = lambda command: (done.append(1), carry_out(), whole(command))[2]
    server = ControlServer(controller, name)
    began = time.monotonic()
    threads = [threading.Thread(target=ask_until, args=(server, began + seconds)) for _ in range(clients)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(done), time.monotonic() - began
    finally:
        server.close()


def test_clients_that_send_commands_without_a_pause_are_held_back(controller):
    commands, took = hammered(controller, "hammered", 8, 1.5, lambda: None)
    assert 8 <= commands <= control.COMMAND_BURST + control.COMMANDS_A_SECOND * took + 1


def test_commands_that_cost_much_are_carried_out_less_often(controller):
    def burn():
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    commands, took = hammered(controller, "costly", 4, 2.0, burn)
    # Each takes a token and, for the rest after it, 9 * 0.05 s of ten a second.
    assert 2 <= commands <= (control.COMMAND_BURST + control.COMMANDS_A_SECOND * took) / 5.5 + 2


def test_strangers_that_connect_without_a_pause_are_held_back(server, monkeypatch):
    seen = []
    monkeypatch.setattr(control, "user_of", lambda peer: (seen.append(1), 12345)[1])
    began = time.monotonic()
    while (took := time.monotonic() - began) < 1.5:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(f"\0{server.address}")
            stranger.recv(1)
    assert len(seen) <= control.COMMAND_BURST + control.COMMANDS_A_SECOND * took + 2


# -- users ------------------------------------------------------------------------------------------------------------


def test_a_stranger_is_refused_before_a_byte_is_read(server, leader, monkeypatch):
    before = held(leader)
    monkeypatch.setattr(control, "user_of", lambda peer: 12345)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(20)
        stranger.connect(f"\0{server.address}")
        with contextlib.suppress(ConnectionError):  # closed with the command unread
            stranger.sendall(b'{"do": "reset"}\n')
            assert stranger.recv(1) == b""
    assert held(leader) == before


@contextlib.contextmanager
def listening(name, backlog=8):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as impostor:
        impostor.settimeout(20)
        impostor.bind(f"\0{name}")
        impostor.listen(backlog)
        yield impostor


def test_a_client_sends_nothing_to_another_users_socket(monkeypatch):
    name = f"kvbm-control/{os.getuid()}/{os.getpid()}/impostor"
    with listening(name) as impostor:
        monkeypatch.setattr(control, "user_of", lambda peer: 12345)
        with pytest.raises(PermissionError, match="belongs to user 12345"):
            ask(name, {"do": "reset"})
        client, _ = impostor.accept()
        with client:
            assert client.recv(1) == b""
        assert (name, 12345) in look()
        assert name not in addresses()


def as_nobody(script, *arguments):
    """Runs in a process of another user; imports come before, as the interpreter may not be readable afterwards."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import os, socket, sys\nos.setuid(65534)\n{script}", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")


@ROOT
def test_other_users_are_not_heard(server, leader):
    """The kernel says which user is at the other end."""
    before = held(leader)
    script = (
        "s = socket.socket(socket.AF_UNIX)\ns.settimeout(20)\ns.connect('\\0' + sys.argv[1])\n"
        "try:\n    s.sendall(b'{\"do\": \"reset\"}\\n')\n    print('heard' if s.recv(1) else 'refused')\n"
        "except ConnectionError: print('refused')\n"
    )
    asked = as_nobody(script, server.address)
    assert asked.communicate(timeout=60)[0] == "refused\n"
    assert held(leader) == before


@ROOT
def test_another_users_socket_is_shown_as_foreign_and_given_no_commands(server, capsys):
    name = f"kvbm-control/0/{os.getpid()}/impostor"
    script = (
        "s = socket.socket(socket.AF_UNIX)\ns.bind('\\0' + sys.argv[1])\ns.listen(8)\nprint('ready', flush=True)\n"
        "s.settimeout(60)\nc, _ = s.accept()\nwhile not (heard := c.recv(100)):\n    c, _ = s.accept()\n"
    )
    impostor = as_nobody(script, name)
    try:
        assert impostor.stdout.readline() == "ready\n"
        assert main(["control", "list"]) == 0
        owners = {line.split()[0]: line.split(maxsplit=1)[1].split() for line in capsys.readouterr().out.splitlines()}
        assert owners[server.address] == ["m", "4711", "6881", "you"]
        assert owners[name] == ["user", "65534:", "foreign"]
        assert main(["control", "list", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert {"address": name, "user": 65534} in shown["foreign"]
        assert name not in shown["here"]
        assert main(["control", "status", "--engine", "impostor"]) == 1
        assert "no engine fits" in capsys.readouterr().err
        with pytest.raises(PermissionError, match="belongs to user 65534"):
            ask(name, {"do": "status"})
        assert impostor.poll() is None  # it has been connected to and has heard nothing
    finally:
        impostor.kill()
        impostor.communicate(timeout=60)


# -- hostile names and answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["\x1b[31mred", "two\nlines", "a b", "\u202eevil", "a/../b", "", "\r", "%s", "a\0b"])
def test_odd_names_are_left_out(name, capsys):
    with listening(f"kvbm-control/{os.getuid()}/1/{name}"[:100]):
        assert main(["control", "list"]) == 0
        assert main(["control", "list", "--json"]) == 0
        assert f"kvbm-control/{os.getuid()}/1/" not in capsys.readouterr().out


@pytest.mark.timeout(300)
def test_a_socket_that_takes_no_connection_does_not_block_the_list(server, capsys):
    name = f"kvbm-control/{os.getuid()}/{os.getpid()}/full"
    with listening(name, backlog=0), contextlib.ExitStack() as stack:
        with contextlib.suppress(BlockingIOError):
            while True:
                one = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                one.setblocking(False)
                one.connect(f"\0{name}")
        assert (name, None) in look()
        assert server.address in addresses()
        assert main(["control", "list"]) == 0
        assert re.search(rf"{name} +unknown: accepts no connection\n", capsys.readouterr().out)
        with pytest.raises(TimeoutError):
            ask(name, {"do": "status"}, timeout=0.5)


def answering(name, answer, command="status"):
    """What `kvbm control` makes of an engine that answers so: (status, output, errors)."""
    with listening(name) as engine:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    client, _ = engine.accept()
                    with client, contextlib.suppress(OSError):
                        if client.recv(1000):
                            client.sendall(answer)

        engine.settimeout(None)  # so that a shutdown wakes it
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return main(["control", command, "--engine", name])
        finally:
            engine.shutdown(socket.SHUT_RDWR)
            thread.join()


GOOD = {"ok": True, "engine": "e", "rank": 0, "model": "m", "kvbm": "2", "pools": {}}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (json.dumps({**GOOD, "model": "\x1b]0;title\x07\x9b31m"}).encode() + b"\n", 0),
        (json.dumps({"ok": False, "error": "\x1b[2J"}).encode() + b"\n", 1),
        (b'{"ok": true}\n', 1),
        (b'{"ok": true, "pools": 7, "model": 1, "engine": 1, "rank": 1, "kvbm": 1}\n', 1),
        (b"\x1b[2J\n", 1),
        (b"[]\n", 1),
        (b"x" * 200_000, 1),
    ],
)
def test_odd_answers_are_read_with_care(answer, status, capsys, monkeypatch):
    monkeypatch.setattr(control, "MAX_ANSWER_BYTES", 100_000)
    assert answering(f"kvbm-control/{os.getuid()}/{os.getpid()}/odd", answer) == status
    shown = capsys.readouterr()
    assert not [sign for sign in shown.out + shown.err if sign != "\n" and not sign.isprintable()]
    assert (shown.err != "") is bool(status)


def test_an_answer_that_never_comes_is_not_waited_for_longer_than_asked():
    name = f"kvbm-control/{os.getuid()}/{os.getpid()}/silent"
    with listening(name), pytest.raises(TimeoutError):
        ask(name, {"do": "status"}, timeout=0.5)


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
    (line,) = [line for line in capsys.readouterr().out.splitlines() if server.address in line]
    assert line.split() == [server.address, "m", "4711", "6881", "you"]
    assert main(["control", "list", "--json"]) == 0
    engine = {"address": server.address, "model": "m", "pid": "4711", "metrics": "6881"}
    assert engine in json.loads(capsys.readouterr().out)["engines"]
    assert main(["control", "status", *name]) == 0
    shown = capsys.readouterr().out
    assert "m, engine e, rank 0" in shown
    assert ["host", "1", "5", "2"] in [line.split() for line in shown.splitlines()]
    assert main(["control", "reset", "host", "--block", str(number(HOST_KEYS[1])), "--block", "1", *name]) == 0
    assert capsys.readouterr().out == "1 blocks dropped, 1 not found\n"
    assert main(["control", "reset", "all", "--block", "17", *name]) == 0
    assert capsys.readouterr().out == "0 blocks dropped, 1 not found\n"
    assert main(["control", "reset", "disk", *name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"reset_blocks": 4}
    assert main(["control", "reset", "all", *name]) == 0
    assert capsys.readouterr().out == "5 blocks dropped\n"
    assert main(["control", "announce", *name]) == 0
    assert "announces its blocks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["list", "host"], "list takes no tier, got 'host'"),
        (["list", "--engine", "e"], "list takes no --engine, got 'e'"),
        (["status", "host"], "status takes no tier, got 'host'"),
        (["status", "--block", "1"], "status takes no --block, got '1'"),
        (["announce", "disk"], "announce takes no tier, got 'disk'"),
    ],
)
def test_arguments_without_an_effect_are_refused(arguments, problem, capsys):
    assert main(["control", *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_the_command_says_what_is_missing(server, capsys):
    assert main(["control", "reset", "--engine", server.address]) == 2
    assert "reset needs a tier" in capsys.readouterr().err
    assert main(["control", "status", "--engine", "no such engine"]) == 1
    assert "no engine fits --engine 'no such engine'; `kvbm control list`" in capsys.readouterr().err
    assert main(["control", "reset", "tape", "--engine", server.address]) == 1
    assert "expected one of host, disk" in capsys.readouterr().err


@pytest.mark.parametrize("maps_all", [True, False])
def test_a_user_that_may_be_any_other_is_ours_only_where_every_user_is_mapped(server, monkeypatch, maps_all):
    monkeypatch.setattr(control, "OVERFLOW_UID", os.geteuid())
    monkeypatch.setattr(control, "maps_every_user", lambda: maps_all)
    assert (server.address in addresses()) == maps_all
    if maps_all:
        ask(server.address, {"do": "status"})
    else:
        with pytest.raises(PermissionError):
            ask(server.address, {"do": "status"})


def test_a_child_that_was_forked_does_not_listen_after_the_engine_has_died():
    script = (
        "import os, signal, sys, threading\n"
        "from kvbm.control.socket import Controller, ControlServer\n"
        "nothing = Controller(threading.RLock(), lambda: None, {}, lambda: True, None)\n"
        "server = ControlServer(nothing, 'forks')\n"
        "if os.fork() == 0:\n"
        "    print(server.address, flush=True)\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "signal.pause()\n"  # only the child reads standard input, which ends it
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as engine:
        address = engine.stdout.readline().strip()  # the child has run its fork handlers
        assert address in addresses()
        engine.kill()
        engine.wait(60)
        assert address not in addresses()
        engine.stdin.close()
