"""The answers of the metrics port: the page, and renderings of the last snapshot, each made once for all clients.

/            the page                 /metrics      Prometheus text
/api/state   a snapshot as JSON (?requests=N adds the N latest requests)
/api/history figures of the last five minutes as JSON, the oldest first
/healthz     "ok"; 503 while the engine does not answer
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec

from kvbm.observe import metrics
from kvbm.observe.findings import explain
from kvbm.observe.snapshot import Flow, HitRates, Snapshot, to_json

MAX_REQUESTS = 256  # in a snapshot
TEXT = "text/plain; charset=utf-8"

_REASONS = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 500: "Internal Server Error",
    503: "Service Unavailable",
}  # fmt: skip
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


class Answer(NamedTuple):
    status: int
    body: bytes
    kind: str = TEXT

    def head(self, keep: bool) -> bytes:
        return (
            f"HTTP/1.1 {self.status} {_REASONS[self.status]}\r\nContent-Type: {self.kind}\r\n"
            f"Content-Length: {len(self.body)}\r\nCache-Control: no-store\r\n{_SAFE}"
            f"Connection: {'keep-alive' if keep else 'close'}\r\n\r\n"
        ).encode()


def refusal(status: int, text: str) -> Answer:
    return Answer(status, text.encode())


class Wanted(NamedTuple):
    """A request for a rendered snapshot with this many of the latest requests."""

    path: str
    requests: int = 0


def find(target: str) -> Answer | Wanted:
    """The answer to a GET of this target. The caller answers /healthz and /api/history: it knows the engine's past."""
    path = urlsplit(target)
    if path.path == "/metrics":
        return Wanted(path.path)
    if path.path == "/api/state":
        text = parse_qs(path.query, max_num_fields=16).get("requests", ["0"])[-1]
        if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) > MAX_REQUESTS:
            return refusal(400, f"requests={text[:20]}: expected a whole number from 0 to {MAX_REQUESTS}\n")
        return Wanted(path.path, int(text))
    if path.path in _PAGE:
        name, kind = _PAGE[path.path]
        return Answer(200, _file(name), kind)
    return refusal(404, f"no page at {path.path[:80]}; try / or /metrics\n")


class Point(msgspec.Struct, frozen=True):
    """The figures of a snapshot that the page draws over time, under the same names."""

    at: float
    started: float
    flows: list[Flow]
    hit_rates: HitRates

    @classmethod
    def of(cls, snapshot: Snapshot) -> Point:
        return cls(snapshot.at, snapshot.started, snapshot.flows, snapshot.hit_rates)


_encode = msgspec.json.Encoder().encode


def render_history(points: Iterable[Point]) -> Answer:
    return Answer(200, _encode(list(points)), "application/json")


@cache
def _file(name: str) -> bytes:
    return (Path(__file__).parent / "page" / name).read_bytes()


def renderer(snapshot: Snapshot) -> Callable[[Wanted], Answer]:
    """Renders a snapshot, and keeps what it has rendered."""
    explained = msgspec.structs.replace(snapshot, findings=explain(snapshot))

    @cache
    def render(wanted: Wanted) -> Answer:
        if wanted.path == "/metrics":
            return Answer(200, metrics.render(explained), metrics.CONTENT_TYPE)
        latest = explained.requests[: wanted.requests]
        return Answer(200, to_json(msgspec.structs.replace(explained, requests=latest)), "application/json")

    return render
