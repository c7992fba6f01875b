"""A small HTTP server for metrics and the web page, in threads of the engine's process.

Whoever looks must not slow the engine down, and both share one interpreter: so a request is answered with as little
Python as that takes. The server of the standard library spends 0.3 ms on one, mostly on headers that nobody here reads;
this one spends 0.07 ms, the figures included, or 0.4 ms ten times a second, when no cache of the processor holds
anything of it any more (benchmarks/observe.py). It knows GET and HEAD, keeps connections open, and gives up on clients
that are slow or too many.

    /            the page                 /metrics      Prometheus text
    /api/state   a snapshot as JSON (?requests=N for so many of the latest requests)
    /healthz     "ok" while the engine's process is alive
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
from importlib import resources
from urllib.parse import parse_qs, urlsplit

import msgspec

from kvbm.observe import metrics
from kvbm.observe.findings import explain
from kvbm.observe.snapshot import Source, to_json

logger = logging.getLogger("kvbm")

MOST_CONNECTIONS = 64
IDLE_SECONDS = 75  # longer than a minute, the slowest scrape interval that is usual
MOST_HEADER_BYTES = 16_384
MOST_REQUESTS = 256  # in a snapshot

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 500: "Internal Server Error"}
_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_SAFE = (
    "X-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Content-Security-Policy: default-src 'self'; frame-ancestors 'none'; base-uri 'none'\r\n"
)


class Answer(Exception):  # noqa: N818  # an answer that is not the usual one
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class Server:
    """Binds at once; raises OSError when it cannot. ``port`` 0 takes any that is free."""

    def __init__(self, source: Source, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._tcp = _Tcp(source, (host, port), family)
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        return int(self._tcp.server_address[1])

    @property
    def url(self) -> str:
        host = str(self._tcp.server_address[0])
        if host in ("0.0.0.0", "::"):
            host = "localhost"
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def start(self) -> None:
        self._thread = threading.Thread(target=self._tcp.serve_forever, args=(0.5,), name="kvbm-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._tcp.shutdown()
            self._thread.join(timeout=5)
        self._tcp.server_close()


class _Tcp(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, source: Source, address: tuple[str, int], family: int) -> None:
        self.source = source
        self.address_family = family
        self._room = threading.Semaphore(MOST_CONNECTIONS)
        super().__init__(address, _Connection)

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        if self._room.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except Exception:  # no more threads to be had
                self._room.release()
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("a connection to the metrics port ended badly", exc_info=True)


class _Connection(socketserver.StreamRequestHandler):
    """One client, one request after the other."""

    server: _Tcp
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # gone, or silent for too long
            while self._serve_one():
                pass

    def _serve_one(self) -> bool:
        """Answer one request. False when the connection is over."""
        line = self.rfile.readline(MOST_HEADER_BYTES)
        if not line:
            return False
        method, _, rest = line.decode("latin-1").partition(" ")
        target, _, version = rest.rstrip("\r\n").rpartition(" ")
        keep = version == "HTTP/1.1"
        size = len(line)
        while (header := self.rfile.readline(MOST_HEADER_BYTES)) not in (b"\r\n", b"\n"):
            size += len(header)
            if not header.endswith(b"\n") or size > MOST_HEADER_BYTES:
                self._send(400, "the request is too long or broken off\n", head=False, keep=False)
                return False
            name, _, value = header.partition(b":")
            name = name.lower()
            if name == b"connection":
                keep = b"close" not in value.lower() and (keep or b"keep-alive" in value.lower())
            elif (name == b"content-length" and value.strip() != b"0") or name == b"transfer-encoding":
                keep = False  # what follows is a body that nobody is going to read
        if not version.startswith("HTTP/1.") or not target.startswith("/"):
            self._send(400, "this is no HTTP request\n", head=False, keep=False)
            return False
        head = method == "HEAD"
        try:
            if method not in ("GET", "HEAD"):
                raise Answer(405, "only GET and HEAD are understood here\n")
            body, kind = _answer(self.server.source, target)
            self._send(200, body, kind, head=head, keep=keep)
        except Answer as answer:
            self._send(answer.status, answer.text, head=head, keep=keep)
        except OSError:
            raise
        except Exception as error:
            logger.warning("%s could not be answered: %s", target, error, exc_info=True)
            self._send(500, f"{type(error).__name__}: {error}\n", head=head, keep=keep)
        return keep

    def _send(
        self, status: int, body: bytes | str, kind: str = "text/plain; charset=utf-8", *, head: bool, keep: bool
    ) -> None:
        data = body.encode() if isinstance(body, str) else body
        start = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n"
            f"Cache-Control: no-store\r\n{_SAFE}Connection: {'keep-alive' if keep else 'close'}\r\n\r\n"
        ).encode()
        self.request.sendall(start if head else start + data)


def _answer(source: Source, target: str) -> tuple[bytes, str]:
    """(body, content type) of a path."""
    path = urlsplit(target)
    if path.path == "/metrics":
        return metrics.render(source.snapshot()), metrics.CONTENT_TYPE
    if path.path == "/api/state":
        snapshot = source.snapshot(_count(path.query))
        return to_json(msgspec.structs.replace(snapshot, findings=explain(snapshot))), "application/json"
    if path.path == "/healthz":
        return b"ok\n", "text/plain; charset=utf-8"
    if path.path in _PAGE:
        name, kind = _PAGE[path.path]
        return _file(name), kind
    raise Answer(404, f"there is nothing at {path.path[:80]}; try / or /metrics\n")


def _count(query: str) -> int:
    text = parse_qs(query).get("requests", ["0"])[-1]
    if not text.isascii() or not text.isdigit() or int(text) > MOST_REQUESTS:
        raise Answer(400, f"requests={text[:20]}: expected a whole number from 0 to {MOST_REQUESTS}\n")
    return int(text)


_files: dict[str, bytes] = {}


def _file(name: str) -> bytes:
    if name not in _files:
        _files[name] = (resources.files("kvbm.observe") / "page" / name).read_bytes()
    return _files[name]


def open_server(source: Source, host: str, port: int) -> Server | None:
    """A server that runs; None, with a sentence in the log, when the port cannot be had: no engine ends for that."""
    try:
        server = Server(source, host, port)
    except OSError as error:
        logger.warning(
            "no metrics: %s:%d cannot be listened on (%s). Every engine on a host needs its own DYN_KVBM_METRICS_PORT; "
            "the address is KVBM_METRICS_HOST.", host, port, error.strerror or error,
        )  # fmt: skip
        return None
    server.start()
    return server
