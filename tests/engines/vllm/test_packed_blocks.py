"""Packed blocks under a real vLLM: the tokens are those of vLLM alone, from host memory and from disk."""

from __future__ import annotations

import pytest
from engines import do, generate, prompt

pytestmark = [pytest.mark.engine, pytest.mark.long]

BFLOAT16 = {"dtype": "bfloat16"}
PROMPTS = [prompt(70 + i, 300) for i in range(4)]


def settings(folder, **more):
    return {
        "cpu_cache_override_num_blocks": 100,
        "disk_cache_override_num_blocks": 100,
        "disk_cache_dir": str(folder),
        "disable_disk_offload_filter": True,
        "pack": "on",
        **more,
    }


def steps():
    return [
        *(generate(each, name=f"first {i}") for i, each in enumerate(PROMPTS)),
        do("drain"),
        do("reset"),
        *(generate(each, name=f"again {i}") for i, each in enumerate(PROMPTS)),
        do("drain"),
        do("state", "end"),
        do("metrics", "metrics"),
    ]


def test_packed_blocks_give_the_tokens_of_vllm_alone(run_scenario, baseline, tmp_path):
    alone = baseline(PROMPTS, engine=BFLOAT16)
    story = run_scenario(steps(), settings(tmp_path), BFLOAT16)
    for name in ("first", "again"):
        assert [story.tokens(f"{name} {i}")[0] for i in range(4)] == alone
    end, metrics = story["end"], story["metrics"]
    assert end["onboarded"] >= 4 * 8
    assert end["spilled"] >= 4 * 8
    assert metrics["kvbm_packed_ratio"] < 0.77
    assert metrics["kvbm_unpackable_blocks"] == 0
    assert not end["faults"]

    restarted = run_scenario(steps(), settings(tmp_path), BFLOAT16)
    for name in ("first", "again"):
        assert [restarted.tokens(f"{name} {i}")[0] for i in range(4)] == alone
    assert restarted["end"]["from_disk"] >= 4 * 8

    raw = run_scenario(steps(), settings(tmp_path, pack="off"), BFLOAT16)
    assert raw["end"]["from_disk"] == 0  # the packed cache is not this engine's
    assert [raw.tokens(f"again {i}")[0] for i in range(4)] == alone
