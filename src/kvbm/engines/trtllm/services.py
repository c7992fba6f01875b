"""TensorRT-LLM's services: block events go through the consolidator.

TensorRT-LLM's publisher accepts no events of a connector. KVBM publishes its events on its own socket, and the
consolidator merges them with the engine's, whose port is a setting (DYN_KVBM_TRTLLM_ZMQ_PORT).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import zmq

from kvbm.config import Config
from kvbm.core.keys import Key, Scope
from kvbm.engines import services
from kvbm.engines.session import Session
from kvbm.engines.trtllm import compat
from kvbm.events import launch
from kvbm.events.zmq_publisher import ZmqPublisher

logger = logging.getLogger("kvbm")


class Services(services.Services):
    def start(self, config: Config, setup: compat.Setup, session: Session, engine_blocks: int) -> None:
        """The leader has begun."""
        hashes, who = "KVBM's own hashes", f"engine at {config.leader_pub_url}"
        session.show("tensorrt_llm", compat.release(), setup.model, engine_blocks, hashes, who)
        try:
            self._publish(config, setup, session)
            self._start_control(config, session, f"trtllm-{config.leader_zmq_pub_port}", setup.model)
        except Exception as error:
            self._faults.record("starting events and control", error)

    def _publish(self, config: Config, setup: compat.Setup, session: Session) -> None:
        if config.kv_events_enable_consolidator == "off":
            return
        if config.trtllm_zmq_port is None:
            if config.kv_events_enable_consolidator == "on":
                logger.error(
                    "No block events: DYN_KVBM_TRTLLM_ZMQ_PORT is not set. It is the port on which TensorRT-LLM's own "
                    "events are published, for example 20081."
                )
            return
        assert session.leader is not None
        try:
            self._feed = ZmqPublisher(session.leader.manager.catalogs, setup.tokens_per_block)
        except zmq.ZMQError as error:
            logger.warning("No block events: %s", error)
            return
        source = f"tcp://127.0.0.1:{config.trtllm_zmq_port}"
        self._consolidator = launch.start(config, [source], kvbm=self._feed.endpoint, count=self._faults.count)

    def _announce(self) -> bool:
        announced = super()._announce()
        self.tell()
        return announced

    def follow(self, keys: Sequence[Key], tokens: Sequence[int], first: int, end: int, scope: Scope | None) -> None:
        """Some tier may be about to have these blocks of a request."""
        if self._feed is not None and scope is not None:
            self._with_feed("describing blocks", self._feed.follow, keys, tokens, first, end, scope)

    def tell(self) -> None:
        """Send what has changed since the last time."""
        if self._feed is not None:
            self._with_feed("telling of blocks", self._feed.pump)
