"""Packed blocks under a real vLLM: its tokens are those of vLLM alone, also where blocks do not fit."""

from __future__ import annotations

import shutil
import stat

import pytest
import torch
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


@pytest.fixture(scope="module")
def wide(model, tmp_path_factory):
    """The tiny model with values of V over more than a hundred powers of two, in every group of neighbours."""
    safetensors = pytest.importorskip("safetensors.torch")
    folder = tmp_path_factory.mktemp("models") / "wide"
    shutil.copytree(model, folder)
    weights = safetensors.load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "v_proj" in name:
            weight *= 2.0 ** -(7.0 * (torch.arange(len(weight)) % 16))[:, None]
    safetensors.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def test_a_model_whose_blocks_do_not_fit_is_noted_and_not_packed_again(run_scenario, baseline, tmp_path, wide):
    engine = {**BFLOAT16, "model": wide}
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    host = {"cpu_cache_override_num_blocks": 100}
    alone = baseline(PROMPTS, engine=engine)

    def run(pack):
        story = run_scenario(steps(), {**host, "pack": pack}, engine, env)
        for name in ("first", "again"):
            assert [story.tokens(f"{name} {i}")[0] for i in range(4)] == alone
        assert not story["end"]["faults"]
        return story

    packed = run("on")
    assert packed["metrics"]["kvbm_unpackable_blocks"] >= 4 * 8
    assert packed["end"]["onboarded"] == 0
    (note,) = (tmp_path / "kvbm" / "kvbm-unpackable").iterdir()
    assert "wide" in note.name
    assert stat.S_IMODE(note.stat().st_mode) == 0o600
    assert "With KVBM_PACK=auto the next start does not pack blocks of this model" in packed.output

    raw = run("auto")
    assert raw["metrics"]["kvbm_packed_ratio"] == 1
    assert raw["end"]["onboarded"] >= 4 * 8
    assert "KVBM_PACK=auto: blocks of this KV cache are not packed: too many of this model's blocks" in raw.output

    assert "KVBM_PACK=on packs blocks, although too many of this model's blocks did not fit" in run("on").output
