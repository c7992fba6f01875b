"""The end of an engine with a disk tier: what is on its way to disk gets there, unless the disk takes too long.

The first part runs vLLM's scheduler over a model made of clockwork (see clockwork.py), the second a real vLLM.
"""

from __future__ import annotations

import logging
import threading

import pytest
from engines import do, generate, numbers, prompt

from kvbm.runtime import flush
from kvbm.tiers.disk.file import DiskFile, FileIO
from tiernames import DISK

pytestmark = pytest.mark.engine

PROMPT = numbers(1, 42)  # ten blocks and a bit
BLOCKS = 10
ORDERS = {"scheduler first": False, "workers first": True}


@pytest.fixture
def make_engine(make_clockwork, tmp_path):
    disk = {
        "disk_cache_override_num_blocks": 200,
        "disk_cache_dir": str(tmp_path),
        "disable_disk_offload_filter": True,
    }
    return lambda kvbm=None, **options: make_clockwork({**disk, **(kvbm or {})}, heir=True, **options)


@pytest.fixture
def said():
    """What KVBM says of lost blocks; vLLM's handlers keep its records from pytest's own."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    handler.addFilter(lambda record: "lost at exit" in record.getMessage())
    logging.getLogger("kvbm").addHandler(handler)
    yield found
    logging.getLogger("kvbm").removeHandler(handler)


@pytest.fixture
def gate(monkeypatch):
    """Holds every write to disk until it is set."""
    gate, real = threading.Event(), FileIO.write

    def write(self, *arguments):
        gate.wait()
        return real(self, *arguments)

    monkeypatch.setattr(FileIO, "write", write)
    yield gate
    gate.set()


def answer(engine, name="first", tokens=PROMPT):
    """Steps until a request has its only token, and not once more: as vllm.LLM does in one process."""
    engine.add(name, tokens, 1)
    while name not in engine.answers:
        engine.turn()


def end(engine, order):
    """Closes an engine; what it has counted until then."""
    counts = engine.counts
    engine.close(workers_first=ORDERS[order])
    return counts


def lookup_after_restart(make_engine, **options):
    engine = make_engine(**options)
    engine.add("again", PROMPT)
    engine.run()
    engine.check()
    return engine.counts.onboarded_blocks.get(DISK, 0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_last_step_has_computed_is_found_after_a_restart(ranks, order, make_engine, said):
    first = make_engine(ranks=ranks)
    answer(first)
    assert sum(first.counts.moved_blocks.values()) == 0  # no step was left to write it
    assert sum(end(first, order).moved_blocks.values()) == BLOCKS
    assert said == []
    assert lookup_after_restart(make_engine, ranks=ranks) == BLOCKS


@pytest.mark.parametrize("order", ORDERS)
def test_copies_that_have_not_ended_are_waited_for(order, make_engine, said, monkeypatch):
    """The copy to host memory begins late and so does the write: the flush waits for one and then for the other."""
    first = make_engine({"inject_faults": "slow-store,disk-slow-write:seconds=0.3"})
    with monkeypatch.context() as holding:
        holding.setattr("kvbm.testing.copier_faults._Late.done", lambda store: False)
        answer(first)
        assert first.counts.offloaded_blocks == 0
    assert sum(end(first, order).moved_blocks.values()) == BLOCKS
    assert said == []
    assert lookup_after_restart(make_engine) == BLOCKS


def test_more_than_the_queue_takes_at_once_is_flushed_in_turns(make_engine):
    first = make_engine({"max_pending_spills": 10})
    for i in range(2):
        answer(first, f"request {i}", numbers(10 + i, 42))
    counts = end(first, "workers first")
    assert (sum(counts.moved_blocks.values()), sum(counts.refused_move_blocks.values())) == (20, 0)


def test_with_the_filter_the_end_writes_what_was_found_again(make_engine, said):
    first = make_engine({"disable_disk_offload_filter": False})
    answer(first)
    first.run()
    answer(first, "found again")  # by vLLM itself
    counts = end(first, "workers first")
    assert sum(counts.moved_blocks.values()) == sum(counts.filtered_move_blocks.values()) == BLOCKS
    assert said == []


@pytest.mark.parametrize("order", ORDERS)
def test_a_disk_that_hangs_holds_up_the_end_no_longer_than_the_deadline(order, make_engine, gate, monkeypatch, said):
    monkeypatch.setattr(flush, "FLUSH_SECONDS", 0.3)
    waits, close = [], DiskFile.close
    monkeypatch.setattr(DiskFile, "close", lambda self, timeout: waits.append(timeout) or close(self, timeout))
    first = make_engine()
    answer(first)
    while not first.adapter.leader.edges[0].pending_blocks:
        first.turn()
    counts = end(first, order)
    assert waits == [1.0]
    assert said == [
        "disk tier: 10 blocks were lost at exit (10 being written): the disk did not take them within 0.3 s. The next "
        "engine computes these blocks again"
    ]
    gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("kvbm-disk"):
            thread.join(60)
    assert sum(counts.moved_blocks.values()) == 0  # the disk has written them since, and no index names them


def test_what_no_worker_can_confirm_is_told(make_engine, gate, monkeypatch, said):
    """The workers are processes of their own. vLLM has ended them by the time that the leader is closed."""
    monkeypatch.setattr("kvbm.engines.vllm.scheduler.find_local", lambda engine, rank: None)
    first = make_engine({"max_pending_spills": 4})
    answer(first)
    while not first.adapter.leader.edges[0].pending_blocks:
        first.submit()
        first.process()
    gate.set()
    assert sum(end(first, "workers first").moved_blocks.values()) == 0
    assert said == [
        "disk tier: 4 blocks were lost at exit (4 being written): the engine ended its workers before they had "
        "confirmed these blocks; since the start, blocks were passed over at least once: 6 skipped because the disk "
        "was behind (KVBM_MAX_PENDING_SPILLS). The next engine computes these blocks again"
    ]


def test_writes_that_ended_while_vllm_slept_are_heard_when_it_wakes_up_to_end(make_engine, gate, monkeypatch):
    """A write takes longer than vLLM steps on for it. vLLM asks for work once more before it ends its workers."""
    clock = type("Clock", (), {"now": 1000.0, "monotonic": lambda self: self.now})()
    monkeypatch.setattr("kvbm.engines.vllm.idle.time", clock)
    monkeypatch.setattr("kvbm.engines.vllm.idle.MAX_MOVE_STALL_SECONDS", 2.0)
    engine = make_engine()
    answer(engine)
    while not engine.adapter.leader.edges[0].pending_blocks:
        engine.turn()
    assert engine.scheduler.has_requests()
    clock.now += 2.1
    engine.run()  # gives up on the disk
    assert sum(engine.counts.moved_blocks.values()) == 0
    gate.set()
    moves = engine.ranks[0].connector._adapter._worker._moves._moves.values()
    operations = [move._writing for move in moves]
    assert all(operation.wait(60) for operation in operations)
    assert not engine.scheduler.has_requests()
    clock.now += 10
    assert engine.scheduler.has_requests()
    engine.run()
    assert sum(engine.counts.moved_blocks.values()) == BLOCKS


def test_a_disk_that_still_hangs_when_vllm_wakes_up_is_given_up_again(make_engine, gate, monkeypatch):
    """However long a step takes: vLLM was not asleep while it stepped."""
    clock = type("Clock", (), {"now": 1000.0, "monotonic": lambda self: self.now})()
    monkeypatch.setattr("kvbm.engines.vllm.idle.time", clock)
    monkeypatch.setattr("kvbm.engines.vllm.idle.MAX_MOVE_STALL_SECONDS", 2.0)
    engine = make_engine()
    answer(engine)
    while not engine.adapter.leader.edges[0].pending_blocks:
        engine.turn()
    clock.now += 10
    for _ in range(2):
        asked = 0
        while engine.scheduler.has_requests():
            clock.now += 0.9
            asked += 1
        assert asked <= 3
        clock.now += 10


# -- a real vLLM ------------------------------------------------------------------------------------------------------

PROMPTS = [prompt(70 + i, 400) for i in range(3)]  # of twelve blocks and a bit


def test_prompts_of_an_engine_that_ends_at_once_come_back_from_disk(run_scenario, tmp_path):
    """Copies and writes begin late: not one block is on disk when the last token is there."""
    kvbm = {
        "cpu_cache_override_num_blocks": 512,
        "disk_cache_override_num_blocks": 256,
        "disk_cache_dir": str(tmp_path),
        "disable_disk_offload_filter": True,
    }
    late = {**kvbm, "inject_faults": "slow-store,disk-slow-write:seconds=0.2"}
    steps = [do("hold_stores"), generate(*PROMPTS, max_tokens=1), do("state", "end"), do("mend")]
    story = run_scenario(steps, late)
    assert story["end"]["spilled"] == 0
    assert "lost at exit" not in story.output
    story = run_scenario([generate(*PROMPTS, name="again", max_tokens=1), do("state", "end")], kvbm)
    assert story["again"]["cached"] == [384, 384, 384]
    assert story["end"]["from_disk"] == 36
