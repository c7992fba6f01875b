"""Plans reach every rank and reports the leader: in order, once, or the leader knows that a rank is lost."""

import logging
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from kvbm.config import load
from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from kvbm.plans import (
    Copy,
    Hello,
    LoadPlan,
    LoadResult,
    MoveResult,
    Report,
    StepPlan,
    StorePlan,
    StoreResult,
    TierHello,
    encode,
)
from kvbm.runtime import channel
from kvbm.runtime.channel import (
    Agreement,
    ChannelError,
    HandshakeTimeoutError,
    Timing,
    ZmqLeader,
    ZmqWorker,
    agree,
)
from kvbm.runtime.leader import Leader
from servers import free_port
from tiernames import DISK, HOST, OBJECT

pytestmark = pytest.mark.timeout(300)

ANY = "tcp://127.0.0.1:0"
FAST = Timing(round=0.05, progress=0.1, beat=0.04, silence=30.0)


def hello(rank, slots=100, layout="NHD", **more):
    return Hello(rank, 4096, layout, [TierHello(name, count) for name, count in {HOST: slots, **more}.items()])


def plan(number):
    """A plan that can be told from every other."""
    return StepPlan(
        [LoadPlan(number, f"request {number}", [Copy(HOST, [number], [number + 1])], False, [number])],
        [StorePlan(-number, Copy(DISK, [1, 2], [3, number]))],
        [number],
    )


def report(rank, number):
    loads, stores, spills = [LoadResult(number, [0])], [StoreResult(number, ok=False)], [MoveResult(number)]
    results = loads, stores, {"why": number}, spills, {number: (number, "digest")}, number
    assert len(results) + 1 == len(Report.__struct_fields__)  # or what is merged is not looked at as a whole
    return Report(rank, *results)


