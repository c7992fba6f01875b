"""The tier under SGLang's page store and TensorRT-LLM's simulator: another instance finds what one has written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from object_servers import BUCKET

from tiernames import OBJECT

ENGINES = Path(__file__).parents[2] / "engines"
sys.path += [str(ENGINES / "sglang"), str(ENGINES / "trtllm")]


def settings(weed):
    found = weed.settings()
    return {
        "object_enabled": True, "object_bucket": BUCKET, "object_endpoint": found.endpoint,
        "object_access_key": found.access_key, "object_secret_key": found.secret_key, "object_timeout_secs": 30.0,
        "object_lookup_secs": 30.0, "disable_disk_offload_filter": True,
    }  # fmt: skip


def test_pages_of_sglang(weed, tmp_path):
    """SGLang asks once. Its thread waits for the answer of the bucket, so an empty machine finds the pages at once."""
    from engine_pages import get, keys, open_store, put, wait_until

    cache = {"engine": "sglang", "model": os.urandom(8).hex(), "layout": "x"}
    numbers = list(range(40))
    first = open_store(tmp_path / "a", host=200, disk=0, cache=cache, **settings(weed))
    try:
        assert first.count(keys(*numbers)) == 0
        assert all(put(first, numbers))
        wait_until(lambda: not first.leader.moves_under_way)
        assert first.counts.moved_blocks == {OBJECT: 40}
    finally:
        first.close()
    second = open_store(tmp_path / "b", host=200, disk=0, cache=cache, **settings(weed))
    try:
        assert second.count(keys(*numbers, 1000)) == 40
        assert get(second, numbers) == numbers
        assert second.counts.onboarded_blocks[OBJECT] == 40
    finally:
        second.close()


@pytest.mark.simulated
def test_prompts_of_tensorrt_llm(weed):
    """TensorRT-LLM asks once and never waits: a first request starts the check, and a later one finds the blocks."""
    from test_trtllm_sim import RANDOM, check, counts, serve

    found = weed.settings()
    env = {
        "DYN_KVBM_OBJECT_ENABLED": "1", "DYN_KVBM_OBJECT_BUCKET": f"{BUCKET}", "KVBM_OBJECT_TIMEOUT_SECS": "30",
        "DYN_KVBM_OBJECT_ENDPOINT": found.endpoint, "DYN_KVBM_OBJECT_ACCESS_KEY": found.access_key,
        "DYN_KVBM_OBJECT_SECRET_KEY": found.secret_key, "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "1",
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "40",
    }  # fmt: skip
    first = serve(RANDOM, env=env, blocks=24, timeout=120)
    check(RANDOM, first)
    assert counts(first).moved_blocks[OBJECT] > 50
    second = serve(RANDOM, env=env, blocks=24, timeout=120)
    check(RANDOM, second)
    assert counts(second).onboarded_blocks[OBJECT] > 0
