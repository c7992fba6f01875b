"""The record of decisions: complete, private, bounded, and never in the way."""

from __future__ import annotations

import hashlib
import json
import logging
import stat
import threading
import time

import pytest

from kvbm.config import load
from kvbm.core.clock import OperationClock
from kvbm.observe import record as module
from kvbm.observe.observer import settings_given
from kvbm.observe.record import Record, hash_ids

MIB = 1 << 20


def lines(record):
    return [json.loads(line) for line in record.path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["lru", "session"])
def test_a_record_names_the_policy_that_kvbm_has_chosen(name):
    chosen = settings_given(load(environ={}, files=()).with_policy(name))
    assert chosen == {"KVBM_HOST_POLICY": name, "KVBM_DISK_POLICY": name}


def test_a_record_has_a_start_what_happened_and_an_end(tmp_path):
    record = Record(tmp_path / "records", MIB, OperationClock(lambda: 2.5), block_size=16)
    record.add("request", [b"\x01" * 32, b"\xff" * 32], began=time.time(), input_length=33)
    record.add("load", seconds=0.5)
    record.close()
    start, request, load, end = lines(record)
    assert (start["event"], start["block_size"]) == ("start", 16)
    assert request["hash_ids"] == [0x0101010101010, 0xFFFFFFFFFFFFF]
    assert 2500 <= request["timestamp"] < 12_500
    assert "began" not in request
    assert start["at"] == request["at"] == load["at"] == 2500.0
    assert end == {"event": "end", "why": "stopped", "dropped": 0}


def test_a_record_is_nobody_elses_business(tmp_path):
    record = Record(tmp_path / "records", MIB, OperationClock())
    record.close()
    assert stat.S_IMODE(record.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(record.path.parent.stat().st_mode) == 0o700


def test_a_file_that_is_there_is_never_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(module.time, "strftime", lambda _: "now")
    first = Record(tmp_path, MIB, OperationClock())
    with pytest.raises(FileExistsError):
        Record(tmp_path, MIB, OperationClock())
    first.close()


def test_ids_are_exact_in_any_json_reader():
    keys = [hashlib.sha256(bytes([i])).digest() for i in range(200)]
    ids = hash_ids(keys)
    assert len(set(ids)) == 200
    assert all(0 <= number < 2**53 and float(number) == number for number in ids)
    assert ids == hash_ids(keys)
    assert hash_ids([]) == []


def test_a_full_record_ends_and_the_engine_goes_on(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="kvbm"):
        record = Record(tmp_path, 2000, OperationClock())
        for i in range(100):
            record.add("load", filler="x" * 100, number=i)
        record.close()
    assert record.path.stat().st_size < 2100
    *_, last, end = lines(record)
    assert (last["event"], end["why"]) == ("load", "full")
    assert "KVBM_RECORD_MAX_MB" in caplog.text
    record.add("load")  # no harm


def test_a_writer_that_cannot_keep_up_costs_lines_and_no_time(tmp_path, caplog, monkeypatch):
    gate = threading.Event()
    encode = module._encode

    def stuck(line):
        gate.wait(600)
        return encode(line)

    monkeypatch.setattr(module, "_encode", stuck)
    with caplog.at_level(logging.WARNING, logger="kvbm"):
        record = Record(tmp_path, 100 * MIB, OperationClock())
        began = time.perf_counter()
        for _ in range(module.QUEUE + 3000):
            record.add("load", seconds=0.1)
        took = time.perf_counter() - began
    assert took < 30  # it has not waited for the writer
    assert 2998 <= record.dropped <= 3001  # the writer has taken one or two
    assert caplog.text.count("cannot keep up") == 3  # at 1, 1025 and 2049
    gate.set()
    record.close()
    assert lines(record)[-1]["dropped"] == record.dropped


def test_a_disk_that_fails_costs_the_record_and_nothing_else(tmp_path, caplog):
    record = Record(tmp_path, MIB, OperationClock())
    with caplog.at_level(logging.WARNING, logger="kvbm"):
        record._file.raw.close()
        for _ in range(2000):
            record.add("load", filler="x" * 200)
        record.close()
        record.add("load")
    assert "ends here" in caplog.text


def test_a_folder_that_cannot_be_made_is_an_error_that_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Record(tmp_path / "file" / "records", MIB, OperationClock())
