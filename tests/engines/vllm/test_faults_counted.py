"""What went wrong is counted and said, and takes a bounded amount of memory and log."""

from __future__ import annotations

import logging

from kvbm.engines.guard import MAX_KINDS, OTHERS, Faults


def test_a_reason_is_said_once_and_counted_every_time(caplog):
    faults = Faults()
    for _ in range(3):
        faults.note("rank 0: disk load: EIO", 2)
    assert faults.counts == {"rank 0: disk load: EIO": 6}
    assert len(caplog.records) == 1


def test_reasons_that_never_repeat_do_not_add_up_without_end(caplog):
    faults = Faults()
    with caplog.at_level(logging.WARNING):
        for number in range(10 * MAX_KINDS):
            faults.note(f"rank 0: load: RuntimeError: {number} bytes are missing", 1)
    assert sum(faults.counts.values()) == 10 * MAX_KINDS
    assert len(faults.counts) == len(caplog.records) == MAX_KINDS + 1
    assert faults.counts[OTHERS] == 9 * MAX_KINDS
