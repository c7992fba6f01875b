"""The ZeroMQ channel between real processes: one leader, three workers, and what happens when one of them dies."""

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager

import pytest

from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from kvbm.plans import Copy, Hello, LoadPlan, LoadResult, Report, StepPlan, StoreResult, TierHello
from kvbm.runtime.channel import Agreement, Timing, ZmqLeader, ZmqWorker
from kvbm.runtime.leader import Leader
from tiernames import HOST

pytestmark = pytest.mark.timeout(300)

ANY = "tcp://127.0.0.1:0"
RANKS = 3
TIMING = Timing(round=0.1, beat=0.1, silence=60.0)


def serve(rank, pub_url, ack_url, count, seen):
    """A worker process: answers every plan at once; tells the test which it has seen, and why it ended."""
    faulthandler.dump_traceback_later(280, exit=True)  # whatever happens, it does not outlive the test
    hello = Hello(rank, 1000 + rank, "NHD", [TierHello(HOST, 50 + rank)])
    with closing(ZmqWorker(hello, pub_url, ack_url, timeout=120, timing=TIMING)) as worker:
        agreement = worker.wait()
        worker.confirm()
        loads = []
        while len(loads) < count and worker.lost is None:
            for plan in worker.receive(timeout=0.5):
                loads += [load.id for load in plan.loads]
                stores = [StoreResult(store.id) for store in plan.stores]
                worker.send(Report(rank, [LoadResult(load.id) for load in plan.loads], stores))
        seen.send((agreement.slots, loads, worker.lost))
        seen.recv()  # until the test has heard everything: closing does not wait for what is on its way


