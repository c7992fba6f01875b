"""Files over HTTP, as much as an S3 client needs for PUT, GET and HEAD: stands in for nginx where there is none.

    python benchmarks/object_files.py DIRECTORY PORT PROCESSES

A process for each of PROCESSES, all on one port, and a thread for each connection. A body goes from the socket to its
file and back with one system call each, outside of the interpreter's lock. No signature is checked, every bucket is
listed as empty, and PUT overwrites.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import threading
import time
from email.utils import formatdate
from pathlib import Path
from urllib.parse import unquote

_LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
_ETAG = 'ETag: "written"\r\n'


def serve(root: Path, connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, ValueError), connection:
        while request := _read_head(connection):
            lines = request.decode("latin-1").split("\r\n")
            method, path, _ = lines[0].split(" ")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            bucket, _, name = unquote(path.partition("?")[0]).strip("/").partition("/")
            _answer(connection, method, root / bucket / name if name else None, headers)


def _read_head(connection: socket.socket) -> bytes:
    """Up to the empty line and no further: the body goes to its file by itself."""
    while peeked := connection.recv(1 << 14, socket.MSG_PEEK):
        end = peeked.find(b"\r\n\r\n")
        if end >= 0:
            return connection.recv(end + 4, socket.MSG_WAITALL)
        time.sleep(0.001)  # the head comes in two pieces
    return b""


def _answer(connection: socket.socket, method: str, path: Path | None, headers: dict[str, str]) -> None:
    if path is None:
        _say(connection, "200 OK", len(_LISTING), "Content-Type: application/xml\r\n")
        connection.sendall(_LISTING)
    elif method == "PUT":
        if headers.get("expect"):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        _receive(connection, path, int(headers.get("content-length", 0)))
        _say(connection, "200 OK", 0, _ETAG)
    else:
        try:
            with open(path, "rb") as file:
                found = os.fstat(file.fileno())
                modified = formatdate(found.st_mtime, usegmt=True)
                _say(connection, "200 OK", found.st_size, f"Last-Modified: {modified}\r\n{_ETAG}")
                if method == "GET":
                    connection.sendfile(file)
        except FileNotFoundError:
            _say(connection, "404 Not Found", 0)


def _receive(connection: socket.socket, path: Path, size: int) -> None:
    """A reader sees the whole object or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}-{threading.get_ident()}-{os.getpid()}")
    with open(work, "w+b") as file:
        file.truncate(size)
        if size:
            with mmap.mmap(file.fileno(), size) as content:
                if connection.recv_into(content, size, socket.MSG_WAITALL) < size:
                    raise OSError("the connection ended in the middle of a body")
    work.rename(path)


def _say(connection: socket.socket, status: str, size: int, more: str = "") -> None:
    connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n{more}\r\n".encode())


def _listen(root: Path, port: int) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(512)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(root, connection), daemon=True).start()


def main(directory: str, port: str, processes: str) -> None:
    for _ in range(int(processes) - 1):
        if not os.fork():
            break
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _listen(Path(directory), int(port))


def _end_with(parent: int) -> None:
    """A benchmark that is killed leaves no server behind."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
