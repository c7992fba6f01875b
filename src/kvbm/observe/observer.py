"""The observers of one engine's KVBM: the request log, the record, the metrics port and the log line.

The engine's adapter makes an :class:`Observer`, gives its ``log`` to the leader, reports requests to it, and calls
:meth:`Observer.start` at the leader's start and :meth:`Observer.close` at its end. Nothing here raises into an engine:
if a part is unavailable, the log says so and the engine runs without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kvbm.config import DEFAULT, SETTINGS, Config
from kvbm.core.clock import OperationClock
from kvbm.core.cost import CostModel, Terms
from kvbm.observe.logline import HitRateLine
from kvbm.observe.record import Record
from kvbm.observe.requests import RequestLog
from kvbm.observe.server import Server, open_server
from kvbm.observe.snapshot import Identity
from kvbm.observe.source import LeaderSource
from kvbm.runtime.leader import Leader

logger = logging.getLogger("kvbm")


class Observer:
    """``failures``: reason -> count, maintained by the engine's adapter."""

    def __init__(self, config: Config, failures: Mapping[str, int]) -> None:
        self.log = RequestLog(config.cache_stats_max_requests)
        self.source: LeaderSource | None = None
        self.server: Server | None = None
        self._config = config
        self._failures = failures
        self._record: Record | None = None
        self._line: HitRateLine | None = None

    def start(
        self, identity: Identity, leader: Callable[[], Leader | None], cost: CostModel, who: str, replica: int = 0
    ) -> None:
        """``who`` names the engine in a shared log; ``replica`` numbers engines that share their settings."""
        config = self._config
        self.source = LeaderSource(identity, leader, self.log, cost, self._failures)
        state = self.source.snapshot()
        if config.enable_record and (begun := leader()) is not None:
            self._open_record(identity, {tier.tier: tier.slots for tier in state.tiers}, cost.terms, begun.clock)
        tiers = [tier.tier for tier in state.tiers]
        self._line = HitRateLine(who, tiers, self.log.hit_rates, config.cache_stats_log_interval_secs)
        if config.metrics:
            self.server = open_server(self.source, config.metrics_host, config.metrics_port + replica)
            if self.server is not None:
                logger.info("metrics are at %s/metrics, the web page at %s", self.server.url, self.server.url)

    def _open_record(self, identity: Identity, slots: Mapping[str, int], terms: Terms, clock: OperationClock) -> None:
        try:
            self._record = self.log.record = Record(
                self._config.record_dir,
                self._config.record_max_mb << 20,
                clock,
                kvbm=identity.kvbm,
                model=identity.model,
                ranks=identity.ranks,
                block_size=identity.block_tokens,
                block_bytes=identity.block_bytes,
                engine_blocks=identity.engine_blocks,
                slots=slots,
                terms=terms,
                settings=identity.settings,
            )
            logger.info("decisions are recorded in %s", self._record.path)
        except OSError as error:
            logger.warning(
                "recording is off: cannot write to KVBM_RECORD_DIR=%s (%s). Choose another directory.",
                self._config.record_dir, error.strerror or error,
            )  # fmt: skip

    def close(self) -> None:
        for part in (self.server, self._line, self._record):
            if part is not None:
                part.close()
        self.server = self._line = self._record = None


def settings_given(config: Config) -> dict[str, str]:
    """The settings that are not at their default, by variable, as text; secrets are hidden. Those that the user left to
    KVBM have the value that it chose."""
    rows = (row for row in SETTINGS if not row.retired)
    given = (row for row in rows if config.sources[row.key] != DEFAULT or getattr(config, row.key) != row.default)
    return {row.env: row.show(getattr(config, row.key)) for row in given}
