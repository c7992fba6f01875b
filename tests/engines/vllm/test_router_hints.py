"""Hints of a router in a real vLLM: good ones start the lookup at arrival, and no bad one costs more than the hit."""

from __future__ import annotations

import socket
import tempfile

import pytest
from engines import do, generate, prompt

pytestmark = pytest.mark.engine

ADDED = {"toy_tier.plugin:REGISTERED": True, "toy_tier:SIZE": 200, "toy_tier.catalog:IS_REMOTE": True}
PROMPT = prompt(700, 200)  # six blocks of 32 tokens, and a rest
ENDPOINT = "tcp://10.0.0.4:23280"


def fetch(hashes, endpoint=ENDPOINT, kind="kv.fetch", version="1.0", protocol="0.1", **more):
    payload = {"block_hashes": hashes, "source_control_endpoint": endpoint, **more}
    action = {"action_id": "a1", "action_type": kind, "action_version": version, "payload": payload}
    return {"protocol_version": protocol, "message_id": "r", "actions": [action]}


def broken(payload):
    return {**fetch(1), "actions": [{**fetch(1)["actions"][0], "payload": payload}]}


BAD = {
    "unknown action": fetch(6, kind="kv.pin"),
    "unknown version": fetch(6, version="2.0"),
    "unknown protocol": fetch(6, protocol="7.0"),
    "no actions": {"protocol_version": "0.1", "message_id": "", "actions": []},
    "lying": fetch([1, 2, 3]),
    "negative": fetch([-1]),
    "too large": fetch([1 << 64]),
    "no hashes": fetch([]),
    "not hashes": fetch("abc"),
    "no endpoint": broken({"block_hashes": [1]}),
    "every address": fetch(6, endpoint="tcp://0.0.0.0:1"),
    "another scheme": fetch(6, endpoint="file:///etc/passwd"),
    "nothing": broken({}),
    "not even an object": broken(None),
    "deep": broken({"block_hashes": [[[[1]]]], "source_control_endpoint": {"a": 1}}),
}


# Addresses that a hint may name, and nothing serves blocks there.
LYING = {
    "nothing listens": fetch(6, endpoint="tcp://127.0.0.1:1"),
    "another server": None,  # its port is known when the test runs
    "not reachable": fetch(6, endpoint="tcp://192.0.2.1:23280"),
    "no such name": fetch(6, endpoint="tcp://peer.invalid:23280"),
}


def add(name, envelope=None, params=None):
    return do(
        "call", target="toy_tier.plugin:add_hinted", request=name, tokens=PROMPT, envelope=envelope, params=params
    )


def test_hints_reach_the_tier_when_a_request_arrives_and_bad_ones_cost_nothing(run_scenario, baseline):
    source = {"kv_request_id": "x", "remote_host": "10.0.0.5", "remote_port": 7}
    steps = [
        # Nothing has been scheduled when the tier hears of the first hint.
        add("good", fetch(6)),
        do("call", "at arrival", target="toy_tier.plugin:hints"),
        do("finish", "good"),
        do("call", target="toy_tier.plugin:forget"),
        add("half a lie", fetch(4)),
        do("call", "half", target="toy_tier.plugin:hints"),
        do("finish", "half a lie"),
        do("call", target="toy_tier.plugin:forget"),
        add("client", params={"remote_kv_source": source}),
        do("call", "of a client", target="toy_tier.plugin:hints"),
        do("finish", "client"),
    ]
    for name, envelope in BAD.items():
        steps += [do("call", target="toy_tier.plugin:forget"), add(name, envelope), do("finish", name)]
    steps += [
        do("call", target="toy_tier.plugin:forget"),
        add("bad client", params={"remote_kv_source": {"remote_host": 7}}),
        do("finish", "bad client"),
        do("call", "end", target="toy_tier.plugin:hints"),
        generate(PROMPT, name="alive"),
        do("metrics", "metrics"),
    ]
    story = run_scenario(steps, {"cpu_cache_override_num_blocks": 100}, patch=ADDED)
    (wanted,) = baseline([PROMPT])
    for name in ("good", "half a lie", "client", *BAD, "bad client"):
        assert story[name][name] == wanted[: len(story[name][name])], name
        assert len(story[name][name]) == 8
    assert story.tokens("alive") == [wanted]
    assert story["at arrival"]["told"] == [["10.0.0.4:23280", 6, True, 0]]
    assert story["half"]["told"][-1][:2] == ["10.0.0.4:23280", 4]
    assert story["of a client"]["told"][-1][:3] == ["10.0.0.5:7", 0, False]
    counts = story["end"]["counts"]
    assert counts["taken"] == 3
    assert counts["stale"] == 1
    assert counts["unknown"] == 4
    assert counts["malformed"] == len(BAD) - 5 + 1
    assert story["metrics"]["kvbm_hints"] == sum(counts.values())


def test_hints_to_peers_that_are_not_there_cost_the_hit(run_scenario, baseline):
    """With the real tier for peers: good hashes, and an address where no peer answers, or not as one."""
    (wanted,) = baseline([PROMPT])
    with socket.create_server(("127.0.0.1", 0)) as silent, tempfile.TemporaryDirectory(dir="/tmp") as folder:
        envelopes = {**LYING, **BAD, "another server": fetch(6, endpoint=f"tcp://127.0.0.1:{silent.getsockname()[1]}")}
        steps = []
        for name, envelope in envelopes.items():
            steps += [do("call", target="toy_tier.plugin:forget_near"), add(name, envelope), do("finish", name)]
        steps += [do("call", "end", target="toy_tier.plugin:hints"), do("state", "leader")]
        settings = {
            "cpu_cache_override_num_blocks": 100, "peers_enabled": True, "peer_dir": folder, "load": "always",
            "peer_secret": "a secret of the tests",
        }  # fmt: skip
        story = run_scenario(steps, settings)
    for name in envelopes:
        assert story[name][name] == wanted[:8], name
    counts = story["end"]["counts"]
    assert counts == {"taken": len(LYING), "stale": 1, "unknown": 4, "malformed": len(BAD) - 5}
    assert story["leader"]["requests"] == 0
