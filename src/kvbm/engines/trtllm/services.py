"""How TensorRT-LLM's KVBM is seen from outside: block events through the consolidator, orders, registration.

TensorRT-LLM's publisher takes no events of ours. They go out on a socket of our own, and the consolidator merges them
with the engine's; it has to be told where those come from (DYN_KVBM_TRTLLM_ZMQ_PORT). Nothing here raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import zmq

import kvbm
from kvbm.config import Config
from kvbm.control.presence import Presence
from kvbm.control.socket import Controller
from kvbm.core.catalog import Catalog
from kvbm.core.keys import Key, Scope
from kvbm.engines.guard import Faults
from kvbm.engines.trtllm import compat
from kvbm.events import launch
from kvbm.events.zmq_publisher import ZmqPublisher
from kvbm.plans import TierName
from kvbm.runtime.leader import Leader

logger = logging.getLogger("kvbm")


class Services:
    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._outlet: ZmqPublisher | None = None
        self._consolidator: launch.ConsolidatorProcess | None = None
        self._presence: Presence | None = None

    def start(
        self,
        config: Config,
        setup: compat.Setup,
        catalogs: Mapping[TierName, Catalog],
        leader: Callable[[], Leader | None],
    ) -> None:
        """The leader begins."""
        try:
            self._publish(config, setup, catalogs)
            engine = f"trtllm-{config.leader_zmq_pub_port}"
            about = {"engine": engine, "rank": 0, "model": setup.model, "kvbm": kvbm.__version__}
            controller = Controller(self._faults.engine_lock, leader, about, self._announce)
            self._presence = Presence(config, controller, engine, setup.model, setup.ranks)
        except Exception as error:
            self._faults.record("appearing", error)

    def _publish(self, config: Config, setup: compat.Setup, catalogs: Mapping[TierName, Catalog]) -> None:
        if config.kv_events_enable_consolidator == "off":
            return
        if config.trtllm_zmq_port is None:
            if config.kv_events_enable_consolidator == "on":
                logger.error(
                    "No block events: DYN_KVBM_TRTLLM_ZMQ_PORT is not set. It is the port on which TensorRT-LLM's own "
                    "events are published, for example 20081."
                )
            return
        try:
            self._outlet = ZmqPublisher(catalogs, setup.tokens_per_block)
        except zmq.ZMQError as error:
            logger.warning("No block events: %s", error)
            return
        source = f"tcp://127.0.0.1:{config.trtllm_zmq_port}"
        self._consolidator = launch.start(config, [source], kvbm=self._outlet.endpoint, count=self._faults.count)

    def _announce(self) -> bool:
        if self._outlet is not None:
            self._outlet.tell_again()
            self._outlet.pump()
        return self._outlet is not None

    def follow(self, keys: Sequence[Key], tokens: Sequence[int], first: int, end: int, scope: Scope | None) -> None:
        """Some tier may be about to have these blocks of a request."""
        if self._outlet is None or scope is None:
            return
        try:
            self._outlet.follow(keys, tokens, first, end, scope)
        except Exception as error:
            self._stop("describing blocks", error)

    def tell(self) -> None:
        """Send what has changed since the last time."""
        if self._outlet is None:
            return
        try:
            self._outlet.pump()
        except Exception as error:
            self._stop("telling of blocks", error)

    def _stop(self, where: str, error: Exception) -> None:
        self._faults.record(where, error)
        logger.error("No more events of KVBM's blocks: routers will not learn of new ones. The engine's own go on.")
        outlet, self._outlet = self._outlet, None
        if outlet is not None:
            outlet.close()

    def close(self) -> None:
        for part in (self._presence, self._consolidator, self._outlet):
            if part is not None:
                part.close()
        self._outlet = None
