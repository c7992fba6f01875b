"""`kvbm top`: what it shows, and how it fails."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import socket
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from rich.console import Console

import observed
from kvbm.cli.main import main
from kvbm.cli.screen import draw
from kvbm.observe.findings import explain
from kvbm.observe.remote import NotReachableError, fetch, normal_url
from kvbm.observe.snapshot import Flow, SourceFlow, TierState
from processes import heed_interrupts


def lines_of(before, now, width=100, height=0):
    console = Console(width=width, file=io.StringIO(), markup=False)
    console.print(draw(before, now, width, height))
    return console.file.getvalue().splitlines()


def later():
    """Two seconds on: 40 blocks have come out of host memory."""
    flows = [
        msgspec.structs.replace(flow, blocks=flow.blocks + 40, bytes=flow.bytes + 4_000_000_000)
        if (flow.source, flow.target) == ("host", "device")
        else flow
        for flow in observed.FLOWS
    ]
    now = observed.snapshot(at=observed.SNAPSHOT.at + 2, flows=flows)
    return msgspec.structs.replace(now, findings=explain(now))


def test_the_screen_has_tiers_flows_rates_and_requests():
    text = "\n".join(lines_of(observed.SNAPSHOT, later()))
    assert "a/model on vllm 0.31.0, 2 ranks, up 62.0 s" in text
    assert "host 46%, disk 4% of 120 blocks" in text
    assert "It helps" in text
    assert re.search(r"host +█+░+ 300 MB of 400 MB \(75%\), 7 evicted", text)
    assert re.search(r"↑ host → device +20\.0 blocks/s +2 GB/s", text)
    assert re.search(r"↓ host → disk +0\.0 blocks/s", text)
    assert re.search(r"330 +16 +240 +10 ms +200 ms  loaded in the step \(no other requests running\)", text)


def test_the_screen_has_sources_and_what_others_read():
    peer = TierState(tier="peer", slots=0, free=0, writing=0, idle=0, pinned=0, block_bytes=1_000_000)
    sources = [
        SourceFlow(tier="peer", source=f"10.0.0.{n}:23280", path="socket", blocks=n, bytes=n * 1_000_000,
                   bytes_per_second=2e9, refused={"late": 3} if n == 12 else {}, suspended=n == 12)
        for n in range(1, 13)
    ]  # fmt: skip
    now = observed.snapshot(tiers=[observed.HOST, peer], sources=sources)
    lines = lines_of(None, now)
    assert "    ← 10.0.0.12:23280  12 blocks, 12 MB, 2 GB/s over socket, 3 refused, suspended" in [
        line.rstrip() for line in lines
    ]
    assert sum("←" in line for line in lines) == 8
    assert any("and 4 more sources" in line for line in lines)
    assert any("→ other engines have read 9 blocks, 9 MB, 2 refused" in line for line in lines)


def test_without_an_earlier_look_there_are_no_rates():
    assert re.search(r"↑ host → device +0\.0 blocks/s", "\n".join(lines_of(None, later())))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_every_line_fits_the_screen(width):
    lines = lines_of(observed.SNAPSHOT, later(), width)
    assert len([line for line in lines if "█" in line]) == 2
    assert all(len(line) <= width for line in lines)


@pytest.mark.parametrize(("width", "height"), [(60, 20), (80, 24), (120, 50)])
def test_a_small_terminal_shows_what_matters(width, height):
    now = later()
    tiers = [msgspec.structs.replace(tier, evictions=3_141_592) for tier in now.tiers]
    window = msgspec.structs.replace(now.hit_rates, requests=123_456)
    now = msgspec.structs.replace(now, requests=[observed.REQUEST] * 50, tiers=tiers, hit_rates=window)
    lines = lines_of(observed.SNAPSHOT, now, width, height)
    assert len(lines) <= height
    text = "\n".join(lines)
    for part in ("It helps", "host 46%, disk 4%", "300 MB of 400 MB (75%)", "20.0 blocks/s", "2 GB/s"):
        assert part in text
    assert not any("…" in line for line in lines)  # nothing is cut, not even large figures
    assert "of waiting in 12 loads." in re.sub(r"\s+", " ", text)  # the verdict is whole
    assert any(re.match(r" *\d\d:\d\d:\d\d +330 ", line) for line in lines)
    assert "loaded in the step (no other requests running)" in re.sub(r"\s+", " ", text)  # the last column is whole
    assert lines[-1] == "q or Ctrl-C quits"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "0.01", "soon"])
def test_an_interval_that_makes_no_sense_is_refused(value, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["top", f"--every={value}"])
    assert stop.value.code == 2
    assert f"'{value}': expected" in capsys.readouterr().err


def test_a_full_and_an_empty_tier_can_be_drawn():
    full = msgspec.structs.replace(observed.HOST, free=0, idle=390, writing=5, pinned=5)
    empty = msgspec.structs.replace(observed.DISK, free=1000, idle=0)
    lines = lines_of(None, observed.snapshot(tiers=[full, empty]))
    first, second = (line for line in lines if line.startswith(("host ", "disk ")))
    assert "░" not in first
    assert "█" not in second
    unknown = msgspec.structs.replace(observed.DISK, slots=0, free=0, idle=0)
    assert "disk    " + "░" * 30 + " size not known" in lines_of(None, observed.snapshot(tiers=[unknown]))


def test_one_snapshot_can_be_piped(server, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["top", "--once", str(server.port)]) == 0
    out = capsys.readouterr().out
    assert "a/model" in out
    assert "\x1b" not in out


def test_nobody_there_is_said_with_what_to_do(capsys):
    assert main(["top", "--once", "127.0.0.1:1"]) == 1
    err = capsys.readouterr().err
    assert "http://127.0.0.1:1" in err
    assert "DYN_KVBM_METRICS=1" in err


def test_somebody_else_there_is_said_too(server, source, capsys):
    source.now = None
    with pytest.raises(NotReachableError, match="answered with 500"):
        fetch(f"http://127.0.0.1:{server.port}")


def test_another_user_at_the_port_sends_no_escapes_to_the_terminal(server, source, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    identity = msgspec.structs.replace(observed.IDENTITY, model="\x1b]0;title\x07\x9b31m [red]m[/red] :boom:")
    request = msgspec.structs.replace(observed.SNAPSHOT.requests[0], why="[red]why[/red] :boom:")
    source.now = observed.snapshot(identity=identity, requests=[request])
    assert main(["top", "--once", str(server.port)]) == 0
    shown = capsys.readouterr().out
    assert "[red]why[/red] :boom:" in shown
    assert r"\x1b]0;title\x07\x9b31m [red]m[/red] :boom: on vllm" in shown
    assert not [sign for sign in shown if sign != "\n" and not sign.isprintable()]


def test_without_rich_it_says_what_to_install(server, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "kvbm.cli.screen")
    monkeypatch.delattr("kvbm.cli.screen")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["top", "--once", str(server.port)]) == 1
    assert capsys.readouterr().err == "kvbm top: the package rich is not installed; pip install rich\n"


@pytest.mark.timeout(300)
def test_an_answer_without_an_end_is_given_up():
    listening = socket.create_server(("127.0.0.1", 0))

    def drip():
        client, _ = listening.accept()
        with client, contextlib.suppress(OSError):
            client.recv(1000)
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                client.sendall(b" ")
                time.sleep(0.05)

    thread = threading.Thread(target=drip)
    thread.start()
    # The second where this process does not get to send for half a second.
    with pytest.raises(NotReachableError, match=r"more than 0\.5 s|timed out"):
        fetch(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=0.5)
    thread.join()
    listening.close()


@pytest.mark.parametrize("text", ["host:port", "99999", "http://", "ftp://host", "http://[::1"])
def test_what_is_no_address_is_said_too(text, capsys):
    assert main(["top", "--once", text]) == 1
    assert "Expected a port, host:port or a URL, for example 6880" in capsys.readouterr().err


def test_what_does_not_speak_http_is_said_too(stranger, capsys):
    assert main(["top", "--once", stranger]) == 1
    assert "nothing answers at" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("6880", "http://127.0.0.1:6880"),
        ("host:1", "http://host:1"),
        ("http://host:1/", "http://host:1"),
        (" https://h ", "https://h"),
    ],
)
def test_addresses_are_taken_as_people_write_them(text, url):
    assert normal_url(text) == url


@pytest.mark.parametrize("key", ["Ctrl-C", "q"])
def test_on_a_terminal_it_goes_on_until_it_is_stopped(server, source, key):
    """A real one: the screen is drawn again when figures change, and given back at the end."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    command = [sys.executable, "-m", "kvbm.cli.main", "top", str(server.port), "--every", "0.1"]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, preexec_fn=heed_interrupts
    )
    os.close(slave)
    seen = b""

    def read_until(text):
        nonlocal seen
        deadline = time.monotonic() + 120
        while text not in seen:
            assert time.monotonic() < deadline, seen[-2000:]
            if select.select([master], [], [], 0.2)[0]:
                seen += os.read(master, 65536)

    try:
        read_until(b"307 blocks")
        source.now = observed.snapshot(flows=[Flow(source="device", target="host", blocks=412)])
        read_until(b"412 blocks")
        read_until(b"q or Ctrl-C quits")
        if key == "q":
            os.write(master, b"xq")  # other keys do nothing
        else:
            process.send_signal(2)
        read_until(b"\x1b[?1049l")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