def until(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def silent(leader, rank):
    """Whether the leader has given a rank up, which it last heard of so long ago."""
    with leader._lock:
        leader._by_rank[rank].seen -= TIMING.silence
    return leader.lost_ranks()


class Workers:
    def __init__(self, leader, count):
        self._context = multiprocessing.get_context("spawn")
        self._arguments = (leader.pub_url, leader.ack_url, count)
        self.processes = {}
        self._seen = {}

    def start(self, *ranks):
        for rank in ranks:
            self._seen[rank], child = self._context.Pipe()
            process = self._context.Process(target=serve, args=(rank, *self._arguments, child), daemon=True)
            process.start()
            child.close()
            self.processes[rank] = process

    def kill(self, rank, how=signal.SIGKILL):
        os.kill(self.processes[rank].pid, how)

    def outcome(self, rank):
        assert self._seen[rank].poll(60), f"rank {rank} has not ended"
        return self._seen[rank].recv()

    def close(self):
        for rank, process in self.processes.items():
            self._seen[rank].close()  # whoever waits for the test reads an end of file
            if process.is_alive():
                process.kill()
            process.join(20)
            assert process.exitcode is not None
            process.close()


@contextmanager
def started(ranks=RANKS, count=1_000_000, late=()):
    with ExitStack() as stack:
        leader = stack.enter_context(closing(ZmqLeader(ranks, ANY, ANY, timeout=120, timing=TIMING)))
        workers = stack.enter_context(closing(Workers(leader, count)))
        workers.start(*(rank for rank in range(ranks) if rank not in late))
        if late:
            until(lambda: len(leader.hellos) == ranks - len(late))
            assert not leader.ready
            workers.start(*late)
        assert leader.wait() == Agreement({HOST: 50}, "NHD", [1000 + rank for rank in range(ranks)])
        yield leader, workers


def plan(number):
    return StepPlan([LoadPlan(number, f"request {number}", [Copy(HOST, [1, 2, 3], [number, 5, 6])], False)])


def exchange(leader, count, ahead=256, first=1):
    """Send plans, a bounded number ahead of their answers; returns the answers by rank."""
    answers = {rank: [] for rank in range(leader.ranks)}
    number, end = first, time.monotonic() + 120
    while min(map(len, answers.values())) < count:
        assert time.monotonic() < end, {rank: len(got) for rank, got in answers.items()}
        if number < first + count and number - first - min(map(len, answers.values())) < ahead:
            leader.send(plan(number))
            number += 1
        else:
            time.sleep(0.0005)
        for report in leader.receive():
            answers[report.rank] += [load.id for load in report.loads]
    return answers


def test_two_thousand_plans_and_reports_in_order():
    count = 2000
    with started(count=count) as (leader, workers):
        answers = exchange(leader, count)
        expected = list(range(1, count + 1))
        for rank in range(RANKS):
            assert answers[rank] == expected
            assert workers.outcome(rank) == ({HOST: 50}, expected, None)
        assert leader.lost_ranks() == {}
        assert leader.malformed == 0


def test_a_worker_may_come_late():
    with started(count=10, late=(1,)) as (leader, workers):
        assert exchange(leader, 10)[1] == list(range(1, 11))
        assert workers.outcome(1)[1] == list(range(1, 11))


def test_a_killed_worker_is_noticed_and_what_it_owed_has_failed():
    pool = Pool(50)
    pool.commit(pool.reserve([b"a", b"b"]))
    leader = Leader(BlockManager({HOST: pool}), RANKS)
    with started() as (channel, workers):
        exchange(channel, 20)
        workers.kill(1)
        load = leader.onboard(leader.manager.lookup([b"a", b"b"]), "r", [0, 1], in_step=False)
        store = leader.offload([b"c"], [2])
        channel.send(StepPlan([load], [store]))
        workers.processes[1].join(60)

        def is_over():
            leader.apply(channel.receive())
            for rank in silent(channel, 1):
                leader.fail_rank(rank)
            return not leader.busy

        until(is_over)
        assert channel.lost_ranks().keys() == {1}
        assert "silent" in channel.lost_ranks()[1]
        assert leader.counts.failed_load_blocks == 2
        assert leader.counts.failed_store_blocks == 1
        assert leader.manager.lookup([b"a"]).blocks == 0
        assert (pool.pinned, pool.writing) == (0, 0)


def test_a_worker_that_stops_for_a_moment_misses_nothing():
    with started() as (leader, workers):
        exchange(leader, 50)
        workers.kill(2, signal.SIGSTOP)
        for number in range(51, 151):
            leader.send(plan(number))
        time.sleep(0.5)
        workers.kill(2, signal.SIGCONT)
        answers = {rank: [] for rank in range(RANKS)}
        end = time.monotonic() + 120
        while min(map(len, answers.values())) < 100 and time.monotonic() < end:
            for report in leader.receive():
                answers[report.rank] += [load.id for load in report.loads]
            time.sleep(0.01)
        assert answers == {rank: list(range(51, 151)) for rank in range(RANKS)}
        assert leader.lost_ranks() == {}


def test_a_worker_that_wakes_up_too_late_learns_that_it_was_given_up():
    with started() as (leader, workers):
        exchange(leader, 20)
        workers.kill(0, signal.SIGSTOP)
        until(lambda: silent(leader, 0))
        workers.kill(0, signal.SIGCONT)
        _, _, lost = workers.outcome(0)
        assert lost == "the leader has given this rank up"
        assert leader.lost_ranks().keys() == {0}


@pytest.mark.parametrize(
    "unclosed",
    [
        "ZmqLeader(2, 'ipc://{there}/pub', 'ipc://{there}/ack')",
        "ZmqWorker(Hello(0, 1, 'a', []), 'ipc://{there}/pub', 'ipc://{there}/ack')",
    ],
)
def test_a_process_that_forgets_to_close_still_ends(unclosed, tmp_path):
    end = unclosed.format(there=tmp_path)
    code = f"import time; from kvbm.plans import *; from kvbm.runtime.channel import *; end = {end}; time.sleep(0.3)"
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=120, capture_output=True, text=True, check=False, env=path
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
