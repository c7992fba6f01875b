"""What several tests without an engine need."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest


@pytest.fixture
def stranger():
    """Answers whatever it is asked with what is no HTTP, as a port of TLS does."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer():
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                with client:
                    client.recv(1000)
                    client.sendall(b"\x15\x03\x01\x00\x02\x02\x50\n")

    thread = threading.Thread(target=answer)
    thread.start()
    yield f"127.0.0.1:{listening.getsockname()[1]}"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()
