"""Turns of the interpreter: short while something urgent is submitted, as usual afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time

import pytest

from kvbm import gil
from kvbm.gil import Submitting, begin_short_turns, end_short_turns, short_turns
from kvbm.tiers.base import Operation


def test_turns_are_as_usual_afterwards_even_after_an_error() -> None:
    usual = sys.getswitchinterval()
    with contextlib.suppress(ValueError), short_turns(), short_turns():
        assert sys.getswitchinterval() < usual
        raise ValueError("broken")
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_two_threads_may_be_inside() -> None:
    usual = sys.getswitchinterval()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with short_turns():
            inside.set()
            leave.wait(30)

    with short_turns():
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(30)
    assert sys.getswitchinterval() < usual  # the other one is still inside
    leave.set()
    thread.join()
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_another_thread_may_end_what_one_has_begun() -> None:
    usual = sys.getswitchinterval()
    begin_short_turns()
    thread = threading.Thread(target=end_short_turns)
    with short_turns():
        thread.start()
        thread.join()
        assert sys.getswitchinterval() < usual
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_turns_that_are_shorter_anyway_stay_as_they_are() -> None:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with short_turns():
            assert sys.getswitchinterval() == pytest.approx(1e-5)
        assert sys.getswitchinterval() == pytest.approx(1e-5)
    finally:
        sys.setswitchinterval(usual)


def test_calls_that_let_go_of_the_interpreter_wait_less_for_it_beside_a_busy_thread() -> None:
    sleep = ctypes.CDLL(None).usleep
    over = False
    done = 0

    def busy() -> None:
        nonlocal done
        while not over:
            sum(range(100))
            done += 1

    def calls() -> int:
        """What the other has done meanwhile: unlike time, it does not grow when other programs take the processor."""
        before = done
        for _ in range(200):
            sleep(1)
        return done - before

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        # Where other programs take both processors, the two threads hardly ever meet.
        usual = next((found for _ in range(30) if (found := calls()) > 200 * 1000), 0)
        with short_turns():
            short = min(calls() for _ in range(3))
    finally:
        over = True
        thread.join()
    if not usual:
        pytest.skip("other programs take the processors")
    assert short < usual / 3


def ends_in_another_thread(call, seconds: float = 60) -> bool:
    """Whether a call ends while this thread looks on."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def test_work_that_can_wait_waits_for_the_submission_of_a_step(monkeypatch) -> None:
    monkeypatch.setattr(gil, "_MAX_SUBMISSION_SECONDS", 600.0)
    step = Submitting()
    assert ends_in_another_thread(step.wait)  # none has begun yet
    step.begin()
    assert not ends_in_another_thread(step.wait, 0.2)
    step.wait()  # who submits does not wait for itself
    step.end()
    assert ends_in_another_thread(step.wait)


def test_a_submission_that_nobody_ends_holds_up_nobody_for_long() -> None:
    step = Submitting()
    step.begin()
    assert ends_in_another_thread(step.wait)


def test_submissions_that_follow_one_another_hold_up_nobody_for_long(monkeypatch) -> None:
    """Who looks only now and then, because the engine's thread has the interpreter, may see every one and no end."""
    monkeypatch.setattr(gil, "_MAX_SUBMISSION_SECONDS", 0.2)
    step = Submitting()
    step.begin()
    thread = threading.Thread(target=step.wait, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < until:
        step.begin()
        time.sleep(0.001)
    assert not thread.is_alive()


def test_a_transfer_that_ends_wakes_the_engine(monkeypatch) -> None:
    monkeypatch.setattr(gil, "_MAX_TURN_SECONDS", 3600.0)
    engine = threading.Thread(target=gil.give_turn, args=(True,), daemon=True)
    engine.start()
    operation = Operation("read", [1], [0], [b""], 1)
    operation.parts_left = 1
    operation.end_part([], "")
    engine.join(60)
    assert not engine.is_alive()
