"""Two engines that read each other's host memory, with a real vLLM each."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from engines import EngineFailedError, do, generate, prompt

pytestmark = pytest.mark.engine

PROMPTS = [prompt(900 + i, 400) for i in range(3)]  # of twelve blocks and a bit
BLOCKS = 3 * 12
# A busy machine answers late, and a request waits a quarter of a second only.
PATIENT = {"kvbm.engines.vllm.deferral:PATIENCE_SECONDS": 30.0}
SECRET = "a secret of the tests"


@pytest.fixture
def run_dir():
    directory = Path(tempfile.mkdtemp(prefix="peers-"))  # the paths of Unix sockets are short
    yield directory
    for socket in directory.glob("*.sock"):  # orphans of a test that failed
        end_server(socket)
    shutil.rmtree(directory)


def end_server(socket: Path) -> None:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            mine = b"kvbm.tiers.peers.server" in command and str(socket.parent) in os.readlink(process / "fd/1")
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
        "peer_lookup_secs": 30.0,
        "peer_timeout_secs": 20.0,
        **more,
    }


def test_the_blocks_of_a_killed_engine_answer_another_until_its_successor_comes(run_scenario, baseline, run_dir):
    wanted = baseline(PROMPTS)
    first = [generate(*PROMPTS), do("drain"), do("call", target="test_peer_engines:wait_for_server"), do("kill")]
    with pytest.raises(EngineFailedError, match="status -9"):
        run_scenario(first, settings(run_dir, peer_name="a"))
    assert len(list(run_dir.glob("*.sock"))) == 1
    steps = [generate(*PROMPTS, name="again"), do("drain"), do("state", "end"), do("sources", "sources")]
    other = run_scenario(steps, settings(run_dir, peer_name="b"), patch=PATIENT)
    assert other.tokens("again") == wanted
    assert other["end"]["onboarded_from"] == {"peer": BLOCKS}, (
        other["sources"],
        other["end"]["faults"],
        other.log,
        other.output[-3000:],
    )
    assert other["end"]["onboarded_from"]["peer"] == BLOCKS
    assert other["end"]["faults"] == {}
    [[_, path, blocks, size, refused]] = other["sources"]
    assert (path, blocks, refused) == ("mapped memory", BLOCKS, {}) and size > 0
    # Its successor takes over: the blocks of the dead engine are gone with it, and so is its memory.
    successor = [
        do("call", target="test_peer_engines:wait_for_server"),
        generate(PROMPTS[0], name="cold"),
        do("state", "end"),
    ]
    heir = run_scenario(successor, settings(run_dir, peer_name="a"))
    assert heir.tokens("cold") == wanted[:1]
    assert heir["end"]["onboarded_from"].get("peer", 0) == 0
    assert list(run_dir.iterdir()) == []


def wait_for_server(scenario) -> str:
    """In the engine's process."""
    server = scenario.adapter.leader.manager.catalogs["peer"]._server
    assert server.is_ready.wait(60)
    return server.address
