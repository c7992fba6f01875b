"""A real S3 store for tests (SeaweedFS), and a proxy that damages the traffic to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbm.tiers.objects.settings import ObjectSettings

WEED = Path(shutil.which("weed") or Path(sys.prefix) / "bin" / "weed")
ACCESS_KEY, SECRET_KEY = "kvbm-test-key", "kvbm-test-secret"
BUCKET = "kvbm-tests"
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # not through a proxy of the environment


def free_ports(count: int) -> list[int]:
    """Below 32768: weed listens for gRPC at each port + 10000."""
    found: list[int] = []
    for port in range(21000 + (time.time_ns() // 1000) % 9000, 32000):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for candidate in (port, port + 10000):
                listener = stack.enter_context(socket.socket())
                listener.bind(("127.0.0.1", candidate))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports")


class Weed:
    """SeaweedFS with one bucket. The credentials may not create another."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port, self._master, self._volume, self._filer = free_ports(4)
        self._process: subprocess.Popen[bytes] | None = None
        rights = [f"{action}:{BUCKET}" for action in ("Read", "Write", "List", "Tagging")]
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": rights,
        }
        (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self.start()
        self._until(lambda: self._filer_request("POST", f"/buckets/{BUCKET}/"))

    def start(self) -> None:
        with open(self.directory / "weed.log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    str(WEED), f"-logdir={self.directory}", "server", f"-dir={self.directory}", "-ip=127.0.0.1",
                    "-ip.bind=127.0.0.1", f"-master.port={self._master}", "-master.telemetry=false",
                    "-master.volumeSizeLimitMB=256", f"-volume.port={self._volume}", "-volume.max=20",
                    "-filer", f"-filer.port={self._filer}", f"-filer.localSocket={self.directory / 'filer.sock'}",
                    "-s3", f"-s3.port={self.port}", "-s3.port.iceberg=0", "-s3.port.lance=0",
                    f"-s3.config={self.directory / 's3.json'}",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        self._until(lambda: socket.create_connection(("127.0.0.1", self.port), 1).close())

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        for port in (self.port, self._master, self._volume, self._filer):
            for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket_file.unlink()
            for socket_file in Path("/tmp").glob(f"seaweedfs-*-grpc-{port + 10000}.sock"):
                socket_file.unlink()

    def settings(self, **changes: Any) -> ObjectSettings:
        values = {
            "bucket": BUCKET,
            "endpoint": f"http://127.0.0.1:{self.port}",
            "region": "us-east-1",
            "access_key": ACCESS_KEY,
            "secret_key": SECRET_KEY,
            "timeout_seconds": 30.0,  # the machine may be busy
        }
        return ObjectSettings(**{**values, **changes})

    def stored_bytes(self, name: str) -> bytes:
        """An object as it lies in the store, past S3 and its credentials."""
        return self._filer_request("GET", f"/buckets/{BUCKET}/{name}")

    def overwrite(self, name: str, data: bytes) -> None:
        """Damage an object where it lies."""
        self._filer_request("PUT", f"/buckets/{BUCKET}/{name}", data)

    def _filer_request(self, method: str, path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self._filer}{path}", data, method=method)
        with HTTP.open(request, timeout=10) as answer:
            return answer.read()

    def _until(self, attempt: Callable[[], object], seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                attempt()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


class FaultProxy:
    """Passes HTTP requests on to a store, except for the fault that is set."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self.fault = ""
        self.delay_seconds = 0.0
        self.methods: tuple[str, ...] = ("GET", "PUT", "HEAD", "DELETE", "POST")  # that the fault concerns
        self.requests: list[tuple[str, str]] = []  # (method, path)
        self.on_request: Callable[[int], None] | None = None  # hears the number of each request before it is answered
        self.released = threading.Event()  # ends stalls early, at the end of a test
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set_fault(self, fault: str, *methods: str) -> None:
        self.methods = methods or ("GET", "PUT", "HEAD", "DELETE", "POST")
        self.fault = fault

    def close(self) -> None:
        self.released.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException), connection:
            stream = connection.makefile("rb")
            while line := stream.readline():
                method, path, _ = line.decode().split(" ")
                headers = http.client.parse_headers(stream)
                body = stream.read(int(headers.get("Content-Length") or 0))
                self.requests.append((method, path))
                if self.on_request is not None:
                    self.on_request(len(self.requests))
                if not self._answer(connection, method, path, headers, body):
                    return

    def _answer(self, connection: socket.socket, method: str, path: str, headers: Any, body: bytes) -> bool:
        """Whether the connection goes on."""
        fault = self.fault if method in self.methods else ""
        if self.delay_seconds:
            time.sleep(self.delay_seconds)
        if fault == "stall":
            self.released.wait(5)
        if fault == "500":
            connection.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
            return True
        if fault == "conflict":
            connection.sendall(b"HTTP/1.1 409 Conflict\r\nContent-Length: 0\r\n\r\n")
            return True
        if fault == "skew":
            headers.replace_header("x-amz-date", "20200101T000000Z")
        upstream = http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=30)
        with contextlib.closing(upstream):
            upstream.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body or None)
            answer = upstream.getresponse()
            data = answer.read()
        size = int(answer.headers["Content-Length"] or 0) if method == "HEAD" else len(data)
        if fault == "truncate" and answer.status == 200:
            size = len(data) // 2
            data = data[:size]
        if fault == "flip" and answer.status == 200 and data:
            middle = len(data) // 2  # the last block of an object may be one that is not wanted
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        status = 200 if fault == "no-conditions" and method == "PUT" else answer.status
        lines = [f"HTTP/1.1 {status} {answer.reason}", 'ETag: "tag"' if status != answer.status else "X-Proxy: yes"]
        skipped = ("content-length", "transfer-encoding", "connection")
        lines += [f"{name}: {value}" for name, value in answer.headers.items() if name.lower() not in skipped]
        if answer.status != 204:
            lines.append(f"Content-Length: {size}")
        head = "\r\n".join(lines).encode() + b"\r\n\r\n"
        if fault == "reset":
            connection.sendall(head + data[: len(data) // 2])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            return False
        connection.sendall(head + data)
        return True
