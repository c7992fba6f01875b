"""Who is asked to come again: as long as that is worth it, and no longer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from kvbm.engines.vllm import deferral
from kvbm.engines.vllm.deferral import Deferrals
from kvbm.engines.vllm.queue import QueuedFetches
from kvbm.engines.vllm.request import RequestState
from kvbm.plans import Copy, LoadPlan
from tiernames import DISK, HOST

COMPUTING = 3.0  # seconds for the rest of a prompt
SILENCE = 0.15  # after which a tier that delivers nothing is given up


class Here:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(deferral, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.manager = BlockManager({HOST: Pool(8), DISK: Pool(8)})
        # A block takes as long as a tenth of a step.
        cost = SimpleNamespace(
            compute_seconds=lambda computed, tokens: COMPUTING,
            load_seconds=lambda tier, size: size / 10,
            patience_seconds=lambda tier, size: SILENCE,
            step_seconds=1.0,
        )
        self.waits = Deferrals(self.manager, cost, block_size=4, block_bytes=1)
        self.state = RequestState(SimpleNamespace(request_id="r"))

    def for_block(self, later=0.0):
        """Whether somebody who finds "a", and "b" just being written, waits."""
        self.now += later
        found = self.manager.lookup([b"a", b"b"])
        assert (found.blocks, found.pending) == (1, True)
        return self.waits.for_block(self.state, found, tokens=100)

    def for_room(self, blocks, ahead, later=0.0, in_step=True):
        self.now += later
        loads = [LoadPlan(1, "somebody", [Copy(HOST, [1] * ahead, [1] * ahead)], in_step)] if ahead else []
        return self.waits.for_room(self.state, blocks, loads)


@pytest.fixture
def here(monkeypatch):
    here = Here(monkeypatch)
    host = here.manager.catalogs[HOST]
    host.commit(host.reserve([b"a"]))
    return here


def load_from_disk(here, key):
    """Another request's load of this block has begun."""
    disk = here.manager.catalogs[DISK]
    disk.commit(disk.reserve([key]))
    return here.manager.load(here.manager.lookup([key]), "another", [7], in_step=False, after=[])


def test_a_block_that_is_being_written_is_worth_a_short_wait_from_the_first_time_on(here):
    here.manager.store([b"b"], [7])
    assert here.for_block()
    assert here.for_block(later=0.2)
    assert not here.for_block(later=0.1)


def test_a_block_that_comes_up_from_disk_is_worth_as_long_a_wait_as_computing(here):
    load_from_disk(here, b"b")
    assert here.for_block()
    assert here.for_block(later=COMPUTING - 0.1)
    assert not here.for_block(later=0.2)


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_fetch_is_waited_for_no_longer_than_it_should_take_nor_than_computing_takes(here, monkeypatch, is_slow):
    monkeypatch.setattr(here.manager.catalogs[DISK], "is_remote", True)
    here.manager.remote[DISK] = here.manager.catalogs[DISK]
    disk = here.manager.catalogs[DISK]
    disk.commit(disk.reserve([b"b"]))
    (fetch,) = here.manager.fetch(here.manager.lookup([b"a", b"b"]), 8)
    if is_slow:
        here.waits._cost.patience_seconds = lambda tier, size: 2 * COMPUTING
    longest = COMPUTING if is_slow else SILENCE
    assert here.for_block()
    assert here.for_block(later=longest - 0.1)
    assert not here.for_block(later=0.11)
    assert here.waits.ends_at(here.manager.lookup([b"a", b"b"])), "it would be fetched a second time"
    here.manager.finish_fetch(fetch.id, bad=[0])
    assert not here.waits.ends_at(here.manager.lookup([b"a", b"b"]))


def test_what_is_awaited_need_not_be_the_next_block(here):
    """Of several groups one may lack something that lies before the end of what all have."""
    load_from_disk(here, b"of a group")
    here.manager.store([b"b"], [8])
    found = here.manager.lookup([b"a", b"b"])._replace(awaited=b"of a group")
    assert here.waits.for_block(here.state, found, tokens=100)
    here.now += COMPUTING - 0.1
    assert here.waits.for_block(here.state, found, tokens=100)


def test_a_disk_that_does_not_answer_is_not_waited_for(here):
    load_from_disk(here, b"b")
    here.manager.suspended.add(DISK)
    assert not here.for_block()


def test_a_block_of_a_late_read_is_not_waited_for_when_its_tier_lists_it_no_more(here):
    """As a remote tier does that is suspended: the block looks like one of a store then, which is worth a wait."""
    load_from_disk(here, b"b")
    here.manager.suspended.add(DISK)
    here.manager.catalogs[DISK].drop([b"b"])
    assert not here.for_block()


def test_loads_that_take_no_longer_than_a_step_together_share_it(here):
    assert not here.for_room(99, ahead=0)
    assert not here.for_room(3, ahead=7)
    assert here.for_room(4, ahead=7)


def test_loads_outside_of_the_step_put_nobody_off(here):
    assert not here.for_room(9, ahead=9, in_step=False)


def test_somebody_lets_others_pass_for_a_second_and_no_longer(here):
    assert here.for_room(9, ahead=9)
    assert here.for_room(9, ahead=9, later=0.9)
    assert not here.for_room(9, ahead=9, later=0.2)
    assert here.state.put_off == 9  # and is then loaded outside of the steps


def test_once_there_was_room_somebody_may_be_put_off_again(here):
    assert here.for_room(9, ahead=9)
    assert not here.for_room(9, ahead=0, later=5.0)
    assert here.for_room(9, ahead=9)


def test_blocks_of_a_deferred_request_are_fetched_ahead_when_vllm_does_not_ask_again():
    """It asks again in the next step, unless another request has taken the seat."""
    looked = []

    class Queue(QueuedFetches):
        def _look(self, state, room):
            looked.append(state)
            state.fetched = 1

    queue = Queue(SimpleNamespace(fetches=SimpleNamespace(max_blocks=8)), None, 4, None, None)
    state = RequestState(SimpleNamespace(request_id="r"))
    for _ in range(2):
        state.deferred = True  # vLLM has asked in this step
        queue.fetch([state])
    assert not looked
    queue.fetch([state])
    queue.fetch([state])
    assert looked == [state]