def until(condition, seconds=120.0):
    """Wait for it, but not forever."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)
    return value


def collect(receive, count, seconds=120.0):
    got = []
    until(lambda: got.extend(receive()) or len(got) >= count, seconds)
    return got


def free_url():
    return f"tcp://127.0.0.1:{free_port()}"


def meet(leader, workers, confirm=True):
    """The whole handshake, in one thread."""
    agreements = [worker.wait(60) for worker in workers]
    for worker in workers:
        if confirm:
            worker.confirm()
    if confirm:
        agreements.append(leader.wait(60))
    assert len(set(map(str, agreements))) == 1
    return agreements[0]


@pytest.fixture(autouse=True)
def nothing_left_behind():
    def sockets():
        links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
        return sum(os.path.islink(link) and os.readlink(link).startswith(("socket:", "anon_inode:")) for link in links)

    threads, before = threading.active_count(), sockets()
    yield
    until(lambda: threading.active_count() <= threads and sockets() <= before, 60)


@contextmanager
def zmq_pair(ranks, timing=FAST, confirm=True, **options):
    with ExitStack() as stack:
        leader = stack.enter_context(closing(ZmqLeader(ranks, ANY, ANY, timing=timing, **options)))
        workers = [
            stack.enter_context(closing(ZmqWorker(hello(rank), leader.pub_url, leader.ack_url, timing=timing)))
            for rank in range(ranks)
        ]
        meet(leader, workers, confirm)
        yield leader, workers


# -- the interface ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_gets_every_plan_in_order(ranks):
    with zmq_pair(ranks) as (leader, workers):
        sent = [plan(number) for number in range(1, 51)]
        for one in sent:
            leader.send(one)
        for worker in workers:
            assert collect(worker.receive, 50) == sent
            assert worker.receive() == []


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_leader_gets_the_reports_of_every_rank_in_order(ranks):
    with zmq_pair(ranks) as (leader, workers):
        for number in range(20):
            for rank, worker in enumerate(workers):
                worker.send(report(rank, number))
        got = collect(leader.receive, 20 * ranks)
        for rank in range(ranks):
            assert [one for one in got if one.rank == rank] == [report(rank, number) for number in range(20)]
        assert leader.receive() == []


def test_plans_and_reports_take_turns():
    with zmq_pair(2) as (leader, workers):
        for number in range(1, 30):
            leader.send(plan(number))
            for rank, worker in enumerate(workers):
                (got,) = collect(worker.receive, 1)
                assert got == plan(number)
                worker.send(report(rank, got.loads[0].id))
            assert {one.rank for one in collect(leader.receive, 2)} == {0, 1}


def test_nothing_to_say_is_not_sent():
    with zmq_pair(1) as (leader, (worker,)):
        leader.send(StepPlan())
        worker.send(Report(0))
        leader.send(plan(1))
        worker.send(report(0, 1))
        assert collect(worker.receive, 1) == [plan(1)]
        assert collect(leader.receive, 1) == [report(0, 1)]


def test_no_rank_is_lost_while_all_are_there():
    with zmq_pair(2) as (leader, _):
        assert leader.lost_ranks() == {}


def test_a_closed_end_takes_nothing_and_gives_nothing():
    with zmq_pair(1) as (leader, (worker,)):
        leader.send(plan(1))
        worker.send(report(0, 1))
        worker.close()
        worker.close()
        worker.send(report(0, 2))
        assert worker.receive() == []
        leader.close()
        leader.close()
        leader.send(plan(2))
        assert leader.receive() == []


def test_nobody_waits_longer_than_asked():
    with zmq_pair(1) as (leader, (worker,)):
        begun = time.monotonic()
        assert worker.receive() == []
        assert leader.receive() == []
        assert worker.receive(timeout=0.1) == []
        assert time.monotonic() - begun < 30


# -- meeting ----------------------------------------------------------------------------------------------------------


def test_the_poorest_rank_sets_the_slots():
    agreed = agree([hello(1, slots=70), hello(0, slots=90), hello(2, slots=80)])
    assert agreed == Agreement({HOST: 70}, "NHD", [4096] * 3)


def test_a_tier_that_one_rank_lacks_is_left_out(caplog):
    offers = [{HOST: 5, DISK: 9}, {HOST: 6}, {HOST: 6, DISK: 0}]
    agreed = agree(
        [Hello(rank, rank, "a", [TierHello(*tier) for tier in slots.items()]) for rank, slots in enumerate(offers)]
    )
    assert agreed == Agreement({HOST: 5}, "a", [0, 1, 2])
    assert "the disk tier is not used: ranks 1, 2" in caplog.text


def test_no_tier_in_common_is_an_error():
    with pytest.raises(ChannelError, match="DYN_KVBM_CPU_CACHE_GB"):
        agree([Hello(0, 1, "a", [TierHello(HOST, 5)]), Hello(1, 1, "a", [TierHello(DISK, 5)])])


def test_a_tier_that_is_addressed_by_key_needs_no_slots_but_every_rank(caplog):
    keyed = [Hello(rank, 1, "a", [TierHello(HOST, 5), TierHello(OBJECT, 0)]) for rank in range(2)]
    assert agree(keyed).slots == {HOST: 5, OBJECT: 0}
    assert agree([keyed[0], Hello(1, 1, "a", [TierHello(HOST, 5)])]).slots == {HOST: 5}
    assert "the object tier is not used" in caplog.text
    with pytest.raises(ChannelError, match="no cache tier has a slot"):
        agree([Hello(0, 1, "a", [TierHello(OBJECT, 0)])])


def test_leader_and_worker_agree_whoever_comes_first():
    pub, ack = free_url(), free_url()
    for leader_first in (True, False):
        with ExitStack() as stack:

            def start(kind, *args, stack=stack):
                return stack.enter_context(closing(kind(*args, pub, ack, timing=FAST)))

            if leader_first:
                leader = start(ZmqLeader, 2)
                time.sleep(0.2)
                workers = [start(ZmqWorker, hello(0)), start(ZmqWorker, hello(1, slots=7))]
            else:
                workers = [start(ZmqWorker, hello(0)), start(ZmqWorker, hello(1, slots=7))]
                time.sleep(0.2)
                leader = start(ZmqLeader, 2)
            assert meet(leader, workers) == Agreement({HOST: 7}, "NHD", [4096, 4096])
            leader.send(plan(1))
            for worker in workers:
                assert collect(worker.receive, 1) == [plan(1)]


def test_the_leader_is_not_ready_before_every_worker_has_allocated():
    with zmq_pair(2, confirm=False) as (leader, workers):
        workers[0].confirm()
        until(lambda: leader._by_rank[0].ready)
        with pytest.raises(HandshakeTimeoutError, match=r"1 of 2 workers have allocated.*rank 1"):
            leader.wait(0.01)
        assert not leader.ready
        with pytest.raises(ChannelError, match="before the workers were ready"):
            leader.send(plan(1))
        workers[1].confirm()
        leader.wait(60)
        assert leader.ready


def test_a_worker_cannot_confirm_what_was_not_agreed():
    worker = ZmqWorker(hello(0), free_url(), free_url())
    with closing(worker), pytest.raises(ChannelError, match="confirmed before"):
        worker.confirm()


def test_one_process_may_build_both_halves_side_by_side():
    """As TensorRT-LLM does on rank 0: two threads, in any order; the worker waits and the leader does not."""
    pub, ack = free_url(), free_url()
    built = {}

    def build_worker():
        built["worker"] = worker = ZmqWorker(hello(0), pub, ack, timing=FAST)
        worker.wait(60)
        worker.confirm()

    thread = threading.Thread(target=build_worker)
    thread.start()
    with closing(ZmqLeader(1, pub, ack, timing=FAST)) as leader:
        until(lambda: leader.ready)
        thread.join()
        with closing(built["worker"]) as worker:
            leader.send(plan(1))
            assert collect(worker.receive, 1) == [plan(1)]


def test_workers_with_different_layouts_are_refused_on_both_sides():
    with ExitStack() as stack:
        leader = stack.enter_context(closing(ZmqLeader(3, ANY, ANY, timing=FAST)))
        workers = [
            stack.enter_context(closing(ZmqWorker(one, leader.pub_url, leader.ack_url, timing=FAST)))
            for one in (hello(0), hello(1, layout="HND"), hello(2))
        ]
        for end in (leader, *workers):
            with pytest.raises(ChannelError, match=r"layout.*ranks 0, 2: 'NHD'; rank 1: 'HND'"):
                end.wait(60)
        assert not leader.ready
        assert "rank 1" in str(leader.error)


@pytest.mark.parametrize("reason", ["missing: rank 1", "disagree on the layout"])
def test_a_refusal_reaches_the_workers_although_the_leader_closes_at_once(reason, monkeypatch):
    rare = Timing(round=30.0)  # not in the next round: there is none
    with ExitStack() as stack:
        leader = stack.enter_context(closing(ZmqLeader(2, ANY, ANY, timeout=60, timing=rare)))

        def start(one):
            return stack.enter_context(closing(ZmqWorker(one, leader.pub_url, leader.ack_url, timing=rare)))

        worker = start(hello(0))
        heard, shake_hands = [], worker._shake_hands
        monkeypatch.setattr(worker, "_shake_hands", lambda *message: heard.append(1) or shake_hands(*message))

        def is_connected():
            with leader._lock:
                leader._post(0, b"hello")
            return heard and 0 in leader._by_rank

        until(is_connected)
        if "layout" in reason:
            start(hello(1, layout="HND"))
        else:
            leader._timeout = 0.0
        with pytest.raises(ChannelError, match=reason):
            leader.wait()
        leader.close()
        with pytest.raises(ChannelError, match=reason):
            worker.wait(60)


def test_the_worker_of_another_engine_does_not_take_part_in_an_agreement():
    with zmq_pair(1, confirm=False) as (leader, _):  # which is still being repeated
        other = ZmqWorker(hello(0), leader.pub_url, leader.ack_url, timeout=60, timing=FAST)
        with closing(other):
            until(lambda: other._foreign)
            other._timeout = 0.0
            with pytest.raises(HandshakeTimeoutError, match="works with other workers"):
                other.wait()


def test_a_lost_confirmation_is_repeated(monkeypatch):
    with zmq_pair(1, confirm=False) as (leader, (worker,)):
        lost = lose(worker, monkeypatch, [0], b"ready")
        worker.confirm()
        assert not lost
        leader.wait(60)


def test_a_timeout_says_who_is_missing_and_what_to_check():
    with closing(ZmqLeader(4, ANY, ANY, timeout=60, timing=FAST)) as leader, ExitStack() as stack:
        for rank in (0, 2):
            stack.enter_context(closing(ZmqWorker(hello(rank), leader.pub_url, leader.ack_url, timing=FAST)))
        until(lambda: leader._by_rank.keys() == {0, 2})
        leader._timeout = 0.0
        with pytest.raises(HandshakeTimeoutError) as caught:
            leader.wait()
        said = str(caught.value)
        for part in (
            "2 of 4 workers have answered",
            "missing: ranks 1, 3",
            "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS",
            leader.pub_url,
            leader.ack_url,
            "DYN_KVBM_LEADER_ZMQ_HOST",
            "firewall",
        ):
            assert part in said
        assert leader.error is caught.value


def test_a_worker_without_a_leader_says_so_in_time():
    pub, ack = free_url(), free_url()
    worker = ZmqWorker(hello(3), pub, ack, timeout=0.3, timing=FAST)
    with closing(worker), pytest.raises(HandshakeTimeoutError) as caught:
        worker.wait()
    for part in ("rank 3", "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS", pub, ack):
        assert part in str(caught.value)


def test_a_worker_that_has_given_up_waiting_does_not_answer_later():
    pub, ack = free_url(), free_url()
    with closing(ZmqWorker(hello(0), pub, ack, timeout=0.2, timing=FAST)) as worker:
        with pytest.raises(HandshakeTimeoutError):
            worker.wait()
        with closing(ZmqLeader(1, pub, ack, timeout=0.8, timing=FAST)) as leader:
            with pytest.raises(HandshakeTimeoutError):
                leader.wait()
            assert not worker._confirmed
            assert worker._agreement is None


def test_progress_is_told_now_and_then(caplog):
    caplog.set_level(logging.INFO, logger=channel.__name__)
    began = time.monotonic()
    leader = ZmqLeader(2, ANY, ANY, timeout=600, timing=FAST)
    with closing(leader), closing(ZmqWorker(hello(1), leader.pub_url, leader.ack_url, timing=FAST)):
        until(lambda: "1 of 2 workers have answered (missing: rank 0)" in caplog.text)
    assert " s of 600 s" in caplog.text
    # Not in every round.
    assert len(caplog.records) <= 2 + (time.monotonic() - began) / FAST.progress


@pytest.mark.parametrize("setting", ["DYN_KVBM_LEADER_ZMQ_PUB_PORT", "DYN_KVBM_LEADER_ZMQ_ACK_PORT"])
def test_a_port_in_use_names_its_setting(setting):
    with closing(ZmqLeader(1, ANY, ANY)) as other:
        urls = [other.pub_url, ANY] if "PUB" in setting else [ANY, other.ack_url]
        with pytest.raises(ChannelError, match=f"own pair of ports: set {setting}"):
            ZmqLeader(1, *urls)


def test_a_host_that_is_not_this_machine_names_its_setting():
    with pytest.raises(ChannelError, match=r"DYN_KVBM_LEADER_ZMQ_HOST \(here '192\.0\.2\.1'\)"):
        ZmqLeader(1, "tcp://192.0.2.1:1234", ANY)


def test_a_port_is_said_to_be_open_to_its_network(caplog, private):
    ZmqLeader(1, *private).close()
    assert not caplog.records
    ZmqLeader(1, "tcp://0.0.0.0:0", ANY).close()
    assert "open to that network, and unauthenticated" in caplog.text


# -- on one machine: sockets that only their user can reach -----------------------------------------------------------


@pytest.fixture
def private(monkeypatch):
    """The addresses of an engine with these settings."""
    with tempfile.TemporaryDirectory(prefix="kvbm-tests-", dir="/tmp") as there:
        os.chmod(there, 0o1777)  # as /tmp is
        monkeypatch.setenv("TMPDIR", there)
        config = load({}, {"DYN_KVBM_LEADER_ZMQ_PUB_PORT": "41001", "DYN_KVBM_LEADER_ZMQ_ACK_PORT": "41002"}, [])
        yield config.leader_pub_url, config.leader_ack_url


def test_on_one_machine_the_halves_meet_in_a_directory_of_their_user(private):
    leader = ZmqLeader(1, *private, timing=FAST)
    with closing(leader), closing(ZmqWorker(hello(0), *private, timing=FAST)) as worker:
        meet(leader, [worker])
        leader.send(plan(1))
        assert collect(worker.receive, 1) == [plan(1)]
        worker.send(report(0, 1))
        assert collect(leader.receive, 1) == [report(0, 1)]
        sockets = [Path(url.removeprefix("ipc://")) for url in private]
        assert all(path.is_socket() for path in sockets)
        assert stat.S_IMODE(sockets[0].parent.stat().st_mode) == 0o700
    assert os.listdir(sockets[0].parent) == []


def test_an_engine_that_ends_without_a_word_leaves_no_socket(private):
    """Nor does a child that it forked take them away before."""
    end = (
        "import os, sys; from kvbm.runtime.channel import ZmqLeader\n"
        "leader = ZmqLeader(1, *sys.argv[1:])\n"
        "if not os.fork(): sys.exit()\n"
        "os.wait(); print(*sorted(os.listdir(os.path.dirname(sys.argv[1][6:]))))"
    )
    done = subprocess.run([sys.executable, "-c", end, *private], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["leader-41001", "leader-41001.lock", "leader-41002", "leader-41002.lock"]
    assert os.listdir(Path(private[0].removeprefix("ipc://")).parent) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_reaches_neither_socket(private):
    knock = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534)\n"
        "for url in sys.argv[1:]:\n"
        "    try: socket.socket(socket.AF_UNIX).connect(url[len('ipc://'):])\n"
        "    except PermissionError: print('refused')"
    )
    mask = os.umask(0)  # the directory alone keeps them out
    leader = ZmqLeader(1, *private, timing=FAST)
    os.umask(mask)
    with closing(leader):
        found = subprocess.run([sys.executable, "-c", knock, *private], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["refused", "refused"]


def test_workers_may_come_before_the_leader_and_its_directory(private):
    with closing(ZmqWorker(hello(0), *private, timing=FAST)) as worker:
        with pytest.raises(HandshakeTimeoutError, match=r"must run as one user and see the same .*containers"):
            worker.wait(0.1)
        with closing(ZmqLeader(1, *private, timing=FAST)) as leader:
            meet(leader, [worker])


@pytest.mark.parametrize("end", [lambda urls: ZmqLeader(1, *urls), lambda urls: ZmqWorker(hello(0), *urls)])
def test_a_directory_that_somebody_else_may_have_laid_out_is_not_used(private, tmp_path, end):
    os.symlink(tmp_path, Path(private[0].removeprefix("ipc://")).parent)
    with pytest.raises(ChannelError, match=r"not a directory of this user .* set TMPDIR"):
        end(private)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("end", [lambda urls: ZmqLeader(1, *urls), lambda urls: ZmqWorker(hello(0), *urls)])
def test_a_path_too_long_for_a_socket_names_what_to_set(end):
    with pytest.raises(ChannelError, match="set TMPDIR to a shorter path"):
        end([f"ipc:///tmp/{'x' * 100}/{name}" for name in ("pub", "ack")])


@pytest.mark.parametrize("at", [0, 1])
def test_a_second_leader_does_not_take_the_socket_of_one_that_lives(private, at):
    setting = ("DYN_KVBM_LEADER_ZMQ_PUB_PORT", "DYN_KVBM_LEADER_ZMQ_ACK_PORT")[at]
    others = [f"{url}0" for url in private]
    others[at] = private[at]
    with closing(ZmqLeader(1, *private, timing=FAST)) as leader:
        with pytest.raises(ChannelError, match=f"own pair of ports: set {setting}"):
            ZmqLeader(1, *others)
        with closing(ZmqWorker(hello(0), *private, timing=FAST)) as worker:
            meet(leader, [worker])
    ZmqLeader(1, *others).close()


def test_a_leader_takes_the_sockets_of_one_that_was_killed(private):
    crash = (
        "import os, sys; from kvbm.runtime.channel import ZmqLeader\n"
        "leader = ZmqLeader(1, *sys.argv[1:]); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", crash, *private]).returncode == -signal.SIGKILL
    assert all(os.path.exists(url.removeprefix("ipc://")) for url in private)
    leader = ZmqLeader(1, *private, timing=FAST)
    with closing(leader), closing(ZmqWorker(hello(0), *private, timing=FAST)) as worker:
        meet(leader, [worker])


def test_the_halves_also_meet_over_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    leader = ZmqLeader(1, "tcp://[::1]:0", "tcp://[::1]:0", timing=FAST)
    with closing(leader), closing(ZmqWorker(hello(0), leader.pub_url, leader.ack_url, timing=FAST)) as worker:
        meet(leader, [worker])
        leader.send(plan(1))
        assert collect(worker.receive, 1) == [plan(1)]


def test_two_workers_of_one_rank_are_refused():
    with ExitStack() as stack:
        leader = stack.enter_context(closing(ZmqLeader(2, ANY, ANY, timing=FAST)))
        for _ in range(2):
            stack.enter_context(closing(ZmqWorker(hello(0), leader.pub_url, leader.ack_url, timing=FAST)))
        with pytest.raises(ChannelError, match="two workers call themselves rank 0"):
            leader.wait(60)


def test_a_rank_beyond_the_last_is_refused():
    leader = ZmqLeader(2, ANY, ANY, timing=FAST)
    worker = ZmqWorker(hello(2), leader.pub_url, leader.ack_url, timing=FAST)
    expected = pytest.raises(ChannelError, match="rank 2, but this leader has the ranks 0 to 1")
    with closing(leader), closing(worker), expected:
        worker.wait(60)


def test_the_worker_of_another_engine_gets_no_plans(caplog):
    with zmq_pair(1) as (leader, (worker,)):
        other = ZmqWorker(hello(0), leader.pub_url, leader.ack_url, timeout=60, timing=FAST)
        with closing(other):
            until(lambda: other._foreign)
            other._timeout = 0.0
            with pytest.raises(HandshakeTimeoutError, match="works with other workers"):
                other.wait()
            leader.send(plan(1))
            assert collect(worker.receive, 1) == [plan(1)]
            assert other.receive(timeout=0.2) == []
            other.send(report(0, 66))
            worker.send(report(0, 1))
            assert collect(leader.receive, 1) == [report(0, 1)]
            until(lambda: leader.malformed)
            assert leader.receive() == []
    assert "give that engine its own DYN_KVBM_LEADER_ZMQ_PUB_PORT" in caplog.text


def test_closing_ends_a_wait():
    with closing(ZmqLeader(1, ANY, ANY, timing=FAST)) as leader:
        worker = ZmqWorker(hello(0), free_url(), free_url(), timing=FAST)
        caught = []
        for end in (leader, worker):

            def wait(end=end):
                try:
                    end.wait()
                except ChannelError as error:
                    caught.append(error)

            thread = threading.Thread(target=wait)
            thread.start()
            end.close()
            thread.join(60)
            assert not thread.is_alive()
        assert len(caught) == 2


# -- losing and finding messages --------------------------------------------------------------------------------------


def lose(end, monkeypatch, numbers, function):
    """Drop some messages on the way out, the first time they are sent."""
    lost = set(numbers)
    post = end._post

    def lossy(number, name, payload=b""):
        if name == function and number in lost:
            lost.remove(number)
        else:
            post(number, name, payload)

    monkeypatch.setattr(end, "_post", lossy)
    return lost


@pytest.mark.parametrize("numbers", [[1], [2, 3, 7], [10], range(1, 11)], ids=["first", "middle", "last", "all"])
def test_lost_plans_are_sent_again(monkeypatch, numbers):
    with zmq_pair(2) as (leader, workers):
        lost = lose(leader, monkeypatch, numbers, b"plan")
        sent = [plan(number) for number in range(1, 11)]
        for one in sent:
            leader.send(one)
        assert not lost
        for worker in workers:
            assert collect(worker.receive, 10) == sent
        assert leader.lost_ranks() == {}


@pytest.mark.parametrize("numbers", [[1], [2, 3, 7], [10], range(1, 11)], ids=["first", "middle", "last", "all"])
def test_lost_reports_are_sent_again(monkeypatch, numbers):
    with zmq_pair(2) as (leader, workers):
        lost = lose(workers[1], monkeypatch, numbers, b"report")
        for number in range(10):
            for rank, worker in enumerate(workers):
                worker.send(report(rank, number))
        assert not lost
        got = collect(leader.receive, 20)
        for rank in range(2):
            assert [one for one in got if one.rank == rank] == [report(rank, number) for number in range(10)]


def test_nothing_is_kept_once_it_was_taken():
    with zmq_pair(2) as (leader, workers):
        for number in range(1, 101):
            leader.send(plan(number))
        collect(workers[0].receive, 100)
        time.sleep(0.2)
        assert len(leader._out_box) == 100  # rank 1 has not taken them yet
        collect(workers[1].receive, 100)
        until(lambda: not len(leader._out_box))
        workers[0].send(report(0, 1))
        collect(leader.receive, 1)
        until(lambda: not len(workers[0]._out_box))


def test_a_broken_connection_loses_nothing():
    """All traffic goes through a relay, which is cut while plans and reports are on their way."""
    with ExitStack() as stack:
        leader = stack.enter_context(closing(ZmqLeader(1, ANY, ANY, timing=FAST)))
        relays = [stack.enter_context(closing(Relay(url))) for url in (leader.pub_url, leader.ack_url)]
        worker = stack.enter_context(closing(ZmqWorker(hello(0), *(relay.url for relay in relays), timing=FAST)))
        meet(leader, [worker])
        plans, reports = [], []
        for number in range(1, 601):
            leader.send(plan(number))
            worker.send(report(0, number))
            plans += worker.receive()
            reports += leader.receive()
            if number % 150 == 0:
                for relay in relays:
                    relay.cut()
            if number % 150 == 75:
                until(lambda: all(relay.is_open for relay in relays))  # connected again
        until(lambda: plans.extend(worker.receive()) or len(plans) >= 600)
        until(lambda: reports.extend(leader.receive()) or len(reports) >= 600)
        assert [one.loads[0].id for one in plans] == list(range(1, 601))
        assert [one.loads[0].id for one in reports] == list(range(1, 601))
        assert leader.lost_ranks() == {}
        assert sum(relay.cuts for relay in relays) >= 4


class Relay:
    """Passes TCP on, and breaks every connection when told to."""

    def __init__(self, url):
        host, port = url.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        self._open = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def is_open(self):
        return bool(self._open)

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pass_on, args=(source, sink))
                self._threads.append(thread)
                thread.start()

    @staticmethod
    def _pass_on(source, sink):
        with suppress(OSError):
            while data := source.recv(4096):
                sink.sendall(data)

    def cut(self):
        connections, self._open = self._open, []
        self.cuts += len(connections) // 2
        for connection in connections:
            # A reset, so that what is on its way is thrown away.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):  # the other side may have hung up already
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(5)
        self.cut()
        for thread in self._threads:
            thread.join(5)


def test_any_thread_may_report_while_another_waits_for_plans():
    with zmq_pair(1) as (leader, (worker,)):
        plans = []

        def wait():
            while len(plans) < 200:
                plans.extend(worker.receive(timeout=1.0))

        def answer(first):
            for number in range(first, first + 100):
                worker.send(report(0, number))

        threads = [threading.Thread(target=wait)]
        threads += [threading.Thread(target=answer, args=(first,)) for first in (0, 100, 200, 300)]
        for thread in threads:
            thread.start()
        reports = []
        for number in range(1, 201):
            leader.send(plan(number))
            reports += leader.receive()
        until(lambda: reports.extend(leader.receive()) or len(reports) >= 400)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert [one.loads[0].id for one in plans] == list(range(1, 201))
        assert sorted(one.loads[0].id for one in reports) == list(range(400))


def test_a_waiting_worker_wakes_up_when_a_plan_comes():
    slow = Timing(round=0.05, beat=30.0)  # the background thread sleeps meanwhile
    with zmq_pair(1, timing=slow) as (leader, (worker,)):
        got = []
        thread = threading.Thread(target=lambda: got.extend(worker.receive(timeout=20)))
        thread.start()
        time.sleep(0.1)
        begun = time.monotonic()
        leader.send(plan(1))
        thread.join()
        assert got == [plan(1)]
        assert time.monotonic() - begun < slow.beat - 2


# -- strangers and nonsense -------------------------------------------------------------------------------------------

NUMBER = struct.pack(">Q", 1)
NONSENSE = [
    [b""],
    [b"x" * 1000],
    [NUMBER, b"plan"],
    [NUMBER, b"plan", b"payload"],
    [NUMBER, b"report", b"short", b""],
    [b"short", b"report", bytes([1]) * 13, b""],
    [NUMBER, b"hello", bytes([1]) * 13, b"\xc1"],
    [NUMBER, b"hello", struct.pack(">BIQ", 1, 5, 5), encode(hello(0))],
    [NUMBER, b"hello", struct.pack(">BIQ", 9, 0, 5), encode(hello(0))],
    [NUMBER, b"report", bytes([1]) * 13, encode([report(0, 1)])],
    [NUMBER, b"format the disk", bytes([1]) * 13, b""],
    [b"cos\nsystem\n(S'true'\ntR.", b"report", bytes([1]) * 13, b""],
    [NUMBER] * 50,
    [NUMBER, b"beat", bytes([1]) * 13, b"\x91" * 5000],
]


def test_nonsense_is_counted_and_dropped_by_the_leader(caplog):
    with zmq_pair(1) as (leader, (worker,)), zmq.Context() as context:
        stranger = context.socket(zmq.PUSH)
        stranger.connect(leader.ack_url)
        for frames in NONSENSE:
            stranger.send_multipart(frames)
        until(lambda: leader.receive() == [] and leader.malformed == len(NONSENSE))
        worker.send(report(0, 1))
        leader.send(plan(1))
        assert collect(leader.receive, 1) == [report(0, 1)]
        assert collect(worker.receive, 1) == [plan(1)]
        assert leader.lost_ranks() == {}
        stranger.close(0)
    assert caplog.text.count("dropped a message") == 1


def test_nonsense_is_counted_and_dropped_by_the_worker(caplog):
    with zmq.Context() as context:
        stranger = context.socket(zmq.XPUB)  # says when the worker has subscribed
        stranger.setsockopt(zmq.RCVTIMEO, 120_000)
        stranger.bind(ANY)
        url = stranger.getsockopt_string(zmq.LAST_ENDPOINT)
        with zmq_pair(1) as (leader, (worker,)):
            with worker._lock:
                worker._in.connect(url)
            assert stranger.recv() == b"\x01"
            for frames in NONSENSE:
                stranger.send_multipart(frames)
            until(lambda: worker.receive() == [] and worker.malformed == len(NONSENSE))
            leader.send(plan(1))
            assert collect(worker.receive, 1) == [plan(1)]
            assert worker.lost is None
        stranger.close(0)
    assert caplog.text.count("dropped a message") == 1


def test_nonsense_does_not_end_a_handshake_and_shows_in_its_timeout():
    with closing(ZmqLeader(1, ANY, ANY, timeout=60, timing=FAST)) as leader, zmq.Context() as context:
        stranger = context.socket(zmq.PUSH)
        stranger.connect(leader.ack_url)
        stranger.send_multipart([NUMBER, b"hello", struct.pack(">BIQ", 9, 0, 5), encode(hello(0))])
        until(lambda: leader.malformed)
        leader._timeout = 0.0
        with pytest.raises(HandshakeTimeoutError, match=r"speaks version 9 of the protocol.*install the same release"):
            leader.wait()
        stranger.close(0)


def test_a_plan_that_cannot_be_read_costs_the_rank_and_not_the_engine():
    with zmq_pair(2) as (leader, workers):
        with leader._lock:
            leader._post(leader._out_box.add(b"\xc1"), b"plan", b"\xc1")
        until(lambda: set(leader.lost_ranks()) == {0, 1})
        assert "a plan cannot be read" in leader.lost_ranks()[0]
        assert all("cannot be read" in worker.lost for worker in workers)


def test_a_report_that_cannot_be_read_costs_the_rank_and_not_the_engine():
    with zmq_pair(2) as (leader, workers):
        with workers[1]._lock:
            workers[1]._post(workers[1]._out_box.add(b"\xc1"), b"report", b"\xc1")
        assert until(leader.lost_ranks).keys() == {1}
        until(lambda: workers[1].lost)
        assert workers[0].lost is None


# -- losing a rank ----------------------------------------------------------------------------------------------------


def age(leader, rank, seconds):
    """As if the leader had last heard of a rank so long ago."""
    with leader._lock:
        leader._by_rank[rank].seen -= seconds


def lose_silent(leader, rank):
    """Wait until the leader has given a rank up that sends no more signs of life; some may still be on their way."""

    def look():
        age(leader, rank, FAST.silence)
        return leader.lost_ranks()

    return until(look)


def test_a_rank_that_falls_silent_is_lost_for_good():
    with zmq_pair(3) as (leader, workers):
        now = time.monotonic()
        for rank in range(3):
            age(leader, rank, FAST.silence / 2)
        until(lambda: all(peer.seen > now for peer in leader._by_rank.values()))  # a sign of life is enough
        assert leader.lost_ranks() == {}
        workers[1].close()
        lost = lose_silent(leader, 1)
        assert lost.keys() == {1}
        assert "silent" in lost[1]
        # The others go on, and what they were sent is not kept for the one that is gone.
        leader.send(plan(1))
        for rank in (0, 2):
            assert collect(workers[rank].receive, 1) == [plan(1)]
            workers[rank].send(report(rank, 1))
        collect(leader.receive, 2)
        until(lambda: not len(leader._out_box))
        assert leader.lost_ranks().keys() == {1}


def test_a_worker_that_was_given_up_gets_no_more_plans(monkeypatch):
    """It is alive after all, but its blocks may belong to somebody else by now."""
    with zmq_pair(2) as (leader, workers):
        monkeypatch.setattr(workers[1], "_beat", lambda now: None)
        lose_silent(leader, 1)
        leader.send(plan(1))
        until(lambda: workers[1].lost)
        assert workers[1].receive() == []
        workers[1].send(report(1, 1))
        with workers[1]._lock:
            workers[1]._post(1, b"report", encode([report(1, 1)]))  # on its way before it knew
        time.sleep(0.2)
        assert leader.receive() == []
        assert collect(workers[0].receive, 1) == [plan(1)]


def test_a_leader_that_was_asleep_does_not_blame_its_workers(monkeypatch):
    with zmq_pair(1, timing=Timing(round=0.05, beat=0.05, silence=5.0)) as (leader, _):
        with leader._lock:  # nothing is read meanwhile: as if the process were stopped
            leader._looked -= 60
            for peer in leader._by_rank.values():
                peer.seen -= 60
            leader._look(time.monotonic())
            assert leader._lost == {}
        assert leader.lost_ranks() == {}


def test_a_rank_that_takes_no_plans_is_lost_before_memory_is(monkeypatch):
    monkeypatch.setattr(channel, "WINDOW", 64)
    with zmq_pair(2) as (leader, workers):
        sent = 0
        while not leader.lost_ranks():
            sent += 1
            assert sent < 1000
            leader.send(plan(sent))
            collect(workers[0].receive, 1)
            assert len(leader._out_box) <= 65
        assert leader.lost_ranks() == {1: "has left 64 plans untaken"}
        until(lambda: workers[1].lost)
        assert not workers[1]._plans


def test_reports_beyond_the_window_are_merged_and_none_is_missing(monkeypatch):
    monkeypatch.setattr(channel, "WINDOW", 8)
    with zmq_pair(1) as (leader, (worker,)):
        for number in range(100):
            worker.send(report(0, number))
        assert len(worker._out_box) == 8
        got = []
        until(lambda: got.extend(leader.receive()) or sum(len(one.loads) for one in got) >= 100)
        assert [load.id for one in got for load in one.loads] == list(range(100))
        assert [store.id for one in got for store in one.stores] == list(range(100))
        assert [move.id for one in got for move in one.moves] == list(range(100))
        assert sum(one.faults["why"] for one in got) == sum(range(100))
        assert len(got) < 20


def test_a_fault_in_the_thread_loses_the_ranks_and_not_the_engine(monkeypatch, caplog):
    with zmq_pair(2) as (leader, _):
        monkeypatch.setattr(leader, "_turn", lambda now: 1 / 0)
        assert until(leader.lost_ranks).keys() == {0, 1}
        leader.send(plan(1))
        assert leader.receive() == []
    assert "ZeroDivisionError" in caplog.text


# -- what the leader makes of it --------------------------------------------------------------------------------------


def keys(letters):
    return [letter.encode() for letter in letters]


def make_leader(ranks=2, known=""):
    pool = Pool(16)
    pool.commit(pool.reserve(keys(known)))
    return Leader(BlockManager({HOST: pool}), ranks)


def idle(leader):
    pool = leader.manager.catalogs[HOST]
    return not leader.busy and not leader.manager.busy and pool.pinned == 0 and pool.writing == 0


def test_what_a_lost_rank_still_owed_has_failed():
    leader = make_leader(2, "ab")
    load = leader.onboard(leader.manager.lookup(keys("ab")), "r", [0, 1], in_step=True)
    store = leader.offload(keys("cd"), [2, 3])
    leader.apply([Report(0, [LoadResult(load.id)], [StoreResult(store.id)])])
    assert leader.busy
    leader.fail_rank(1)
    assert idle(leader)
    assert leader.counts.failed_load_blocks == 2
    assert leader.counts.failed_store_blocks == 2
    assert leader.counts.offloaded_blocks == 0
    assert leader.fences([2, 3]) == []


def test_a_lost_rank_does_not_end_what_the_others_are_doing():
    leader = make_leader(2, "ab")
    load = leader.onboard(leader.manager.lookup(keys("ab")), "r", [0, 1], in_step=False)
    store = leader.offload(keys("cd"), [2, 3])
    leader.fail_rank(1)
    assert leader.busy
    assert leader.fences([3]) == [store.id]
    leader.apply([Report(0, [LoadResult(load.id)], [StoreResult(store.id)])])
    assert idle(leader)


def test_a_load_that_the_lost_rank_had_finished_is_not_failed():
    leader = make_leader(2, "ab")
    load = leader.onboard(leader.manager.lookup(keys("ab")), "r", [0, 1], in_step=False)
    leader.apply([Report(1, [LoadResult(load.id)])])
    leader.fail_rank(1)
    leader.apply([Report(0, [LoadResult(load.id)])])
    assert leader.counts.failed_load_blocks == 0
    assert idle(leader)


def test_with_a_rank_gone_nothing_is_found_and_nothing_is_kept():
    leader = make_leader(3, "abc")
    store = leader.offload(keys("de"), [3, 4])
    leader.apply([Report(rank, stores=[StoreResult(store.id)]) for rank in (1, 2)])
    leader.fail_rank(1)
    leader.fail_rank(1)
    leader.apply([Report(0, stores=[StoreResult(store.id)])])
    assert leader.manager.lookup(keys("abcde")).blocks == 0
    assert leader.offload(keys("f"), [5]) is None
    assert idle(leader)


def test_late_reports_of_a_lost_rank_change_nothing():
    leader = make_leader(2, "ab")
    load = leader.onboard(leader.manager.lookup(keys("ab")), "r", [0, 1], in_step=False)
    store = leader.offload(keys("cd"), [2, 3])
    leader.fail_rank(1)
    late = [Report(1, [LoadResult(load.id)], [StoreResult(store.id)])]
    leader.apply(late)
    assert leader.busy
    leader.apply([Report(0, [LoadResult(load.id)], [StoreResult(store.id)])])
    leader.apply(late)
    assert idle(leader)
    assert leader.counts.failed_load_blocks == 2
    assert leader.counts.offloaded_blocks == 0
