"""KVBM's services for other processes: block events, commands, registration. Nothing here raises into an engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import kvbm
from kvbm.config import Config
from kvbm.control.presence import Presence
from kvbm.control.socket import Controller
from kvbm.engines.guard import Faults
from kvbm.engines.session import Session
from kvbm.events import launch

logger = logging.getLogger("kvbm")

T = TypeVar("T")


class Services:
    """From when the leader begins until :meth:`close`. ``engine``: its name in logs."""

    def __init__(self, engine: str, faults: Faults) -> None:
        self._engine = engine
        self._faults = faults
        self._feed: Any = None  # publishes block events, with ``ledger`` and ``close``; None without events
        self._consolidator: launch.ConsolidatorProcess | None = None
        self._presence: Presence | None = None

    def _start_control(
        self,
        config: Config,
        session: Session,
        engine: str,
        model: str,
        replica: int | None = None,
        engine_blocks: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        """Open the control socket and register. ``engine`` and ``replica`` tell the engines of a deployment apart."""
        assert session.leader is not None
        lock, server = self._faults.engine_lock, session.observer.server
        about = {"engine": engine, "rank": replica or 0, "model": model, "kvbm": kvbm.__version__, "pid": os.getpid()}
        about["metrics"] = server.port if server is not None else None
        controller = Controller(lock, lambda: session.leader, about, self._announce, engine_blocks)
        name = engine if replica is None else f"{engine}-{replica}"
        metrics = server.url if server is not None else ""
        self._presence = Presence(config, controller, name, model, session.leader.ranks, metrics)

    def _announce(self) -> bool:
        """Publish an event for every block once more; False without events."""
        if self._feed is not None:
            self._feed.ledger.tell_again()
        return self._feed is not None

    def _with_feed(self, where: str, call: Callable[..., T], *about: Any) -> T | None:
        """The answer of a call to the feed. None when it fails: then there are no more events."""
        try:
            return call(*about)
        except Exception as error:
            self._faults.record(where, error)
            logger.error(
                "No more events of KVBM's blocks: routers will not learn of new ones. %s's own go on.", self._engine
            )
            feed, self._feed = self._feed, None
            feed.close()
            return None

    def close(self) -> None:
        for part in (self._presence, self._consolidator, self._feed):
            if part is not None:
                part.close()
        self._feed = None
