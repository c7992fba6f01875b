"""Starts the consolidator beside an engine, and ends it with it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence

from kvbm.config import Config

logger = logging.getLogger("kvbm")


def output_endpoint(config: Config, rank: int = 0) -> str:
    """Where the consolidator of a data-parallel rank publishes: on this machine only, as all who need it are here."""
    return f"tcp://127.0.0.1:{config.consolidator_port + rank}"


class ConsolidatorProcess:
    def __init__(self, config: Config, engine: Sequence[str], rank: int = 0, kvbm: str | None = None) -> None:
        """``engine``: where the engine publishes; ``kvbm``: where our own events come from, if not from there too."""
        command = [sys.executable, "-m", "kvbm.events.consolidator", "--parent", str(os.getpid())]
        command += ["--output", output_endpoint(config, rank), "--mode", config.kv_events_consolidator_mode]
        for endpoint in engine:
            command += ["--engine", endpoint]
        if kvbm is not None:
            command += ["--kvbm", kvbm]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=True)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)


def start(config: Config, engine: Sequence[str], rank: int = 0, kvbm: str | None = None) -> ConsolidatorProcess | None:
    """None, with a sentence in the log, when it cannot be started: no engine ends for that."""
    try:
        return ConsolidatorProcess(config, engine, rank, kvbm)
    except OSError as error:
        logger.warning("no consolidated events: their process cannot be started (%s)", error)
        return None
