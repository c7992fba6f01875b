"""Logs the hit rates every few seconds if they have changed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvbm.observe.snapshot import HitRates

logger = logging.getLogger("kvbm")


class HitRateLine:
    """``tiers``: the tiers in the line. ``who``: the engine's name in a shared log."""

    def __init__(self, who: str, tiers: list[str], read: Callable[[], HitRates], interval: float) -> None:
        self._who = who
        self._tiers = tiers
        self._read = read
        self._interval = interval
        self._said = HitRates()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbm-hit-rates", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.say()

    def say(self) -> None:
        rates = self._read()
        if rates == self._said:
            return
        self._said = rates
        parts = (f"{tier} {rates.rate(tier):.1%} ({rates.hits.get(tier, 0)}/{rates.blocks})" for tier in self._tiers)
        logger.info("%s: blocks found, last %d requests: %s", self._who, rates.requests, ", ".join(parts))
