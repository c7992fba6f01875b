"""The target of benchmarks/objects.py: nginx with its WebDAV module, and a proxy that delays requests.

nginx answers PUT and GET faster than any S3 server, so that the client is what is measured. It checks no signature,
lists every bucket as empty and overwrites: only the benchmark's own names go there. Objects lie in memory (/dev/shm) if
it has room. Where nginx is not installed, ``server`` takes processes of Python that answer the same
(benchmarks/object_files.py): enough to load a client with, too slow to measure its limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DELAY_SECONDS = 0.02
_CHUNK = 1 << 20

# obstore wants an ETag in the answer to a PUT, and nginx gives none.
_CONFIG = """
daemon off;
worker_processes {workers};
pid {directory}/nginx.pid;
error_log {directory}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  sendfile on;
  tcp_nodelay on;
  keepalive_requests 1000000;
  client_max_body_size 1g;
  client_body_buffer_size 4m;
  client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi;
  scgi_temp_path {directory}/scgi;
  map $request_method $etag_of_put {{ PUT '"written"'; default ""; }}
  server {{
    listen 127.0.0.1:{port};
    root {directory}/objects;
    location ~ ^/[^/]+/?$ {{
      default_type application/xml;
      return 200 "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>";
    }}
    location / {{
      dav_methods PUT DELETE;
      create_full_put_path on;
      add_header ETag $etag_of_put always;
    }}
  }}
}}
"""


def find_nginx() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


class Target:
    """A running server. :meth:`clear` removes every object."""

    def __init__(self, directory: Path, nginx: str | None) -> None:
        """``nginx``: its path; None: Python answers."""
        self.name = "nginx" if nginx else "Python's server"
        self._objects = directory / "objects"
        self._objects.mkdir()
        directory.chmod(0o755)
        self.port = _free_port()
        workers = max(2, (os.cpu_count() or 1) // 4)
        if nginx is None:
            server = Path(__file__).with_name("object_files.py")
            command = [sys.executable, "-S", str(server), str(self._objects), str(self.port), str(workers)]
        else:
            config = directory / "nginx.conf"
            config.write_text(_CONFIG.format(directory=directory, port=self.port, workers=workers))
            if os.getuid() == 0:
                config.write_text("user root;\n" + config.read_text())
            command = [nginx, "-p", str(directory), "-c", str(config)]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        _await_port(self.port, self._process)
        for process in self.processes:  # it stands for another machine, and must not take the client's core
            os.setpriority(os.PRIO_PROCESS, process, 19)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def processes(self) -> list[int]:
        children = ""
        with contextlib.suppress(OSError):  # not every kernel tells
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return [self._process.pid, *map(int, children.split())]

    def clear(self) -> None:
        for path in self._objects.iterdir():
            shutil.rmtree(path)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextmanager
def nginx() -> Iterator[Target]:
    """What the limits of benchmarks/objects.py refer to."""
    path = find_nginx()
    if path is None:
        raise SystemExit("nginx is not installed: apt-get install nginx-light")
    with server(path) as target:
        yield target


@contextmanager
def server(nginx: str | None) -> Iterator[Target]:
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and shutil.disk_usage(memory).free > 2 << 30 else None
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-", dir=parent) as directory:
        target = Target(Path(directory), nginx)
        try:
            yield target
        finally:
            target.close()


@contextmanager
def delayed(port: int) -> Iterator[str]:
    """The endpoint of a proxy, a process of its own, whose requests reach ``port`` DELAY_SECONDS late."""
    process = subprocess.Popen([sys.executable, "-S", __file__, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()


class _Pipe(asyncio.BufferedProtocol):
    """One end of a connection through the proxy. Bytes go on to the other end, those of a client later."""

    def __init__(self, upstream: int | None) -> None:
        self._upstream = upstream  # None: this is the end at the server
        self._buffer = bytearray(_CHUNK)
        self.other: _Pipe | None = None
        self.transport: asyncio.Transport | None = None
        self._waiting: deque[bytes] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._upstream is not None:
            transport.pause_reading()
            task = asyncio.get_running_loop().create_task(self._connect())
            self._tasks.add(task)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        _, other = await loop.create_connection(lambda: _Pipe(None), "127.0.0.1", self._upstream)
        self.other, other.other = other, self
        assert self.transport is not None
        self.transport.resume_reading()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(memoryview(self._buffer)[:nbytes])
        if self._upstream is None:
            self._pass_on(data)
        else:
            self._waiting.append(data)
            asyncio.get_running_loop().call_later(DELAY_SECONDS, lambda: self._pass_on(self._waiting.popleft()))

    def _pass_on(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


async def _proxy(upstream: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Pipe(upstream), "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server did not start: status {process.poll()}")
        time.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(_proxy(int(sys.argv[1])))
