"""A cache that outlives the engine belongs to the weights that the engine had loaded, whatever its files say."""

from __future__ import annotations

import json
import shutil

import pytest
from engines import do, generate, prompt

pytestmark = pytest.mark.engine

PROMPT = prompt(70, 400)
BLOCKS = 12
FILE = "model.safetensors"
RANKS = {"env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}


def settings(folder, **more):
    return {
        "cpu_cache_override_num_blocks": 64,
        "disk_cache_override_num_blocks": 64,
        "disk_cache_dir": str(folder),
        "disable_disk_offload_filter": True,
        **more,
    }


@pytest.fixture
def folder(model, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(model, copy)  # with its times
    return copy


def change_one_value(folder):
    """The last value of a projection that ranks share by columns: it is the last rank's. Size and times stay."""
    import os

    from safetensors.torch import load_file, save_file

    file = folder / FILE
    status = file.stat()
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.o_proj.weight"][-1, -1] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (status.st_size, status.st_mtime_ns)


STEPS = [generate(PROMPT, name="answer"), do("drain"), do("state", "end")]


def found(story):
    """(tokens of the prompt that were in a cache, blocks that came from disk)"""
    return story["answer"]["cached"][0], story["end"]["from_disk"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_weights_in_files_that_look_the_same_find_nothing(ranks, run_scenario, folder, model, tmp_path):
    options = {"engine": {"model": str(folder), "tensor_parallel_size": ranks}, **(RANKS if ranks == 2 else {})}
    kvbm = settings(tmp_path / "disk")
    assert found(run_scenario(STEPS, kvbm, **options)) == (0, 0)
    change_one_value(folder)
    assert found(run_scenario(STEPS, kvbm, **options)) == (0, 0)
    shutil.copy2(f"{model}/{FILE}", folder / FILE)
    story = run_scenario(STEPS, kvbm, **options)
    assert found(story) == (BLOCKS * 32, BLOCKS)
    assert story["end"]["faults"] == {}


@pytest.mark.parametrize("kept", ["disk", pytest.param("host", marks=pytest.mark.long)])
def test_a_folder_that_is_replaced_while_the_engine_starts_names_no_cache(
    kept, run_scenario, folder, tmp_path, tmp_path_factory
):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    change_one_value(other)
    kvbm = settings(tmp_path / "disk")
    if kept == "host":
        memory = tmp_path_factory.mktemp("shm")
        kvbm = {"cpu_cache_override_num_blocks": 64, "host_persist": True, "host_persist_dir": str(memory)}
    options = {"engine": {"model": str(folder)}}
    run_scenario(STEPS, kvbm, **options, swap=[str(folder), str(other)])
    assert found(run_scenario(STEPS, kvbm, **options)) == (0, 0)
    # The engine after it loads the same weights, and finds them: a cache that keeps nothing would pass so far.
    tokens, _ = found(run_scenario(STEPS, kvbm, **options))
    assert tokens == BLOCKS * 32


def test_every_value_that_vllm_has_loaded_counts(run_scenario, model):
    steps = [
        do("weights", "before", look="digest"),
        do("weights", "changes", look="changes"),
        do("weights", "packed", look="packed", checkpoint=f"{model}/{FILE}"),
        do("weights", "after", look="digest"),
    ]
    story = run_scenario(steps)
    assert story["before"] == story["after"]
    changes, packed = story["changes"], story["packed"]
    assert changes["missed"] == []
    assert changes["same at the end"]
    assert changes["tried"] > 50
    assert packed == {
        "layers": 16, "different": [], "missed": [], "repacked": 32, "same at the end": True,
    }  # fmt: skip


@pytest.fixture
def quantised(folder):
    """The same model in 8 bits: a scale for each row, activations quantised as they come."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / FILE)
    for name in [name for name in tensors if "_proj.weight" in name]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[name] = (tensors[name] / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    symmetric = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**symmetric, "strategy": "channel", "dynamic": False},
                "input_activations": {**symmetric, "strategy": "token", "dynamic": True},
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_quantised_weights_are_read_to_the_last_bit(run_scenario, quantised, tmp_path):
    options, kvbm = {"engine": {"model": str(quantised)}}, settings(tmp_path / "disk")
    look = [do("weights", "packed", look="packed", checkpoint=str(quantised / FILE)),
            do("weights", "changes", look="changes")]  # fmt: skip
    story = run_scenario([*STEPS, *look], kvbm, **options)
    assert story["packed"] == {
        "layers": 16, "different": [], "missed": [], "repacked": 0, "same at the end": True,
    }  # fmt: skip
    assert story["changes"]["missed"] == []
    assert story["changes"]["tried"] > 50
    assert found(run_scenario(STEPS, kvbm, **options)) == (BLOCKS * 32, BLOCKS)


def test_without_a_model_to_be_found_nothing_outlives_the_engine(run_scenario, tmp_path):
    broken = {"kvbm.engines.vllm.model:roots": {"returns": []}}
    story = run_scenario(STEPS, settings(tmp_path), patch=broken)
    assert story.said("Cannot fingerprint the weights; persistence is off: the loaded model was not found")
    assert (story["end"]["disk_size"], story["end"]["offloaded"] > 0) == (0, True)
    assert list(tmp_path.iterdir()) == []
    story = run_scenario(STEPS, settings(tmp_path, cpu_cache_override_num_blocks=0), patch=broken)
    assert story["end"] == {"bypassed": True}
    assert story.said("KVBM is off: the disk tier needs a fingerprint")


@pytest.mark.parametrize(("ranks", "directly"), [(1, False), (1, True), pytest.param(2, False, marks=pytest.mark.long)])
def test_new_weights_in_a_running_engine_leave_no_block_of_the_old_ones(
    ranks, directly, run_scenario, folder, tmp_path
):
    """vLLM's own reset tells its connector nothing. What comes after is for no engine with the weights on disk."""
    from safetensors.torch import load_file, save_file

    options = {"engine": {"model": str(folder), "tensor_parallel_size": ranks}, **(RANKS if ranks == 2 else {})}
    kvbm = settings(tmp_path / "disk")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = load_file(folder / FILE)
    tensors["model.layers.0.input_layernorm.weight"] *= -1.5
    save_file(tensors, other / FILE, metadata={"format": "pt"})
    wanted = run_scenario([generate(PROMPT, name="answer")], None, {"model": str(other)}).tokens("answer")
    steps = [
        generate(PROMPT, name="before"),
        do("drain"),
        do("load_weights", checkpoint=str(other / FILE), directly=directly),
        do("reset", "reset"),
        generate(PROMPT, name="after"),
        do("drain"),
        do("reset"),
        generate(PROMPT, name="again"),
        do("drain"),
        do("reset"),
        generate(PROMPT, name="kept"),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, kvbm, **options)
    assert story["reset"] is True
    assert story.tokens("before") != wanted
    assert story.tokens("after") == story.tokens("again") == story.tokens("kept") == wanted
    # With several ranks the leader hears of the new weights from the first step that uses them, and keeps none of it.
    assert story["again"]["cached"] == [BLOCKS * 32 if ranks == 1 else 0]
    assert story["kept"]["cached"] == [BLOCKS * 32]
    assert story["end"]["onboarded"] == BLOCKS * (2 if ranks == 1 else 1)
    assert story.said("The weights have changed in memory")
    assert found(run_scenario(STEPS, kvbm, **options)) == (0, 0)


@pytest.mark.matrix
def test_every_release_loads_the_same_tensors_under_the_same_names(run_scenario, model):
    """So that their digests are the same."""
    steps = [
        do("weights", "names", look="names"),
        do("weights", "packed", look="packed", checkpoint=f"{model}/{FILE}"),
        do("weights", "digest", look="digest"),
    ]
    stories = [run_scenario(steps) for _ in range(2)]
    assert stories[0]["digest"] == stories[1]["digest"]
    layers = range(4)
    expected = {"0.lm_head.weight", "0.model.embed_tokens.weight", "0.model.norm.weight"}
    for part in (
        "input_layernorm", "mlp.down_proj", "mlp.gate_up_proj", "post_attention_layernorm", "self_attn.k_norm",
        "self_attn.o_proj", "self_attn.q_norm", "self_attn.qkv_proj",
    ):  # fmt: skip
        expected |= {f"0.model.layers.{layer}.{part}.weight" for layer in layers}
    for buffer in ("_k_scale", "_prob_scale", "_q_scale", "_v_scale"):
        expected |= {f"0.model.layers.{layer}.self_attn.attn.{buffer}" for layer in layers}
    expected.add("0.model.layers.0.self_attn.rotary_emb.cos_sin_cache")  # which the layers share
    assert set(stories[0]["names"]) == expected
    assert (stories[0]["packed"]["different"], stories[0]["packed"]["missed"]) == ([], [])
