"""Blocks over NIXL: the source writes them into the reader's host slots. For networks with RDMA.

Each connection between a reader and a server has an agent of its own on both sides, without a progress thread: an agent
that waits for nothing uses no CPU, and to destroy an agent is to cut its connections. NIXL cannot cancel a transfer. So
a reader that gives up destroys its agent before the operation ends: what the source still sends has nowhere to go.

NIXL encrypts nothing. What is said about the blocks (keys, addresses, generations, checksums) goes over the encrypted
socket of the connection, and the reader verifies the checksum of every block.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbm.tiers.peers.wire import PeerError

_MODULES = ("nixl", "nixl_cu12", "nixl_cu13")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_DEVICES = "UCX_NET_DEVICES"
# A transfer that takes longer is polled, at both ends. The bytes wait in the buffers of the network meanwhile; threads
# that spin take the processor from those that move bytes or verify them.
_SPIN_SECONDS = 0.0001
_POLL_SECONDS = 0.0001
_making = threading.Lock()


def api() -> Any:
    """NIXL's Python module; None where it is not installed."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it prints every agent
    for name in _MODULES:
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError:
            continue
    return None


def has_rdma() -> bool:
    return any(Path("/sys/class/infiniband").glob("*"))


def interface_of(address: str) -> str:
    """The network interface that has this IPv4 address; empty when there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


def pause(waited: float) -> None:
    """Between two looks at a transfer that has taken so many seconds."""
    if waited > _SPIN_SECONDS:
        time.sleep(_POLL_SECONDS)


class Agent:
    """One end of a connection. ``memory``: (address, bytes) that it reads from or lets the other end write to."""

    def __init__(self, memory: tuple[int, int], local_address: str) -> None:
        """``local_address``: of the connection; UCX would listen on every interface. Raises PeerError."""
        module = api()
        if module is None:
            raise PeerError("other", "NIXL is not installed: pip install nixl")
        self.name = os.urandom(8).hex()
        try:
            with _making:  # the variable is read when the agent is made, and is the engine's again afterwards
                before = os.environ.get(_DEVICES)
                if before is None and (interface := interface_of(local_address)):
                    os.environ[_DEVICES] = interface
                try:
                    config = module.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
                    self._agent = module.nixl_agent(self.name, config)
                finally:
                    if before is None:
                        os.environ.pop(_DEVICES, None)
            self._agent.register_memory([(*memory, 0, "")], "DRAM")
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise PeerError("other", f"NIXL: {error}") from None
        self._others: dict[bytes, str] = {}

    def push(self, metadata: bytes, pairs: Sequence[tuple[int, int]], size: int, seconds: float) -> None:
        """Copy ``size`` bytes for each (own address, the other's address). Waits. Raises PeerError."""
        agent = self._agent
        try:
            other = self._others.get(metadata)
            if other is None:
                other = self._others[metadata] = agent.add_remote_agent(metadata)
            local = agent.get_xfer_descs([(mine, size, 0) for mine, _ in pairs], "DRAM")
            remote = agent.get_xfer_descs([(its, size, 0) for _, its in pairs], "DRAM")
            handle = agent.initialize_xfer("WRITE", local, remote, other)
            state, began = agent.transfer(handle), time.monotonic()
            while state == "PROC":
                took = time.monotonic() - began
                if took > seconds:
                    raise PeerError("late", f"a transfer over NIXL has not ended in {seconds:g} s")
                pause(took)
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
        except PeerError:
            raise
        except Exception as error:
            raise PeerError("gone", f"NIXL: {error}") from None
        if state != "DONE":
            raise PeerError("gone", f"NIXL: the transfer ended in state {state}")

    def progress(self) -> None:
        """Without a thread of its own, an agent takes in what comes when it is asked to."""
        self._agent.get_new_notifs()

    def close(self) -> None:
        """After this nothing is written to the memory any more."""
        del self._agent
