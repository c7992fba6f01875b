"""Starts the consolidator beside an engine, and ends it with the engine."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from kvbm.config import Config

logger = logging.getLogger("kvbm")

# A terminal or a supervisor ends the engine with all its processes.
_ASKED_TO_END = (0, -signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP)


def output_endpoint(config: Config, rank: int = 0) -> str:
    """The endpoint of a data-parallel rank's consolidator: on loopback, because its subscribers run on this machine."""
    return f"tcp://127.0.0.1:{config.consolidator_port + rank}"


class ConsolidatorProcess:
    """``count``: called if the process ends unexpectedly."""

    def __init__(self, command: Sequence[str], output: str, count: Callable[[str], None] | None) -> None:
        self._output, self._count, self._closing = output, count, False
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=True)
        threading.Thread(target=self._watch, name="kvbm-consolidator-watch", daemon=True).start()

    def _watch(self) -> None:
        status = self._process.wait()
        if self._closing or status in _ASKED_TO_END:
            return
        logger.error(
            "the consolidator of KV events has ended (status %d): no more events of this engine on %s. The engine goes "
            "on; restart it to have events again.", status, self._output,
        )  # fmt: skip
        if self._count is not None:
            self._count("the consolidator of KV events has ended")

    def close(self) -> None:
        self._closing = True
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)


def start(
    config: Config,
    engine: Sequence[str],
    rank: int = 0,
    kvbm: str | None = None,
    count: Callable[[str], None] | None = None,
) -> ConsolidatorProcess | None:
    """``engine``: endpoints of the engine's events; ``kvbm``: endpoint of KVBM's own events, if it is another one.
    None, with a log line, when the process cannot be started: the engine runs without it."""
    output = output_endpoint(config, rank)
    command = [sys.executable, "-m", "kvbm.events.consolidator", "--parent", str(os.getpid())]
    command += ["--output", output, "--mode", config.kv_events_consolidator_mode]
    for endpoint in engine:
        command += ["--engine", endpoint]
    if kvbm is not None:
        command += ["--kvbm", kvbm]
    try:
        return ConsolidatorProcess(command, output, count)
    except OSError as error:
        logger.warning("no consolidated events: cannot start the consolidator's process (%s)", error)
        return None
