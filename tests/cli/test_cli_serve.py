"""`kvbm serve` and `kvbm size`: the command that is run, and sizes that agree with the engine's."""

from __future__ import annotations

import json
import os
import shlex
import sys

import pytest

from kvbm.cli import main as cli
from kvbm.cli import model_kv
from kvbm.cli.main import main
from kvbm.engines.vllm.transfer_config import TRANSFER

QWEN3_8B = {
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in list(os.environ):
        if "KVBM" in name:
            monkeypatch.delenv(name)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the command, and returns what it would have become: (program, arguments, environment)."""
    (tmp_path / "vllm").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    became = []
    monkeypatch.setattr(os, "execve", lambda *command: became.append(command))

    def run(*arguments):
        main(["serve", *arguments, "--force"])  # this machine may be too small for the sizes of the tests
        (command,) = became
        return command

    return run


def test_serve_becomes_vllm_with_the_connector_and_the_size(run):
    _, command, environment = run("some/model", "--tensor-parallel-size", "2", "--cpu-gb", "100", "--port=8001", "-O3")
    assert command[1:4] == ["serve", "some/model", "--kv-transfer-config"]
    assert json.loads(command[4]) == TRANSFER
    assert command[5:] == ["--tensor-parallel-size", "2", "--port=8001", "-O3"]
    assert environment["DYN_KVBM_CPU_CACHE_GB"] == "100"
    assert environment["DYN_KVBM_METRICS"] == "1"


def test_serve_sets_up_a_disk_tier_and_keeps_the_users_own_settings(run, monkeypatch):
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "7")
    monkeypatch.setenv("DYN_KVBM_METRICS", "0")
    environment = run("m", "--disk-gb", "400", "--disk-dir", "/mnt/x")[2]
    names = ("CPU_CACHE_GB", "METRICS", "DISK_CACHE_GB", "DISK_CACHE_DIR")
    assert [environment[f"DYN_KVBM_{name}"] for name in names] == ["7", "0", "400", "/mnt/x"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["m"], "DYN_KVBM_CPU_CACHE_GB"),
        (["m", "--cpu-gb", "-3"], "DYN_KVBM_CPU_CACHE_GB='-3'"),
        (["m", "--cpu-gb=-3"], "DYN_KVBM_CPU_CACHE_GB='-3'"),
        (["m", "--cpu-gb", "20GB"], "DYN_KVBM_CPU_CACHE_GB='20GB'"),
        (["m", "--cpu-gb", "1", "--disk-dir", "/mnt/x"], "add --disk-gb"),
        (["m", "--cpu-gb", "1000000"], "add --force"),
        (["--tensor-parallel-size", "2", "m"], "MODEL comes first"),
        (["m", "--cpu-gb", "1", "--kv-transfer-config", "{}"], "leave it out"),
        (["m", "--cpu-gb", "1", "--kv_transfer_config={}"], "leave it out"),
    ],
)
def test_serve_refuses_what_cannot_start(arguments, problem, monkeypatch, capsys):
    monkeypatch.setattr(os, "execve", lambda *command: pytest.fail("started"))
    try:
        code = main(["serve", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert problem in capsys.readouterr().err


def test_serve_says_what_is_wrong_with_the_machine_and_goes_on(run, tmp_path, capsys):
    (tmp_path / "file").touch()
    run("m", "--cpu-gb", "100000", "--disk-gb", "200000", "--disk-dir", str(tmp_path / "file"))
    said = capsys.readouterr().err
    assert "DYN_KVBM_CPU_CACHE_GB=100000 asks for 100 TB" in said
    assert "is not a directory" in said


def test_serve_without_vllm_says_where_it_looked(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["serve", "m", "--cpu-gb", "1"]) == 2
    assert f"vLLM is not installed in {sys.prefix}" in capsys.readouterr().err


def test_print_prints_a_line_for_a_shell(capsys):
    assert main(["serve", "m", "--cpu-gb", "1", "--print", "--dtype", "half"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == "DYN_KVBM_CPU_CACHE_GB=1"
    assert words[-2:] == ["--dtype", "half"]


@pytest.mark.parametrize("command", [module.NAME for module in cli.COMMANDS if module.NAME != "serve"])
def test_other_commands_refuse_unknown_arguments(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, *(["ls"] if command == "cache" else ["list"] if command == "control" else []), "--nonsense"])
    assert stop.value.code == 2
    # argparse complains of a missing model or trace first.
    assert "--nonsense" in capsys.readouterr().err or command in ("size", "simulate")


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "ranks", "dtype", "expected"),
    [
        ({}, 1, "auto", 147_456),  # 36 layers, keys and values, 8 heads of 128 bfloat16
        ({}, 2, "auto", 147_456),
        ({}, 16, "auto", 294_912),  # 8 heads on 16 ranks: each is on two
        ({}, 1, "fp8", 73_728),
        ({"num_key_value_heads": None, "head_dim": None}, 1, "auto", 589_824),  # no grouped queries
        ({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 8, "auto", 70_272),  # DeepSeek-V3
        ({"layer_types": ["linear_attention"] * 27 + ["full_attention"] * 9}, 1, "auto", 36_864),
    ],
)
def test_bytes_of_a_token(changes, ranks, dtype, expected):
    assert model_kv.describe({**QWEN3_8B, **changes}, dtype).token_bytes(ranks) == expected
    nested = {"model_type": "some_vl", "text_config": {**QWEN3_8B, **changes}}
    assert model_kv.describe(nested, dtype).token_bytes(ranks) == expected


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(16_400_000_000)
    return str(tmp_path)


def test_size_tells_blocks_and_gigabytes_and_what_to_choose(folder, capsys):
    assert main(["size", folder, "--gpu-memory", "80", "--tokens", "2000000", "--cpu-gb", "100"]) == 0
    out = capsys.readouterr().out
    assert "a block of 16 tokens    2.36 MB" in out
    assert "the engine's own cache  about 55.6 GB: 23,566 blocks, 377,056 tokens" in out
    assert "100 GB                  42,385 blocks, 678,160 tokens" in out
    assert "2,000,000 tokens        125,000 blocks, 295 GB" in out
    assert "Choose --cpu-gb 295 or more" in out


def test_size_says_when_the_gpu_is_enough(folder, capsys):
    assert main(["size", folder, "--gpu-memory", "80", "--tokens", "1000"]) == 0
    assert "1,000 tokens fit into the engine's own cache" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpu-memory", "16"], "leave nothing for KV"),
        (["--gpu-memory", "-1"], "expected a number above 0"),
        (["--block-size", "0"], "expected a whole number above 0"),
        (["--gpu-memory-utilization", "9"], "up to 1"),
    ],
)
def test_size_refuses_what_makes_no_sense(folder, arguments, problem, capsys):
    try:
        code = main(["size", folder, *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code in (1, 2)
    assert problem in capsys.readouterr().err


def test_size_of_a_folder_without_a_model(tmp_path, capsys):
    assert main(["size", str(tmp_path)]) == 1
    assert "has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert main(["size", str(tmp_path)]) == 1
    assert "'num_hidden_layers'" in capsys.readouterr().err
