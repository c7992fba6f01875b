"""Clients of the metrics port cannot slow the engine down or keep a scraper out; its process ends with the engine."""

from __future__ import annotations

import contextlib
import errno
import http.client
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import observed
from kvbm.observe import server as module
from kvbm.observe import web
from kvbm.observe.server import Server
from kvbm.pacing import Bucket

HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))
PATIENCE = 60  # seconds; the machine may be busy


def get(server, path):
    with HTTP.open(server.url + path, timeout=PATIENCE) as response:
        return response.read()


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


# -- the rate ---------------------------------------------------------------------------------------------------------


def hammer(port, path, until, answers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    while time.monotonic() < until:
        connection.request("GET", path)
        assert connection.getresponse().read()
        answers.append(path)
    connection.close()


def test_the_engine_makes_few_snapshots_however_many_clients_ask(server, source):
    get(server, "/metrics")
    began, answers = time.monotonic(), []
    paths = ["/metrics", "/api/state", "/api/state?requests=256", "/api/state?requests=7"] * 4
    clients = [threading.Thread(target=hammer, args=(server.port, path, began + 1.5, answers)) for path in paths]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    took = time.monotonic() - began
    assert set(answers) == set(paths)
    assert source.asked <= 1 + module.SNAPSHOT_BURST + module.SNAPSHOTS_A_SECOND * took + 1


def test_a_child_that_asks_without_pause_gets_no_more(source):
    server = Server(source, "127.0.0.1", 0)
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=server._answer, args=(ours,))
    began = time.monotonic()
    thread.start()
    theirs.sendall(b"\0\0" * 1000)
    wait_until(lambda: source.asked > module.SNAPSHOT_BURST + 2)
    asked, took = source.asked, time.monotonic() - began
    assert asked <= module.SNAPSHOT_BURST + module.SNAPSHOTS_A_SECOND * took + 1
    server.close()
    thread.join()
    ours.close()
    theirs.close()


def test_a_client_that_asks_without_pause_gets_a_bounded_number_of_answers():
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listening, theirs:
        subject = web.Web(listening, theirs, os.getppid(), web.Limits(answers_a_second=10))
        thread = threading.Thread(target=subject.run)
        thread.start()
        began, answers = time.monotonic(), []
        hammer(listening.getsockname()[1], "/healthz", began + 1.0, answers)
        took = time.monotonic() - began
        ours.close()
        thread.join(PATIENCE)
    assert 1 <= len(answers) <= 2 + 10 * took + 1


def test_a_bucket_gives_its_burst_and_then_its_rate():
    now = [0.0]
    bucket = Bucket(rate=4, burst=2, clock=lambda: now[0])
    for _ in range(2):
        assert bucket.delay() == 0
        bucket.take()
    assert bucket.delay() == 0.25
    now[0] += 0.25
    assert bucket.delay() == 0
    bucket.take(3)
    assert bucket.delay() == 0.75
    now[0] += 100
    bucket.delay()
    bucket.take()
    bucket.take()
    assert bucket.delay() == 0.25  # a long rest saves up no more than the burst


def test_a_client_gets_no_snapshot_from_before_it_asked_within_the_limit(server, source):
    for lookups in range(31, 31 + module.SNAPSHOT_BURST):
        source.now = observed.snapshot(lookups=lookups)
        assert f"\nkvbm_lookups_total {lookups}\n".encode() in get(server, "/metrics")


def test_a_client_gets_the_last_snapshot_while_the_limit_delays_a_new_one(source, monkeypatch):
    monkeypatch.setattr(module, "SNAPSHOTS_A_SECOND", 0.001)
    server = observed.Here(source, web.Limits(engine_seconds=600.0))
    server.start()
    try:
        for _ in range(module.SNAPSHOT_BURST):
            get(server, "/metrics")
        for _ in range(3):
            source.now = observed.snapshot(lookups=77)
            assert b"\nkvbm_lookups_total 77\n" not in get(server, "/metrics")
        assert source.asked == module.SNAPSHOT_BURST
        assert get(server, "/healthz") == b"ok\n"
        with pytest.raises(TimeoutError):  # the last snapshot holds no requests
            HTTP.open(server.url + "/api/state?requests=5", timeout=1).read()
    finally:
        server.close()


# -- slow clients -----------------------------------------------------------------------------------------------------


def open_slow(port, kind):
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    if kind == "half a header":
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
    elif kind == "never reads":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(OSError):
            connection.sendall(b"GET /page.js HTTP/1.1\r\n\r\n" * 500)
    return connection


@pytest.mark.parametrize("count", [64, 500])
@pytest.mark.parametrize("kind", ["idle", "half a header", "never reads"])
def test_slow_clients_keep_no_scraper_out(server, kind, count):
    get(server, "/healthz")
    held = []
    try:
        for _ in range(count):
            held.append(open_slow(server.port, kind))
        for _ in range(3):
            assert b"kvbm_info{" in get(server, "/metrics")
    finally:
        for connection in held:
            connection.close()


def test_clients_that_all_ask_keep_no_scraper_out(server):
    """More of them than there are connections, each with a request that waits."""
    get(server, "/healthz")
    held = [socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) for _ in range(400)]
    try:
        for connection in held:
            with contextlib.suppress(OSError):
                connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b"kvbm_info{" in get(server, "/metrics")
    finally:
        for connection in held:
            connection.close()


# -- an engine that does not answer -----------------------------------------------------------------------------------


class StuckSource(observed.FixedSource):
    def __init__(self):
        super().__init__()
        self.go = threading.Event()
        self.go.set()

    def snapshot(self, requests=0):
        assert self.go.wait(PATIENCE)
        return super().snapshot(requests)


