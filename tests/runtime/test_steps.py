"""Times of vLLM's steps, told to a cost model only where they mean something."""

from types import SimpleNamespace

import pytest

from kvbm.engines.vllm.steps import work_of
from kvbm.runtime.steps import StepTimes, Work

DECODE = Work(0, 0, decodes=True, waits=False)
PROMPT = Work(512, 1024, decodes=False, waits=False)
NOTHING = Work(0, 0, decodes=False, waits=False)


class Listener:
    """Stands in for the cost model: keeps what it is told."""

    def __init__(self):
        self.heard = []

    def observe_step(self, seconds):
        self.heard.append(("step", pytest.approx(seconds)))

    def observe_prefill(self, tokens, seconds, computed):
        self.heard.append((tokens, pytest.approx(seconds), computed))


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
def steps(listener):
    return StepTimes(listener)


def test_a_step_lasts_from_its_schedule_to_its_results(steps, listener):
    for work, began, ended in ((DECODE, 10.0, 10.5), (PROMPT, 20.0, 22.0), (DECODE, 22.1, 22.2)):
        steps.scheduled(work, began)
        steps.ended(ended)
    assert listener.heard == [("step", 0.5), (512, 2.0, 1024), ("step", 0.1)]


def test_of_steps_that_overlap_each_gets_its_own_share(steps, listener):
    """The second is scheduled while the first runs, and cannot begin before it ends."""
    steps.scheduled(PROMPT, 1.0)
    steps.scheduled(DECODE, 1.1)
    steps.ended(3.0)
    steps.scheduled(DECODE, 3.1)
    steps.ended(3.25)
    steps.ended(3.5)
    assert listener.heard == [(512, 2.0, 1024), ("step", 0.25), ("step", 0.25)]


def test_steps_that_say_nothing_are_left_out_and_still_counted(steps, listener):
    waiting = PROMPT._replace(waits=True)
    for at, work in enumerate((waiting, NOTHING, DECODE._replace(waits=True), DECODE)):
        steps.scheduled(work, float(at))
    for at in (10.0, 11.0, 12.0, 14.0):
        steps.ended(at)
    assert listener.heard == [("step", 2.0)]


def test_results_without_a_step_and_steps_without_results_do_no_harm(steps, listener):
    steps.ended(1.0)
    for at in range(1000):
        steps.scheduled(DECODE, float(at))
    assert len(steps._under_way) <= 64
    steps.ended(1001.0)
    assert len(listener.heard) == 1


def output(new=(), cached=()):
    """As vLLM's scheduler makes it: (name, computed tokens, scheduled tokens) of each request."""
    scheduled = {name: count for name, _, count in (*new, *cached)}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=done) for name, done, _ in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in cached], num_computed_tokens=[done for _, done, _ in cached]
        ),
    )


@pytest.mark.parametrize(
    ("step", "decode_tokens", "work"),
    [
        (output(), 1, NOTHING),
        (output(cached=[("a", 100, 1), ("b", 7, 1)]), 1, DECODE),
        (output(cached=[("a", 100, 4), ("b", 7, 3)]), 4, DECODE),  # with guesses to check
        (output(new=[("a", 0, 100)], cached=[("b", 50, 1)]), 1, Work(100, 0, False, False)),
        (output(new=[("a", 0, 300)], cached=[("b", 400, 100)]), 1, Work(400, 100, False, False)),
    ],
)
def test_what_a_step_computes_is_read_from_what_was_scheduled(step, decode_tokens, work):
    assert work_of(step, decode_tokens, waits=False) == work
    assert work_of(step, decode_tokens, waits=True) == work._replace(waits=True)
