"""Orders from outside: look at the tiers, empty them, have subscribers told again.

Whoever gives orders runs on the same machine and as the same user, or as root: the leader listens on a socket without a
file, which disappears with the process, and asks the kernel who is at the other end. One order is one line of JSON, and
so is its answer::

    {"do": "status"}                                      {"do": "reset", "tier": "host"}
    {"do": "reset", "tier": "host", "blocks": [17, ...]}  {"do": "reset"}        {"do": "announce"}

Without a tier it is for every tier.

An order waits for its turn between two calls of the engine, and the engine for its, as it would for a reset of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from kvbm.plans import Tier
from kvbm.runtime.leader import Leader

logger = logging.getLogger("kvbm")

PREFIX = "kvbm-control"
MOST_BYTES = 1 << 20  # of an order
PATIENCE_SECONDS = 10.0  # with somebody who connects and says nothing

# Both our words and upstream's numbers.
TIERS = {
    "device": Tier.DEVICE, "g1": Tier.DEVICE, "host": Tier.HOST, "g2": Tier.HOST, "disk": Tier.DISK, "g3": Tier.DISK,
    "object": Tier.OBJECT, "g4": Tier.OBJECT,
}  # fmt: skip


class OrderError(ValueError):
    """An order that cannot be carried out; the message says what would be."""


class Controller:
    """Carries out orders on one leader.

    ``turn`` is held while the engine is in one of our calls, and by us while we touch the books. ``engine_blocks``
    gives (all, free) of the engine's own cache, if it can say so.
    """

    def __init__(
        self,
        turn: AbstractContextManager[Any],
        leader: Callable[[], Leader | None],
        about: dict[str, Any],
        announce: Callable[[], bool],
        engine_blocks: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._turn = turn
        self._leader = leader
        self._about = about
        self._announce = announce
        self._engine_blocks = engine_blocks

    def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        leader = self._leader()
        if leader is None:
            raise OrderError("KVBM is not ready yet, or has switched itself off")
        what = order.get("do")
        if what == "status":
            return {**self._about, "pools": self._status(leader)}
        with self._turn:
            if what == "reset":
                return self._reset(leader, order)
            if what == "announce":
                return {"announced": self._announce()}
        raise OrderError(f"do={what!r}: expected status, reset or announce")

    def _status(self, leader: Leader) -> dict[str, dict[str, int]]:
        """In upstream's words: active is being read or written, inactive can be evicted, empty holds nothing."""
        pools = {}
        if self._engine_blocks is not None:
            every, free = self._engine_blocks()
            pools["device"] = {"active_blocks": every - free, "inactive_blocks": 0, "empty_blocks": free}
        for tier, pool in leader.manager.pools.items():
            active, empty = pool.pinned + pool.writing, pool.free
            pools[tier.name.lower()] = {
                "active_blocks": active,
                "inactive_blocks": max(0, pool.size - active - empty),
                "empty_blocks": empty,
            }
        return pools

    def _reset(self, leader: Leader, order: dict[str, Any]) -> dict[str, Any]:
        pools = leader.manager.pools
        tiers = list(pools)
        if (name := order.get("tier")) is not None:
            tier = TIERS.get(str(name).lower())
            if tier is None or tier not in pools:
                had = ", ".join(each.name.lower() for each in pools)
                hint = "; the engine's own cache is reset by the engine" if tier is Tier.DEVICE else ""
                raise OrderError(f"tier={name!r}: expected one of {had}{hint}")
            tiers = [tier]
        if (blocks := order.get("blocks")) is None:
            return {"reset_blocks": sum(leader.forget(tier) for tier in tiers)}
        if not isinstance(blocks, list):
            raise OrderError(f"blocks={blocks!r}: expected a list of blocks")
        wanted = [_number(block) for block in blocks]
        endings = {block.to_bytes(8, "big") for block in wanted}
        found: set[int] = set()
        for tier in tiers:
            keys = [key for key in pools[tier].findable if key[-8:] in endings]
            leader.forget(tier, keys)
            found.update(int.from_bytes(key[-8:], "big") for key in keys)
        return {
            "reset_blocks": [block for block in wanted if block in found],
            "not_found_blocks": [block for block in wanted if block not in found],
            "not_reset_blocks": [],
        }


def _number(block: object) -> int:
    """A block as events name it: a number of 64 bits, or the whole hash in hexadecimal."""
    if isinstance(block, int) and not isinstance(block, bool):
        return block & (2**64 - 1)
    if isinstance(block, str):
        with contextlib.suppress(ValueError):
            return int(block, 10) & (2**64 - 1) if block.isdigit() and len(block) <= 20 else int(block[-16:], 16)
    raise OrderError(f"block {block!r}: expected the number of a block as in events, or its hash in hexadecimal")


class ControlServer:
    """Listens at once, in a thread. ``name`` tells the engines of a machine apart."""

    def __init__(self, controller: Controller, name: str) -> None:
        self.address = f"{PREFIX}/{os.getuid()}/{os.getpid()}/{name}"[:100]
        self._controller = controller
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(8)
        self._thread = threading.Thread(target=self._serve, name="kvbm-control", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return  # closed
            with client, contextlib.suppress(OSError):
                client.settimeout(PATIENCE_SECONDS)
                if _user_of(client) in (0, os.getuid()):
                    self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        with client.makefile("rb") as lines:
            while line := lines.readline(MOST_BYTES):
                try:
                    order = msgspec.json.decode(line, type=dict[str, Any])
                    answer = {"ok": True, **self._controller.carry_out(order)}
                    if order.get("do") != "status":
                        logger.info("ordered to %s: %s", order, answer)
                except (OrderError, msgspec.MsgspecError) as error:
                    answer = {"ok": False, "error": str(error)}
                except Exception as error:
                    logger.warning("an order could not be carried out: %s", error, exc_info=True)
                    answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
                client.sendall(msgspec.json.encode(answer) + b"\n")

    def close(self) -> None:
        # Closing alone does not wake who waits in accept.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=PATIENCE_SECONDS)


def _user_of(client: socket.socket) -> int:
    _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


def open_control(controller: Controller, name: str) -> ControlServer | None:
    """None, with a sentence in the log, when it cannot be had: no engine ends for that."""
    try:
        return ControlServer(controller, name)
    except OSError as error:
        logger.warning("no orders can be given from outside: %s", error)
        return None


# -- the other end ----------------------------------------------------------------------------------------------------


def addresses() -> list[str]:
    """Leaders on this machine that listen, of whatever user."""
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines():
        name = line.rpartition(" ")[2]
        if name.startswith(f"@{PREFIX}/"):
            found.add(name[1:])
    return sorted(found)


def ask(address: str, order: dict[str, Any], timeout: float = 60.0) -> dict[str, Any]:
    """Give an order and wait for the answer. Raises OSError when nobody is there, OrderError when it is refused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as leader:
        leader.settimeout(timeout)
        leader.connect(f"\0{address}")
        leader.sendall(msgspec.json.encode(order) + b"\n")
        with leader.makefile("rb") as lines:
            line = lines.readline()
    if not line:
        raise ConnectionError(f"{address} does not answer; it takes orders from its own user and root only")
    answer = msgspec.json.decode(line, type=dict[str, Any])
    if not answer.pop("ok"):
        raise OrderError(answer["error"])
    return answer
