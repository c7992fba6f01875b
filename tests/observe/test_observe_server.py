"""The HTTP server of the metrics port: answers, refuses, gives up, and ends."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

import observed
from kvbm.observe import server as module
from kvbm.observe import web
from kvbm.observe.server import Server, open_server
from kvbm.observe.snapshot import from_json, to_json
from kvbm.observe.web import Limits

HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(server, path):
    with HTTP.open(server.url + path, timeout=60) as response:
        return response.read(), response.headers


def talk(server, data, until_closed=True):
    """Bytes in, bytes out."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(data)
        received = b""
        while part := connection.recv(65536):
            received += part
            if not until_closed:
                break
        return received


def test_metrics_come_as_prometheus_text(server):
    body, headers = get(server, "/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert b"\nkvbm_offload_blocks_d2h 307\n" in body


def test_nobody_is_asked_while_nobody_looks(source, monkeypatch):
    monkeypatch.setattr(web, "HISTORY_EVERY_SECONDS", 3600.0)
    with observed.serving(source, Limits()) as server:
        assert source.asked == 0
        get(server, "/healthz")
        get(server, "/")
        assert source.asked == 0
        get(server, "/metrics")
        assert source.asked == 1


def test_the_state_comes_as_json_with_requests_and_findings(server):
    body, headers = get(server, "/api/state?requests=5")
    assert headers["Content-Type"] == "application/json"
    state = from_json(body)
    assert [request.id for request in state.requests] == ["cmpl-1"]
    assert state.findings[0].name == "gain"
    assert from_json(get(server, "/api/state")[0]).requests == []


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css", "/icon.svg"])
def test_the_page_needs_nothing_from_elsewhere(server, path):
    body, headers = get(server, path)
    text = body.decode().replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in text
    assert "https://" not in text
    assert "default-src 'self'" in headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/nothing", 404),
        ("/page/../server.py", 404),
        ("/api/state?requests=-1", 400),
        ("/api/state?requests=9999", 400),
    ],
)
def test_what_is_not_there_is_refused_with_a_sentence(server, path, status):
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(server, path)
    assert caught.value.code == status
    assert len(caught.value.read().decode().split()) > 4


def test_one_connection_serves_many_requests(server):
    one = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    received = talk(server, one * 3 + one.replace(b"Host: x", b"Connection: close"))
    assert received.count(b"HTTP/1.1 200 OK") == 4


def test_an_old_client_is_not_kept_waiting(server):
    assert b"Connection: close" in talk(server, b"GET /healthz HTTP/1.0\r\n\r\n")


def test_head_has_no_body(server):
    received = talk(server, b"HEAD /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"Content-Length: 0" not in head
    assert body == b""


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"405"),
        (b"hello\r\n\r\n", b"400"),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\n" + b"X: a\r\n" * 4000, b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
    ],
)
def test_nonsense_is_answered_and_the_connection_closed(server, data, status):
    with contextlib.suppress(ConnectionResetError):  # it may be closed with part of the nonsense unread
        assert talk(server, data).startswith(b"HTTP/1.1 " + status)
    assert get(server, "/healthz")[0] == b"ok\n"


def test_a_silent_client_is_dropped_in_time(source):
    assert 60 < Limits().idle_seconds < 300  # longer than between two scrapes, and not for ever
    with observed.serving(source, Limits(idle_seconds=0.3)) as server:
        silent = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        assert get(server, "/healthz")[0] == b"ok\n"
        assert silent.recv(1) == b""
        silent.close()


def test_half_a_request_is_dropped_in_time(source):
    with observed.serving(source, Limits(header_seconds=0.3)) as server:
        assert talk(server, b"GET /metrics HTTP/1.1\r\nHost:") == b""


def test_an_answer_that_is_not_taken_is_dropped_in_time(source):
    with observed.serving(source, Limits(send_seconds=0.3, answers_a_second=100_000)) as server:
        full = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        one = b"GET /page.js HTTP/1.1\r\n\r\n" * 100
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            any(full.sendall(one) for _ in range(100_000))
        full.close()


def test_a_new_client_replaces_the_one_that_has_been_idle_for_longest(source):
    with observed.serving(source, Limits(connections=2)) as server:
        held = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(2)]
        for connection in held:
            connection.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert b"200" in connection.recv(65536)
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as third:
            third.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert b"200" in third.recv(65536)
            assert held[0].recv(1) == b""
            held[1].sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert b"200" in held[1].recv(65536)
        for connection in held:
            connection.close()


def test_a_source_that_fails_costs_an_answer_and_no_more(server, source, caplog):
    source.now = None
    with caplog.at_level(logging.WARNING, logger="kvbm"), pytest.raises(urllib.error.HTTPError) as caught:
        get(server, "/metrics")
    assert caught.value.code == 500
    assert "the metrics cannot be read" in caplog.text
    source.now = observed.SNAPSHOT
    assert get(server, "/metrics")


def test_a_port_that_is_taken_costs_the_metrics_and_not_the_engine(server, source, caplog):
    with caplog.at_level(logging.WARNING, logger="kvbm"):
        assert open_server(source, "127.0.0.1", server.port) is None
    assert f"127.0.0.1:{server.port}" in caplog.text
    assert "DYN_KVBM_METRICS_PORT" in caplog.text


def test_only_this_machine_is_listened_to_unless_asked(server):
    assert server.url.startswith("http://127.0.0.1:")
    with pytest.raises(OSError), socket.create_connection((_outside(), server.port), timeout=2):
        pass


def _outside():
    """An address of this machine that is not loopback's, or one that leads nowhere."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return probe.getsockname()[0]
    except OSError:
        return "192.0.2.1"


def test_ipv6_is_spoken(source):
    try:
        server = Server(source, "::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    server.start()
    try:
        assert server.url.startswith("http://[::1]:")
        assert get(server, "/healthz")[0] == b"ok\n"
    finally:
        server.close()


def test_closing_ends_its_threads(source):
    server = Server(source, "127.0.0.1", 0)
    server.start()
    get(server, "/healthz")
    server.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvbm-metrics"]
    assert server.child is None
    with pytest.raises(urllib.error.URLError):
        get(server, "/healthz")


def test_json_of_another_format_is_refused():
    import msgspec

    newer = {**json.loads(to_json(observed.SNAPSHOT)), "format": 2}
    with pytest.raises(msgspec.DecodeError, match="format 2"):
        from_json(json.dumps(newer).encode())


class Ageing(observed.FixedSource):
    """Every snapshot is a second later than the one before."""

    def snapshot(self, requests=0):
        self.now = observed.snapshot(at=1000.0 + self.asked)
        return super().snapshot(requests)


def test_the_last_minutes_are_kept_without_a_client(monkeypatch):
    source = Ageing()
    monkeypatch.setattr(web, "HISTORY_EVERY_SECONDS", 0.1)
    monkeypatch.setattr(web, "HISTORY_POINTS", 3)
    monkeypatch.setattr(module, "SNAPSHOTS_A_SECOND", 1000)
    with observed.serving(source, Limits()) as server:
        deadline = time.monotonic() + 60
        while source.asked < 12:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        points = json.loads(get(server, "/api/history")[0])
    times = [point["at"] for point in points]
    assert len(times) == 3
    assert times == sorted(times)
    assert times[0] > 1005  # the oldest are gone
    assert points[0]["flows"][0]["bytes"] == 307_000_000
    assert points[0]["hit_rates"]["hits"] == {"host": 55, "disk": 5}
