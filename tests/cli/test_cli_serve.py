"""`kvbm serve` and `kvbm size`: the command that is run, and sizes that agree with the engine's."""

from __future__ import annotations

import http.server
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from kvbm.cli import main as cli
from kvbm.cli import model_kv, serve
from kvbm.cli.main import main
from kvbm.engines.vllm import sockets
from kvbm.engines.vllm.transfer_config import TRANSFER
from servers import free_port

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
        if "--port" not in " ".join(arguments):
            arguments = (*arguments, f"--port={free_port()}")  # another program may have the usual one
        main(["serve", *arguments, "--force"])  # this machine may be too small for the sizes of the tests
        return became[-1]

    yield run
    for _, _, environment in became:
        shutil.rmtree(environment.get(sockets.VARIABLE, ""), ignore_errors=True)


def test_serve_gives_vllm_a_directory_for_its_sockets(run, tmp_path, monkeypatch):
    folder = Path(run("m", "--cpu-gb", "0.1")[2][sockets.VARIABLE])
    assert folder.parent == Path(tempfile.gettempdir())
    monkeypatch.setenv(sockets.VARIABLE, str(folder))
    assert run("m", "--cpu-gb", "0.1")[2][sockets.VARIABLE] == str(folder)  # the user's own
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(folder / "socket"))
    (folder / "file").touch()
    sockets.remove_directory()
    assert [path.name for path in folder.iterdir()] == ["file"]  # of somebody else
    (folder / "file").unlink()
    sockets.remove_directory()
    assert not folder.exists()
    sockets.remove_directory()
    monkeypatch.setenv(sockets.VARIABLE, str(tmp_path))
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(tmp_path / "socket"))
    sockets.remove_directory()
    assert (tmp_path / "socket").exists()
    monkeypatch.delenv(sockets.VARIABLE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 80)))
    assert sockets.VARIABLE not in run("m", "--cpu-gb", "0.1")[2]  # no room for the name of a socket


def test_serve_becomes_vllm_with_the_connector_and_the_size(run):
    port = f"--port={free_port()}"
    _, command, environment = run("some/model", "--tensor-parallel-size", "2", "--cpu-gb", "100", port, "-O3")
    assert command[1:4] == ["serve", "some/model", "--kv-transfer-config"]
    assert json.loads(command[4]) == TRANSFER
    assert command[5:] == ["--tensor-parallel-size", "2", port, "-O3"]
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
        (["m"], "add --cpu-gb GB"),
        (["m", "--cpu-gb", "-3"], "--cpu-gb '-3': expected a number"),
        (["m", "--cpu-gb=-3"], "--cpu-gb '-3': expected a number"),
        (["m", "--cpu-gb", "20GB"], "--cpu-gb '20GB': expected a number"),
        (["m", "--cpu-gb", "1", "--disk-dir", "/mnt/x"], "add --disk-gb"),
        (["m", "--cpu-gb", "1000000", f"--port={free_port()}"], "add --force"),
        (["", "--cpu-gb", "1"], "MODEL is empty"),
        (["m", "--cpu-gb", "1", "--disk-gb", "5", "--disk-dir", ""], "--disk-dir is empty"),
        (["/no/such/model", "--cpu-gb", "1"], "MODEL /no/such/model does not exist"),
        (["m", "--cpu-gb", "1", "--port", "6880"], "port 6880 is that of the status page too"),
        (["m", "--cpu-gb", "1", "--port", "-5"], "--port -5: expected a whole number"),
        (["m", "--cpu-gb", "1", "--port", "80a"], "--port 80a: expected a whole number"),
        (["m", "--cpu-gb", "1", "--host", "192.0.2.1"], "with --host"),  # an address of no machine
        (["--tensor-parallel-size", "2", "m"], "MODEL comes first"),
        (["m", "--cpu-gb", "1", "--kv-transfer-config", "{}"], "leave it out"),
        (["m", "--cpu-gb", "1", "--kv_transfer_config={}"], "leave it out"),
        (["m", "--cpu-gb", "1", "--cpu-bg", "100"], "did you mean --cpu-gb?"),
        (["m", "--disk_gbs=5"], "did you mean --disk-gb?"),
        (["m", "--cpu-gb", "1", "--kv-offloading-size", "10"], "--kv-offloading-size starts vLLM's own offloading"),
        (["m", "--cpu-gb", "1", "--kv_offloading_size=10"], "--kv-offloading-size starts vLLM's own offloading"),
        (["m", "--cpu-gb", "1", "-dcp", "2"], "does not support context parallelism"),
        (["m", "--cpu-gb", "1", "--prefill-context-parallel-size=2"], "does not support context parallelism"),
        ([str(Path(__file__).parent), "--cpu-gb", "1"], "is a folder without config.json"),
        (["no/such-model", "--cpu-gb", "1"], "HF_HUB_OFFLINE forbids to download it"),
    ],
)
def test_serve_refuses_what_cannot_start(arguments, problem, monkeypatch, capsys):
    if "OFFLINE" in problem:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(os, "execve", lambda *command: pytest.fail("started"))
    try:
        code = main(["serve", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "given", "expected"),
    [
        ({"DYN_KVBM_CPU_CACHE_GB": "1"}, [], []),  # nothing outlives the engine
        ({"DYN_KVBM_CPU_CACHE_GB": "1", "DYN_KVBM_DISK_CACHE_GB": "2"}, [], ["--shutdown-timeout", "10"]),
        ({"DYN_KVBM_CPU_CACHE_GB": "1", "KVBM_HOST_PERSIST": "1"}, [], ["--shutdown-timeout", "10"]),
        ({"DYN_KVBM_DISK_CACHE_GB": "2"}, ["--shutdown-timeout", "30"], ["--shutdown-timeout", "30"]),
        ({"DYN_KVBM_DISK_CACHE_GB": "2"}, ["--shutdown_timeout=0"], ["--shutdown_timeout=0"]),
        ({"DYN_KVBM_DISK_CACHE_GB": "2"}, ["--config", "vllm.yaml"], ["--config", "vllm.yaml"]),  # it may stand there
    ],
)
def test_serve_gives_vllm_time_to_write_what_is_queued(settings, given, expected, vllm, monkeypatch, capsys):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "m", "--print", *given]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[words.index("--kv-transfer-config") + 2 :] == expected
    vllm.write_text("class EngineArgs: pass\n")  # a release without the option
    assert main(["serve", "m", "--print", *given]) == 0
    assert "--shutdown-timeout 10" not in capsys.readouterr().out


