"""Two workers behind Dynamo's router: a prompt goes where its beginning lies, in host memory too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stack import PROJECT, Stack, prompt, wait_until

from kvbm import config as settings
from kvbm.control import discovery

BLOCK = 32
HOST_WEIGHT = 0.75  # what the router counts for a block in host memory beside one on the GPU
FILLERS = 6  # prompts that push everything else out of a GPU cache of 48 blocks


@pytest.fixture(params=["etcd and NATS", "neither"])
def stack(request, model, tmp_path):
    if request.param == "neither":
        env = request.getfixturevalue("without_servers")
    else:
        env = request.getfixturevalue("servers").env
    env = {**env, "FRONTEND_ARGS": "--migration-limit 3", "DYN_RUNTIME_ENABLED_KVBM": "1"}
    made = Stack("agg_kvbm_router.sh", 2, model, tmp_path, env)
    try:
        made.ready(2)
        yield made
    finally:
        made.close()


def test_requests_follow_what_lies_in_host_memory_and_survive_its_loss(stack):
    instances = stack.instances()
    assert len(instances) == 2
    places: dict[int, int] = {}  # instance -> worker
    answers: dict[int, str] = {}
    for i, instance in enumerate(instances):
        before = [stack.figures(worker)["kvbm_offload_blocks_d2h"] for worker in (0, 1)]
        stack.chat(prompt(i), 1, nvext={"backend_instance_id": instance})
        answers[instance], usage = stack.chat(longer(i), nvext={"backend_instance_id": instance})
        blocks = usage["prompt_tokens"] // BLOCK
        grown = wait_until(
            "its blocks are offloaded", lambda before=before, blocks=blocks: growth(stack, before, blocks)
        )
        (places[instance],) = [worker for worker, more in enumerate(grown) if more >= blocks]
        for filler in range(FILLERS):
            stack.chat(prompt(100 + 10 * i + filler), 1, nvext={"backend_instance_id": instance})
    assert sorted(places.values()) == [0, 1]
    router_is_up_to_date(stack)

    for i, instance in enumerate(instances):
        router, ours = stack.frontend_figures(), [stack.figures(worker) for worker in (0, 1)]
        answer, usage = stack.chat(longer(i))
        assert answer == answers[instance]
        loaded = (usage["prompt_tokens"] - 1) // BLOCK
        now = [stack.figures(worker) for worker in (0, 1)]
        onboarded = [now[w]["kvbm_onboard_blocks_h2d"] - ours[w]["kvbm_onboard_blocks_h2d"] for w in (0, 1)]
        assert onboarded[places[instance]] == loaded
        assert onboarded[1 - places[instance]] == 0
        assert usage["prompt_tokens_details"]["cached_tokens"] == loaded * BLOCK
        # The router chose it for exactly these blocks, and knew that they lie in host memory.
        credit = stack.frontend_figures()
        expected = HOST_WEIGHT * loaded / -(-usage["prompt_tokens"] // BLOCK)
        name = "dynamo_component_router_kv_hit_rate_sum"
        assert credit[name] - router[name] == pytest.approx(expected, rel=0.1)

    figures = stack.frontend_figures()
    assert figures["events stored ok"] > 0
    assert figures["events removed ok"] > 0
    assert [name for name, count in figures.items() if name.endswith("refused") and count] == []

    check_commands(stack.env)

    lost, other = instances
    before = stack.figures(places[other])["kvbm_requests_total"]
    stack.kill_worker(places[lost])
    answer, _ = stack.chat(longer(0))
    assert answer == answers[lost]
    with pytest.raises(OSError):
        stack.figures(places[lost])
    assert stack.figures(places[other])["kvbm_requests_total"] == before + 1
    wait_until("the lost one is not registered any more", lambda: cards(stack.env) == ["leader", "worker"], 60)


def longer(seed: int) -> str:
    """Begins as the prompt of this seed does: what it adds has to be found behind what was known before."""
    return f"{prompt(seed)} {prompt(50 + seed)}"


def check_commands(env: dict[str, str]) -> None:
    """Both leaders are found where Dynamo's parts find each other, and take commands through it."""
    # On a busy machine a registration may have expired. It is renewed every few seconds.
    wait_until("all are registered", lambda: cards(env) == ["leader", "leader", "worker", "worker"], 60)
    path = f"{PROJECT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    asked = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ask.py")), "2"],
        capture_output=True, text=True, timeout=120, env={**os.environ, **env, "PYTHONPATH": path},
    )  # fmt: skip
    assert asked.returncode == 0, asked.stderr
    for leader in json.loads(asked.stdout.splitlines()[-1]):
        before, after = leader["before"], leader["after"]
        assert leader["dropped"] == before["inactive_blocks"] > 0
        assert leader["missing"] == [1]
        assert "expected one of host" in leader["refused"]
        assert (after["inactive_blocks"], after["empty_blocks"]) == (0, sum(before.values()))
        assert leader["all"] == 0


def cards(env: dict[str, str]) -> list[str]:
    """Who is registered, by role."""
    config = settings.load(environ=env, files=())
    return sorted(card.role for card in discovery.find(config))


@pytest.mark.parametrize(("mode", "weight"), [("dedup", 1.0), ("passthrough", HOST_WEIGHT)])
def test_the_consolidator_tells_the_router_as_much(mode, weight, model, tmp_path, without_servers):
    """For who expects it: dynamo.vllm subscribes to it, and prompts go where their beginning is kept."""
    env = {
        **without_servers, "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR": "1", "DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE": mode,
    }  # fmt: skip
    stack = Stack("agg_kvbm_router.sh", 2, model, tmp_path, env)
    try:
        stack.ready(2)
        for instance in stack.instances():
            answer, usage = stack.chat(prompt(instance), nvext={"backend_instance_id": instance})
            for filler in range(FILLERS):
                stack.chat(prompt(instance + 1 + filler), 1, nvext={"backend_instance_id": instance})
            router_is_up_to_date(stack)
            before, name = stack.frontend_figures(), "dynamo_component_router_kv_hit_rate_sum"
            again, usage = stack.chat(prompt(instance))
            assert again == answer
            loaded = (usage["prompt_tokens"] - 1) // BLOCK
            assert usage["prompt_tokens_details"]["cached_tokens"] == loaded * BLOCK
            credit = stack.frontend_figures()[name] - before[name]
            assert credit == pytest.approx(weight * loaded / -(-usage["prompt_tokens"] // BLOCK), rel=0.1)
        figures = stack.frontend_figures()
        assert [name for name, count in figures.items() if name.endswith("refused") and count] == []
        assert "subscribing to consolidator at tcp://127.0.0.1" in stack.process.log.read_text(errors="replace")
    finally:
        stack.close()


def growth(stack: Stack, before: list[float], blocks: int) -> list[float] | None:
    """What both workers have offloaded since, once one of them has offloaded so much."""
    grown = [stack.figures(worker)["kvbm_offload_blocks_d2h"] - before[worker] for worker in (0, 1)]
    return grown if max(grown) >= blocks else None


def router_is_up_to_date(stack: Stack) -> None:
    """No event has come for two seconds."""
    counted = [-1.0]

    def quiet() -> bool:
        counted.append(sum(count for name, count in stack.frontend_figures().items() if name.startswith("events ")))
        return len(set(counted[-5:])) == 1

    wait_until("events have all arrived", quiet)
