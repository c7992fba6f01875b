"""The rate of a source is that of all reads from it that are under way at a time."""

from __future__ import annotations

import pytest

from kvbm.tiers.host.shared import SharedMemory
from kvbm.tiers.peers import sources
from kvbm.tiers.peers.finder import Source

GB = 1 << 30


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(sources, "time", clock)
    return clock


@pytest.fixture
def table():
    memory = SharedMemory.make(sources.TABLE_BYTES)
    table = sources.SourceTable(memory.file)
    table.enter(3, Source("unix:/somewhere"))
    yield table
    table.close()
    memory.close()


def rate(table):
    return table.counts(3)[sources.RATE]


def test_reads_side_by_side_are_measured_together(table, clock):
    for _ in range(8):
        table.begin_read(3)
    clock.now += 0.8
    for _ in range(8):
        assert rate(table) == 0  # the others have brought bytes as well
        table.end_read(3, GB)
    assert rate(table) == pytest.approx(8 * GB / 0.8, rel=1e-6)


def test_time_without_reads_does_not_count(table, clock):
    for _ in range(3):
        table.begin_read(3)
        clock.now += 0.5
        table.end_read(3, GB)
        clock.now += 60
    assert rate(table) == pytest.approx(2 * GB, rel=1e-6)


def test_reads_that_never_pause_are_measured_every_second(table, clock):
    table.begin_read(3)
    for _ in range(12):
        table.begin_read(3)
        clock.now += 0.3
        table.end_read(3, GB)
    assert rate(table) == pytest.approx(GB / 0.3, rel=0.01)


def test_a_read_that_brought_nothing_is_not_measured(table, clock):
    for size, seconds in ((GB, 1), (0, 1), (GB, 0.5)):
        table.begin_read(3)
        clock.now += seconds
        table.end_read(3, size)
    assert rate(table) == pytest.approx((1 + 0.3 * (2 - 1)) * GB, rel=1e-6)
