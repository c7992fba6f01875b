"""Everything through which an engine is reached from outside: control socket, Dynamo endpoint, discovery cards."""

from __future__ import annotations

import logging
import os
import socket

import msgspec

import kvbm
from kvbm.config import Config
from kvbm.control import discovery, dynamo
from kvbm.control.socket import Controller, ControlServer, open_control

logger = logging.getLogger("kvbm")


class Presence:
    """Lives from the leader's start until :meth:`close`. Nothing here raises into an engine.

    ``engine`` is the engine's unique name in the deployment; ``metrics`` is the URL of its metrics, if it has any.
    """

    def __init__(
        self, config: Config, controller: Controller, engine: str, model: str, ranks: int, metrics: str = ""
    ) -> None:
        self.control: ControlServer | None = open_control(controller, engine) if config.control else None
        self._registration: discovery.Registration | None = None
        self._endpoint: dynamo.DynamoEndpoint | None = None
        if not config.runtime_enabled:
            return
        address = self.control.address if self.control is not None else ""
        place = discovery.registry(config)
        if place is None:
            logger.warning(
                "KVBM is not registered in service discovery: DYN_DISCOVERY_BACKEND=%s, expected etcd or file",
                config.discovery_backend,
            )
        else:
            worker = discovery.Card(
                role="worker", engine=engine, host=socket.gethostname(), pid=os.getpid(), version=kvbm.__version__
            )
            cards = [msgspec.structs.replace(worker, rank=rank) for rank in range(ranks)]
            more = {"role": "leader", "model": model, "control": address, "metrics": metrics}
            cards.append(msgspec.structs.replace(worker, **more))
            self._registration = discovery.Registration(place, cards, config.dynamo_namespace)
        if self.control is None or not config.control_dynamo:
            return
        if dynamo.is_installed():
            self._endpoint = dynamo.DynamoEndpoint(address, config.dynamo_namespace)
        else:
            logger.info("Control through Dynamo is unavailable: the package ai-dynamo-runtime is not installed")

    def close(self) -> None:
        for part in (self._endpoint, self._registration, self.control):
            if part is not None:
                part.close()
        self.control = None
