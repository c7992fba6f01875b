"""The line with the hit rates: said when they have changed, and not otherwise."""

from __future__ import annotations

import logging
import time

import pytest

from kvbm.observe.logline import HitRateLine
from kvbm.observe.snapshot import HitRates


@pytest.fixture
def line():
    rates = [HitRates()]
    line = HitRateLine("engine 7", ["host", "disk"], lambda: rates[0], 1000)
    yield line, rates
    line.close()


def test_the_rates_of_every_tier_are_said_with_what_they_are_of(line, caplog):
    line, rates = line
    with caplog.at_level(logging.INFO, logger="kvbm"):
        rates[0] = HitRates(requests=3, blocks=40, hits={"host": 10})
        line.say()
    (said,) = caplog.messages
    assert said == "engine 7: blocks found, last 3 requests: host 25.0% (10/40), disk 0.0% (0/40)"


def test_nothing_is_said_twice(line, caplog):
    line, rates = line
    with caplog.at_level(logging.INFO, logger="kvbm"):
        line.say()
        assert not caplog.messages
        for blocks in (10, 10, 20):
            rates[0] = HitRates(requests=1, blocks=blocks)
            line.say()
            line.say()
    assert len(caplog.messages) == 2


def test_it_speaks_by_itself_and_ends(caplog):
    with caplog.at_level(logging.INFO, logger="kvbm"):
        line = HitRateLine("engine", ["host"], lambda: HitRates(requests=1, blocks=2), 0.01)
        deadline = time.monotonic() + 60
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)
        line.close()
    assert caplog.messages
    assert not line._thread.is_alive()