@pytest.fixture
def vllm(monkeypatch, tmp_path):
    """The file of the installed vLLM that declares its options."""
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    file = tmp_path / "vllm" / "engine" / "arg_utils.py"
    file.write_text('parser.add_argument(\n    "--shutdown-timeout",\n    type=int,\n)\n')
    real = metadata.distribution

    def distribution(name):
        return SimpleNamespace(locate_file=lambda path: tmp_path / path) if name == "vllm" else real(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    return file


def test_serve_says_what_is_wrong_with_the_machine_and_goes_on_if_forced(run, tmp_path, capsys):
    (tmp_path / "file").touch()
    run("m", "--cpu-gb", "100000", "--disk-gb", "200000", "--disk-dir", str(tmp_path / "file"))
    said = " ".join(capsys.readouterr().err.split())
    assert "--cpu-gb 100000 asks for 100 TB" in said
    assert f"--disk-dir {tmp_path / 'file'}: {tmp_path / 'file'} is not a directory" in said
    assert "Choose another directory: --disk-dir /mnt" in said


def test_serve_names_variables_where_the_user_set_variables(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(os, "execve", lambda *command: pytest.fail("started"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "100000")
    disk = ["--disk-gb", "200000", "--disk-dir", str(tmp_path / "file")]
    assert main(["serve", "m", *disk, f"--port={free_port()}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "DYN_KVBM_CPU_CACHE_GB=100000 asks for 100 TB" in said
    assert f"--disk-dir {tmp_path / 'file'}: " in said
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "many")
    assert main(["serve", "m", "--disk-gb", "2"]) == 2
    assert "DYN_KVBM_CPU_CACHE_GB='many' (environment)" in capsys.readouterr().err


def test_serve_stops_at_a_misspelt_setting(monkeypatch, capsys):
    monkeypatch.setattr(os, "execve", lambda *command: pytest.fail("started"))
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_BG", "1")
    assert main(["serve", "m", "--cpu-gb", "0.1", "--port", str(free_port())]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "DYN_KVBM_CPU_CACHE_BG (environment) is not a setting" in said
    assert "did you mean DYN_KVBM_CPU_CACHE_GB?" in said


@pytest.mark.parametrize("form", ["--port {}", "--port={}", "--host 127.0.0.1 --port {}"])
def test_serve_names_a_port_that_is_in_use(form, monkeypatch, capsys):
    monkeypatch.setattr(os, "execve", lambda *command: pytest.fail("started"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "m", "--cpu-gb", "0.1", *form.format(port).split()]) == 2
    said = capsys.readouterr().err
    assert f"cannot listen on port {port}" in said
    assert f"--port {port + 1}" in said


def test_serve_leaves_the_port_to_vllm_where_it_does_not_know_it():
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        for arguments in (["--uds", "/tmp/x", "--port", port], ["--headless", "--port", port], ["--config", "x.yaml"]):
            assert serve._port_problem(arguments) == ""


def test_serve_without_vllm_says_where_it_looked(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["serve", "m", "--cpu-gb", "1"]) == 2
    assert f"vLLM is not installed in {sys.prefix}" in capsys.readouterr().err


def test_print_prints_a_line_for_a_shell(capsys, tmp_path, monkeypatch):
    (tmp_path / "vllm").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    command = ["serve", "m", "--cpu-gb", "0.1", f"--port={free_port()}", "--print", "--no-metrics", "--dtype", "half"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    words = shlex.split(out)
    assert err == ""
    assert words[0] == "DYN_KVBM_CPU_CACHE_GB=0.1"
    assert words[-2:] == ["--dtype", "half"]


def test_print_says_what_would_stop_the_command_here(capsys, tmp_path, monkeypatch):
    (tmp_path / "vllm").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_BG", "1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "m", "--cpu-gb", "0.1", f"--port={port}", "--print"]) == 0
    out, err = capsys.readouterr()
    assert shlex.split(out)[-1] == f"--port={port}"  # for another machine it may be right
    assert "did you mean DYN_KVBM_CPU_CACHE_GB?" in " ".join(err.split())
    assert f"cannot listen on port {port}" in err
    assert err.endswith("as things are, this command would not start here\n")


@pytest.mark.parametrize("command", [module.NAME for module in cli.COMMANDS if module.NAME != "serve"])
def test_other_commands_refuse_unknown_arguments(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, *(["ls"] if command == "cache" else ["list"] if command == "control" else []), "--nonsense"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"usage: kvbm {command}")
    # argparse complains of a missing model or trace first.
    assert "--nonsense" in said or command in ("size", "simulate")


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


@pytest.mark.parametrize(
    ("arguments", "row"),
    [
        (["--tokens", "1M"], "1,000,000 tokens      62,500 blocks, 147 GB"),
        (["--tokens", "128k"], "128,000 tokens        8,000 blocks, 18.9 GB"),
        (["--tokens", "2,000,000"], "2,000,000 tokens      125,000 blocks, 295 GB"),
        (["--cpu-gb", "80GB"], "80 GB                 33,908 blocks, 542,528 tokens"),
        (["--cpu-gb", "80GiB"], "85.8993 GB            36,408 blocks, 582,528 tokens"),
        (["--tp", "2"], "2.36 MB on 2 ranks together"),
        (["-tp", "2"], "2.36 MB on 2 ranks together"),
    ],
)
def test_size_reads_amounts_with_their_units(folder, arguments, row, capsys):
    assert main(["size", folder, *arguments]) == 0
    assert row in capsys.readouterr().out


def test_size_says_when_the_gpu_is_enough(folder, capsys):
    assert main(["size", folder, "--gpu-memory", "80", "--tokens", "1000"]) == 0
    assert "1,000 tokens fit into the engine's own cache" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpu-memory", "16"], "leave nothing for KV"),
        (["--gpu-memory", "-1"], "expected a size above 0 in GB"),
        (["--gpu-memory", "80KB"], "for example 80, 80GB or 80GiB"),
        (["--tokens", "0,5"], "for example 2000000, 128k or 1.5M"),
        (["--tp", "2.5"], "expected a whole number above 0"),
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
    assert main(["size", str(tmp_path / "gone")]) == 1
    assert "there is no such folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert main(["size", str(tmp_path / "config.json")]) == 1
    assert f"it is a file; give the folder of the model, {tmp_path}" in capsys.readouterr().err
    assert main(["size", str(tmp_path)]) == 1
    assert "'num_hidden_layers'" in capsys.readouterr().err
    for content, problem in (
        (b"{", "cannot be read: Expecting"),
        (b"\xff", "cannot be read: "),
        (b"[]", "is not a JSON"),
    ):
        (tmp_path / "config.json").write_bytes(content)
        assert main(["size", str(tmp_path)]) == 1
        assert f"{tmp_path / 'config.json'} {problem}" in capsys.readouterr().err


class Unavailable(http.server.BaseHTTPRequestHandler):
    """A model hub that cannot answer now."""

    def do_HEAD(self):
        self.server.asked.append(self.path)
        self.send_error(503)

    def log_message(self, *_):
        pass


def test_size_asks_a_hub_that_does_not_answer_once(tmp_path):
    with http.server.HTTPServer(("127.0.0.1", 0), Unavailable) as hub:
        hub.asked = []
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{hub.server_port}"
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "NO_PROXY": "*"}
        environment.pop("HF_HUB_OFFLINE", None)
        done = subprocess.run(
            [sys.executable, "-m", "kvbm.cli.main", "size", "some/model"],
            env=environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        hub.shutdown()
    assert done.returncode == 1
    assert f"some/model: config.json cannot be fetched from {address}: " in done.stderr
    assert "503" in done.stderr
    assert hub.asked == ["/some/model/resolve/main/config.json"]
