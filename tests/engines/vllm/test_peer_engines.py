"""Two engines that read each other's host memory, with a real vLLM each."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
from engines import Driver, EngineFailedError, do, generate, prompt

from kvbm.tiers.peers.nixl_path import api
from servers import free_port

pytestmark = pytest.mark.engine

PROMPTS = [prompt(900 + i, 400) for i in range(3)]  # of twelve blocks and a bit
BLOCKS = 3 * 12
# A busy machine answers late, and a request waits a quarter of a second only. Where other programs use all cores, a
# server that gives way to engines may get no turn for a minute. An engine of several ranks that waits pauses for 50 us
# between two steps: vLLM's server adds a millisecond, but here the next step follows at once.
PATIENT = {
    "kvbm.engines.vllm.deferral:PATIENCE_SECONDS": 60.0,
    "kvbm.gil:_SWITCH_SECONDS": 1e-3,
    "kvbm.tiers.peers.open:NICE": 0,
}
SECRET = "a secret of the tests"


@pytest.fixture
def run_dir():
    directory = Path(tempfile.mkdtemp(prefix="peers-"))  # the paths of Unix sockets are short
    yield directory
    for path in directory.rglob("*.sock"):  # orphans of a test that failed
        end_server(path)
    shutil.rmtree(directory)


def end_server(path: Path) -> None:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            mine = b"kvbm.tiers.peers.server" in command and str(path.parent) in os.readlink(process / "fd/1")
        except OSError:
            continue
        if mine:
            os.kill(int(process.name), signal.SIGTERM)


def settings(run_dir, **more):
    return {
        "cpu_cache_override_num_blocks": 512,
        "load": "always",  # a tiny model computes faster than it loads
        "peers_enabled": True,
        "peer_dir": str(run_dir),
        "peer_lookup_secs": 60.0,
        "peer_timeout_secs": 60.0,
        **more,
    }


def test_the_blocks_of_a_killed_engine_answer_another_until_its_successor_comes(run_scenario, baseline, run_dir):
    wanted = baseline(PROMPTS)
    first = [generate(*PROMPTS), do("drain"), do("call", target="test_peer_engines:wait_for_server"), do("kill")]
    with pytest.raises(EngineFailedError, match="status -9"):
        run_scenario(first, settings(run_dir, peer_name="a"), patch=PATIENT)
    assert len(list(run_dir.glob("*.sock"))) == 1
    steps = [MET, generate(*PROMPTS, name="again"), do("drain"), do("state", "end"), do("sources", "sources")]
    other = run_scenario(steps, settings(run_dir, peer_name="b"), patch=PATIENT)
    assert other.tokens("again") == wanted
    # They may have come to host memory while the request was in the queue.
    assert sum(other["end"]["onboarded_from"].values()) == BLOCKS
    assert other["end"]["faults"] == {}
    [[_, path, blocks, size, refused]] = other["sources"]
    assert (path, blocks, refused) == ("mapped memory", BLOCKS, {})
    assert size > 0
    # Its successor takes over: the blocks of the dead engine are gone with it, and so is its memory.
    successor = [
        do("call", target="test_peer_engines:wait_for_server"),
        generate(PROMPTS[0], name="cold"),
        do("state", "end"),
    ]
    heir = run_scenario(successor, settings(run_dir, peer_name="a"), patch=PATIENT)
    assert heir.tokens("cold") == wanted[:1]
    assert heir["end"]["onboarded_from"].get("peer", 0) == 0
    assert list(run_dir.iterdir()) == []


@pytest.mark.peers
def test_each_rank_reads_from_the_same_rank(run_scenario, baseline, run_dir):
    """With another number of ranks nothing is read, and the log says why."""
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    wanted = baseline(PROMPTS)
    first = [generate(*PROMPTS), do("drain"), READY, do("kill")]
    with pytest.raises(EngineFailedError, match="status -9"):
        run_scenario(first, settings(run_dir, peer_name="a"), engine=two, patch=PATIENT)
    steps = [READY, MET, generate(*PROMPTS, name="again"), do("drain"), do("state", "end"), do("sources", "sources")]
    kvbm = settings(run_dir, peer_name="b")
    same = run_scenario(steps, kvbm, engine=two, patch=PATIENT)
    assert same.tokens("again") == wanted
    assert same["end"]["onboarded_from"] == {"peer": BLOCKS}, same["sources"]
    other = run_scenario(steps, kvbm, patch=PATIENT)
    assert other.tokens("again") == wanted
    assert other["end"]["onboarded_from"] == {}
    assert other.said("tensor_parallel 2 here and 1 there")
    heir = run_scenario([READY], settings(run_dir, peer_name="a"), engine=two, patch=PATIENT)
    assert heir.refused is None
    assert list(run_dir.iterdir()) == []


@pytest.mark.peers
@pytest.mark.parametrize(
    ("transport", "path"),
    [("socket", "socket"), pytest.param("nixl", "NIXL", marks=pytest.mark.skipif(api() is None, reason="needs NIXL"))],
)
def test_an_engine_of_another_machine_answers_with_the_same_tokens(run_scenario, baseline, run_dir, transport, path):
    """Two engines that take each other for machines of their own, over TCP."""
    wanted = baseline(PROMPTS)
    address = f"127.0.0.1:{free_port()}"
    env = {"KVBM_PEER_SECRET": SECRET, "UCX_TLS": "tcp,self"}
    here, there = run_dir / "a", run_dir / "b"
    here.mkdir(mode=0o700)
    there.mkdir(mode=0o700)
    first = settings(here, peer_listen=address, peer_transport=transport, peer_orphan_secs=600.0)
    with pytest.raises(EngineFailedError, match="status -9"):
        run_scenario([generate(*PROMPTS), do("drain"), READY, do("kill")], first, env=env, patch=PATIENT)
    steps = [READY, MET, generate(*PROMPTS, name="again"), do("drain"), do("state", "end"), do("sources", "sources")]
    patch = {**PATIENT, "kvbm.tiers.peers.open:machine": {"returns": "another machine"}}
    other = run_scenario(steps, settings(there, peers=address, peer_transport=transport), env=env, patch=patch)
    assert other.tokens("again") == wanted
    assert other["end"]["onboarded_from"] == {"peer": BLOCKS}, other["sources"]
    assert [(each[0], each[1], each[2], each[4]) for each in other["sources"]] == [(address, path, BLOCKS, {})]
    # A successor takes over the address.
    heir = run_scenario([READY, do("sleep", seconds=0.1)], first, env=env, patch=PATIENT)
    assert heir.said(f"to other machines at {address}")
    for folder in (here, there):
        assert list(folder.iterdir()) == []


READY = do("call", target="test_peer_engines:wait_for_server")
MET = do("call", target="test_peer_engines:wait_for_neighbour")


@pytest.fixture(scope="module")
def second_driver(tmp_path_factory):
    """Runs the other engine at the same time."""
    driver = Driver(tmp_path_factory.mktemp("driver") / "driver.log")
    yield driver
    driver.close()


class Pair:
    """Two engines at once, which wait for each other by files in ``folder``."""

    def __init__(self, drivers, model, folder, run_dir) -> None:
        self._drivers, self._model = drivers, model
        self.folder, self._run_dir = folder, run_dir

    def mark(self, name: str) -> str:
        return str(self.folder / name)

    def run(self, *scenarios, engine=None, **kvbm):
        """The outcome of each, or its error."""
        found = [None] * len(scenarios)

        def run(i, steps):
            folder = self.folder / f"engine-{i}"
            folder.mkdir()
            kvbm_settings = settings(self._run_dir, peer_name=f"e{i}", **kvbm)
            scenario = {"engine": {"model": self._model, **(engine or {})}, "kvbm": kvbm_settings, "env": {}}
            scenario |= {"patch": PATIENT, "swap": None, "spawn": False, "steps": steps}
            try:
                found[i] = self._drivers[i].run(scenario, folder, 300)
            except Exception as error:
                found[i] = error

        threads = [threading.Thread(target=run, args=each) for each in enumerate(scenarios)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


@pytest.fixture
def pair(driver, second_driver, model, tmp_path, run_dir):
    return Pair([driver, second_driver], model, tmp_path, run_dir)


LONG = [prompt(950 + i, 900) for i in range(8)]


@pytest.mark.peers
def test_two_engines_answer_from_each_other_with_the_same_tokens(pair, baseline):
    wanted = baseline(LONG, 4)
    first = [
        READY, generate(*LONG[:4], max_tokens=4), do("drain"), do("tell", path=pair.mark("a")),
        do("wait_for", path=pair.mark("b")), MET, generate(*LONG[4:], max_tokens=4, name="other"), do("drain"),
        do("state", "end"), do("sources", "sources"), do("tell", path=pair.mark("end")),
    ]  # fmt: skip
    second = [
        READY, generate(*LONG[4:], max_tokens=4), do("drain"), do("wait_for", path=pair.mark("a")), MET,
        do("call", "times", target="test_peer_engines:compare", prompts=LONG[:4]), do("drain"),
        do("tell", path=pair.mark("b")), do("state", "end"), do("sources", "sources"),
        do("wait_for", path=pair.mark("end")),
    ]  # fmt: skip
    a, b = pair.run(first, second)
    assert not any(isinstance(each, Exception) for each in (a, b)), (a, b)
    assert a.tokens("other") == wanted[4:]
    assert b["times"]["tokens"] == wanted[:4]
    for engine in (a, b):
        [[_, _, blocks, _, _]] = engine["sources"]
        assert blocks == 4 * (900 // 32)
    assert a["end"]["faults"] == b["end"]["faults"] == {}
    print({which: b["times"][which] for which in ("peer", "own")})  # with pytest -s: seconds of each prompt


@pytest.mark.peers
def test_a_reset_source_is_not_read_and_a_killed_reader_costs_nothing(pair, run_dir, baseline):
    wanted = baseline(LONG, 4)
    source = [
        READY, generate(*LONG[:2], max_tokens=4), do("drain"), do("tell", path=pair.mark("a")),
        do("wait_for", path=pair.mark("read")), do("reset", connector=True), do("tell", path=pair.mark("reset")),
        do("wait_for", path=pair.mark("over")), generate(*LONG[:4], max_tokens=4, name="again"), do("drain"),
        do("state", "end"),
    ]  # fmt: skip
    reader = [
        READY, do("wait_for", path=pair.mark("a")), MET, generate(LONG[0], max_tokens=4, name="read"),
        do("state", "before"),
        do("tell", path=pair.mark("read")), do("wait_for", path=pair.mark("reset")),
        generate(LONG[1], max_tokens=4, name="computed"), do("drain"), do("state", "after"),
        do("call", target="test_peer_engines:save", path=pair.mark("saved")),
        do("tell", path=pair.mark("over")), do("kill"),
    ]  # fmt: skip
    a, b = pair.run(source, reader, peer_orphan_secs=0.5)
    assert "status -9" in str(b), b
    assert not isinstance(a, Exception), a
    assert a.tokens("again") == wanted[:4]
    assert a["end"]["faults"] == {}
    saved = json.loads(Path(pair.mark("saved")).read_text())
    assert sum(saved["onboarded_from"].values()) == 900 // 32  # of the first prompt alone
    deadline = time.monotonic() + 60
    while list(run_dir.iterdir()):  # the orphan of the killed one ends by itself
        assert time.monotonic() < deadline, list(run_dir.iterdir())
        time.sleep(0.1)


def save(scenario, path) -> None:
    """For a test that kills the engine before it can answer."""
    Path(path).write_text(json.dumps(scenario.state()))


def compare(scenario, prompts) -> dict:
    """Seconds of each prompt from the peer, and again from this engine's own host memory."""
    scenario.generate([prompt(999, 900)], 4)  # the way that all of them go
    times = {"peer": [], "own": [], "tokens": []}
    for which in ("peer", "own"):
        for tokens in prompts:
            assert scenario.reset()
            began = time.perf_counter()
            answer = scenario.generate([tokens], 4)
            times[which].append(time.perf_counter() - began)
            if which == "peer":
                times["tokens"].append(answer["tokens"][0][0])
    return times


def wait_for_neighbour(scenario) -> None:
    """The list of neighbours is read twice a second."""
    finder = scenario.adapter.leader.manager.catalogs["peer"]._lookup._finder
    deadline = time.monotonic() + 60
    while not finder.members():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_server(scenario) -> str:
    """In the engine's process."""
    server = scenario.adapter.leader.manager.catalogs["peer"]._server
    assert server.is_ready.wait(60)
    return server.address
