"""Starts an engine's server, and ends it with the engine. Lives in the leader's process."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from kvbm.core.keys import Key
from kvbm.forks import close_in_children
from kvbm.tiers.host.shared import SharedMemory
from kvbm.tiers.peers.board import Board
from kvbm.tiers.peers.finder import Finder, Source
from kvbm.tiers.peers.server import LOG_SUFFIX, Ready, Setup
from kvbm.tiers.peers.wire import digest

logger = logging.getLogger("kvbm")

READY_SECONDS = 60.0
MAX_RESTARTS = 3


class ServerProcess:
    """``setup`` lacks the files: they are known when the process starts. ``slabs``: of each rank."""

    def __init__(self, setup: Setup, slabs: Sequence[SharedMemory], finder: Finder) -> None:
        self.board, self._board_file, self._lease_file = Board.make(setup.slots)
        self._setup = setup
        self._slabs = slabs
        self._finder = finder
        self._log = Path(setup.directory) / (setup.generation + LOG_SUFFIX)
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._held: Collection[Key] = ()
        self.path = ""  # of its Unix socket, once it serves
        self.address = ""  # at which other machines reach it
        self.is_ready = threading.Event()

    def start(self, held: Collection[Key]) -> None:
        """Returns at once. ``held``: this engine's blocks, for the finder."""
        self._held = held
        threading.Thread(target=self._run, name="kvbm-peer-server", daemon=True).start()

    def _run(self) -> None:
        """Keep a server running. One that dies on its own is started anew: everything that it needs is in memory."""
        for attempt in range(1 + MAX_RESTARTS):
            try:
                process = self._launch()
            except OSError as error:
                logger.warning("peers cannot read from this engine: its server does not start (%s)", error)
                return
            self._follow(process)
            status = process.wait()
            if self._closing.is_set():
                return
            with contextlib.suppress(OSError):
                tail = self._log.read_text()[-1000:].strip().replace("\n", " | ")
                logger.warning("the server for peers has ended (status %d, start %d): %s", status, attempt + 1, tail)
            if self._closing.wait(1.0):
                return

    def _launch(self) -> subprocess.Popen[bytes]:
        mine, its = socket.socketpair()
        close_in_children(mine)
        files = [self._board_file.file, self._lease_file.file, *(slab.file for slab in self._slabs)]
        setup = msgspec.structs.replace(
            self._setup, control=its.fileno(), board=files[0], leases=files[1], slabs=files[2:]
        )
        reading, writing = os.pipe()
        # Not in the environment, nor among the arguments: they hold the secret.
        os.write(writing, msgspec.msgpack.encode(setup))
        os.close(writing)
        try:
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "kvbm.tiers.peers.server", str(reading)],
                    pass_fds=[reading, its.fileno(), *files],
                    # An orphan must not keep the engine's output open, nor end with its terminal.
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            finally:
                os.close(log)
        except OSError:
            mine.close()
            raise
        finally:
            os.close(reading)
            its.close()
        self._control, self._process = mine, process
        return process

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        assert self._control is not None
        self._control.settimeout(READY_SECONDS)
        try:
            ready = msgspec.msgpack.decode(self._control.recv(4096), type=Ready)
        except (OSError, msgspec.DecodeError):
            return
        setup = self._setup
        if ready.problem:
            logger.warning("engines on other machines cannot read from this one: %s", ready.problem)
        self.path, self.address = ready.path, ready.address
        logger.info(
            "peers: this engine serves its host blocks to neighbours at %s and to other machines %s (process %d)",
            ready.path, f"at {ready.address}" if ready.address else "not", process.pid,
        )  # fmt: skip
        own = Source(
            ready.address or f"unix:{ready.path}",
            setup.member,
            setup.machine,
            digest(setup.fingerprint),
            setup.generation,
        )
        try:
            self._finder.announce(own, self._held)
        except Exception as error:
            logger.warning("peers: this engine is not announced: %s: %s", type(error).__name__, error)
        self.is_ready.set()

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def close(self, seconds: float) -> None:
        """The engine ends by itself: so does its server."""
        self._closing.set()
        process, control = self._process, self._control
        if process is not None and control is not None:
            with contextlib.suppress(OSError):
                control.sendall(b"end")
            try:
                process.wait(max(seconds, 1.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            control.close()
        with contextlib.suppress(OSError):
            self._log.unlink()
        for memory in (self._board_file, self._lease_file, *self._slabs):
            memory.close()