def test_an_engine_that_does_not_answer_is_told_of_and_its_last_figures_stay():
    source = StuckSource()
    server = Server(source, "127.0.0.1", 0)
    server.start()
    try:
        first = get(server, "/metrics")
        assert get(server, "/healthz") == b"ok\n"
        source.go.clear()
        assert get(server, "/metrics") == first
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(server, "/healthz")
        assert caught.value.code == 503
        assert b"the engine has not answered for" in caught.value.read()
        source.now = observed.snapshot(lookups=77)
        source.go.set()
        wait_until(lambda: b"\nkvbm_lookups_total 77\n" in get(server, "/metrics"))
        assert get(server, "/healthz") == b"ok\n"
    finally:
        source.go.set()
        server.close()


def test_without_any_answer_there_is_a_sentence():
    source = StuckSource()
    source.go.clear()
    server = Server(source, "127.0.0.1", 0)
    server.start()
    try:
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(server, "/metrics")
        assert caught.value.code == 503
        assert b"does not answer yet" in caught.value.read()
    finally:
        source.go.set()
        server.close()


# -- the process ------------------------------------------------------------------------------------------------------

ENGINE = """
import os, sys, time
import observed
from kvbm.observe.server import Server
server = Server(observed.FixedSource(), "127.0.0.1", 0)
server.start()
while server.child is None: time.sleep(0.01)
helper = os.fork() if sys.argv[1] == "forks" else 0
if sys.argv[1] == "forks" and not helper:
    time.sleep(120)  # outlives the engine
    os._exit(0)
print(server.child, server.port, helper, flush=True)
sys.stdin.read()
if sys.argv[1] == "exits": sys.exit()
time.sleep(120)
"""


@pytest.mark.parametrize("end", ["is killed", "exits", "forks"])
def test_the_process_ends_with_the_engine(end):
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    helper = 0
    try:
        assert engine.stdout is not None
        child, port, helper = map(int, engine.stdout.readline().split())
        with HTTP.open(f"http://127.0.0.1:{port}/healthz", timeout=PATIENCE) as response:
            assert response.read() == b"ok\n"
        assert is_running(child)
        if end == "exits":
            engine.communicate("", timeout=PATIENCE)
        else:
            engine.kill()
        wait_until(lambda: not is_running(child))
        engine.wait(PATIENCE)
        with socket.socket() as again:  # the port is free for the next engine
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
    finally:
        engine.kill()
        if helper:
            os.kill(helper, signal.SIGKILL)
        engine.communicate(timeout=PATIENCE)


def test_a_process_that_was_killed_is_started_again(server, caplog):
    with caplog.at_level(logging.WARNING, logger="kvbm"):
        get(server, "/metrics")
        for _ in range(2):
            killed = server.child
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda killed=killed: server.child not in (None, killed))
            assert b"kvbm_info{" in get(server, "/metrics")
    assert caplog.text.count("has ended") == 2


def test_without_descriptors_the_process_waits_instead_of_spinning():
    class Full(socket.socket):
        tried = 0

        def accept(self):
            self.tried += 1
            raise OSError(errno.EMFILE, "Too many open files")

    ours, theirs = socket.socketpair()
    with ours, theirs, Full() as listening, socket.socket() as client:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        client.connect(listening.getsockname())
        running = threading.Thread(target=web.Web(listening, theirs, os.getppid()).run, daemon=True)
        began = time.monotonic()
        running.start()
        wait_until(lambda: listening.tried)
        time.sleep(0.5)
        tried = listening.tried
        assert tried < 10 + 10 * (time.monotonic() - began)  # a loop that spins tries ten thousands of times
        wait_until(lambda: listening.tried > 1)  # a client is accepted as soon as it can be
        ours.close()
        running.join(PATIENCE)


def test_only_short_lives_in_a_row_count(server, monkeypatch):
    """An engine that runs for months does not lose its metrics to a process that is killed now and then."""
    monkeypatch.setattr(module, "RESTART_SECONDS", 0.01)
    monkeypatch.setattr(module, "SHORT_LIFE_SECONDS", 0.0)
    for _ in range(module.MAX_STARTS + 1):
        wait_until(lambda: server.child is not None)
        killed = server.child
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda killed=killed: server.child != killed)
    assert b"kvbm_info{" in get(server, "/metrics")


def test_a_process_that_cannot_run_is_given_up(source, caplog, monkeypatch):
    monkeypatch.setattr(module, "RESTART_SECONDS", 0.01)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with caplog.at_level(logging.WARNING, logger="kvbm"):
        server = Server(source, "127.0.0.1", 0)
        server.start()
        wait_until(lambda: "No metrics on" in caplog.text)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    server.close()
    assert f"ended {module.MAX_STARTS} times" in caplog.text


def test_signals_of_a_terminal_do_not_end_it(server):
    get(server, "/healthz")
    before = server.child
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(before, number)
    assert get(server, "/metrics")
    assert server.child == before


def test_it_is_small_and_yields_to_the_engine(server):
    get(server, "/api/state")
    mapped = Path(f"/proc/{server.child}/maps").read_text()
    assert "msgspec" in mapped
    # vLLM preloads the OpenMP library of torch into all processes of a CPU engine.
    assert not [name for name in ("numpy", "libtorch", "zmq", "_ssl") if name in mapped]
    assert os.getpriority(os.PRIO_PROCESS, server.child) == 19


def test_nothing_of_the_working_directory_is_run(source, tmp_path, monkeypatch):
    """The engine may have been started where others can write."""
    for name in ("msgspec", "selectors", "kvbm", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    server = Server(source, "127.0.0.1", 0)
    server.start()
    try:
        assert get(server, "/metrics")
    finally:
        server.close()
    assert not (tmp_path / "ran").exists()
