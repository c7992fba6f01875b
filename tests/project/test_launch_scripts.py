"""The launch scripts: what they would start, and that they end what they have started."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvbm import config as settings
from processes import heed_interrupts

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*/launch/*_*.sh"))
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
# Frontend, then each worker's role.
EXPECTED = {
    "vllm/agg_kvbm.sh": ["frontend", "kvbm"],
    "vllm/agg_kvbm_router.sh": ["frontend", "kvbm", "kvbm"],
    "vllm/agg_kvbm_peers.sh": ["frontend", "kvbm", "kvbm"],
    "vllm/disagg_kvbm.sh": ["frontend", "decode", "prefill"],
    "vllm/disagg_kvbm_2p2d.sh": ["frontend", "decode", "decode", "prefill", "prefill"],
    "vllm/disagg_kvbm_router.sh": ["frontend", "decode", "decode", "prefill", "prefill"],
    "trtllm/agg_kvbm.sh": ["frontend", "kvbm"],
    "trtllm/agg_kvbm_router.sh": ["frontend", "kvbm", "kvbm"],
    "trtllm/disagg_kvbm.sh": ["frontend", "decode", "prefill"],
    "trtllm/serve_kvbm.sh": ["kvbm"],
}


def name_of(path: Path) -> str:
    return f"{path.parts[-3]}/{path.name}"


def run(path: Path, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([path], capture_output=True, text=True, timeout=60, env={**os.environ, **env})


def plan(path: Path, **env: str) -> list[tuple[dict[str, str], list[str]]]:
    """(settings, command) of every process that a script would start."""
    done = run(path, KVBM_DRY_RUN="1", **env)
    assert done.returncode == 0, done.stderr
    found = []
    for line in done.stdout.splitlines():
        words = shlex.split(line)
        given = 0
        while "=" in words[given] and not words[given].startswith("-"):
            given += 1
        found.append((dict(word.split("=", 1) for word in words[:given]), words[given:]))
    return found


def role(command: list[str]) -> str:
    if "dynamo.frontend" in command:
        return "frontend"
    if "--disaggregation-mode" in command:
        return command[command.index("--disaggregation-mode") + 1]
    return "kvbm"


@pytest.mark.parametrize(
    "path", [*SCRIPTS, EXAMPLES / "processes.sh", *EXAMPLES.glob("*/launch/common.sh")], ids=name_of
)
def test_scripts_pass_shellcheck(path):
    checked = subprocess.run([SHELLCHECK, "-x", path], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout


def test_a_script_that_does_not_pass_is_noticed(tmp_path):
    wrong = tmp_path / "wrong.sh"
    wrong.write_text("#!/usr/bin/env bash\nrm -rf $1/*\n")
    assert subprocess.run([SHELLCHECK, wrong], capture_output=True, timeout=60).returncode == 1


def test_every_script_is_known():
    assert {name_of(path) for path in SCRIPTS} == set(EXPECTED)


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_scripts_start_what_the_guide_says(path):
    processes = plan(path)
    assert [role(command) for _, command in processes] == EXPECTED[name_of(path)]
    workers = [(given, command) for given, command in processes if role(command) != "frontend"]
    taken: set[str] = set()
    for number, (given, command) in enumerate(workers):
        assert given["CUDA_VISIBLE_DEVICES"] == str(number)
        config = settings.load(environ=given, files=())
        assert config.warnings == ()
        mine = {given[name] for name in given if name.endswith("_PORT")}
        mine.add(str(config.consolidator_port))
        assert not mine & taken, "two workers want the same port"
        taken |= mine
        if "--kv-transfer-config" in command:
            transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
            expected = {"kvbm": "DynamoConnector", "prefill": "PdConnector", "decode": "NixlConnector"}[role(command)]
            assert transfer["kv_connector"] == expected
            events = json.loads(command[command.index("--kv-events-config") + 1])
            assert events["enable_kv_cache_events"] is True


@pytest.mark.parametrize("path", [path for path in SCRIPTS if "vllm" in name_of(path)], ids=name_of)
def test_what_can_be_set_is_set(path):
    env = {
        "KVBM_DEVICE": "cpu", "MODEL": "/some where/model", "SERVED_MODEL_NAME": "m", "DYN_HTTP_PORT": "8123",
        "PUB_PORT": "40000", "EVENT_PORT": "41000", "SIDE_PORT": "42000", "ENGINE_ARGS": "--seed 7",
        "FRONTEND_ARGS": "--namespace n", "KVBM_DECODE": "1",
    }  # fmt: skip
    if "trtllm" in name_of(path):
        pytest.skip("TensorRT-LLM does not run on a CPU")
    (_, front), *workers = plan(path, **env)
    assert front[front.index("--http-port") + 1] == "8123"
    assert front[-2:] == ["--namespace", "n"]
    for number, (given, command) in enumerate(workers):
        assert "CUDA_VISIBLE_DEVICES" not in given
        assert command[command.index("--model") + 1] == "/some where/model"
        assert command[command.index("--seed") + 1] == "7"
        assert command[command.index("--dtype") + 1] == "float32"
        assert given["DYN_KVBM_LEADER_ZMQ_PUB_PORT"] == str(40000 + 2 * number)
        assert given["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(42000 + number)
        events = json.loads(command[command.index("--kv-events-config") + 1])
        assert events["endpoint"] == f"tcp://*:{41000 + number}"
        if role(command) == "decode":
            assert json.loads(command[command.index("--kv-transfer-config") + 1])["kv_connector"] == "PdConnector"


def test_what_cannot_be_is_refused():
    two_gpus = run(EXAMPLES / "vllm/launch/disagg_kvbm.sh", KVBM_DRY_RUN="1", DEVICES="0")
    assert two_gpus.returncode == 2
    assert "DEVICES=0: expected at least 2 GPUs" in two_gpus.stderr
    device = run(EXAMPLES / "vllm/launch/agg_kvbm.sh", KVBM_DRY_RUN="1", KVBM_DEVICE="tpu")
    assert device.returncode == 2
    assert "KVBM_DEVICE=tpu: expected cuda or cpu" in device.stderr


@pytest.fixture
def stand_in(tmp_path):
    """An interpreter that starts a child of its own and waits, as an engine does; it only notes who it is.

    One that is called as END says ends at once, others of that name when there is a file `others`.
    """
    script = tmp_path / "python"
    script.write_text(
        f'#!/usr/bin/env bash\necho "$$ $2" >> {tmp_path}/started\nsleep 300 &\necho "$! child" >> {tmp_path}/started\n'
        f'if [ "$2" = "${{END:-}}" ]; then\n'
        f"  mkdir {tmp_path}/one || until [ -e {tmp_path}/others ]; do sleep 0.1; done\n"
        '  kill "$!"; exit 3\nfi\nwait\n'
    )
    script.chmod(0o755)
    return script


def started(tmp_path: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 120
    while True:
        lines = (tmp_path / "started").read_text().splitlines() if (tmp_path / "started").exists() else []
        if len(lines) >= count:
            return [int(line.split()[0]) for line in lines]
        assert time.monotonic() < deadline, lines
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def said_by(process: subprocess.Popen[str]) -> str:
    """The next thing that a script says of its processes."""
    return next(line for line in process.stderr if "has ended" in line)


@pytest.mark.parametrize("how", ["INT", "TERM", "dynamo.frontend", "dynamo.vllm"])
def test_nothing_is_left_behind(how, stand_in, tmp_path):
    """Interrupted, ended, or without its frontend or all workers: every process and the folder of sockets are gone."""
    (tmp_path / "tmp").mkdir()
    env = {"PYTHON": str(stand_in), "TMPDIR": str(tmp_path / "tmp"), "KVBM_DEVICE": "cpu"}
    env["END"] = how
    script = EXAMPLES / "vllm/launch/disagg_kvbm.sh"
    process = subprocess.Popen(
        [script],
        env={**os.environ, **env},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    try:
        if how in ("INT", "TERM"):
            started(tmp_path, 6)
            os.kill(process.pid, getattr(signal, f"SIG{how}"))
        first = "" if how in ("INT", "TERM") else said_by(process)
        (tmp_path / "others").touch()
        process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        left = [pid for pid in started(tmp_path, 1) if is_running(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == {"INT": 130, "TERM": 143}.get(how, 3)
    assert not left
    assert list((tmp_path / "tmp").iterdir()) == []
    if how == "dynamo.vllm":
        # Other processes write to the same stderr, and may not end their lines.
        assert "a worker has ended with status 3; 1 left" in first


# -- make serve -------------------------------------------------------------------------------------------------------


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES.parent / "scripts")
    for name in list(os.environ):
        if "KVBM" in name:
            monkeypatch.delenv(name)
    import serve

    return serve


def test_make_serve_heeds_the_users_settings(serve, monkeypatch):
    size, port = serve.cache_settings("")
    assert size == 2
    assert port > 0
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "0.5")
    monkeypatch.setenv("DYN_KVBM_METRICS_PORT", "7001")
    monkeypatch.setenv("DYN_KVBM_DISK_CACHE_GB", "3")
    assert serve.cache_settings("") == (0.5, 7001)
    assert serve.cache_settings("4") == (4, 7001)  # CPU_CACHE_GB=4 on the command line of make
    server = serve.Server("m", Path("log"), kvbm=True, cpu_cache_gb=0.5, metrics_port=7001)
    names = ("DYN_KVBM_CPU_CACHE_GB", "DYN_KVBM_METRICS_PORT", "DYN_KVBM_DISK_CACHE_GB")
    assert [server.environment()[name] for name in names] == ["0.5", "7001", "3"]
    monkeypatch.setenv("DYN_KVBM_METRICS", "0")
    assert serve.cache_settings("") == (0.5, 0)
    with pytest.raises(settings.ConfigError, match="DYN_KVBM_CPU_CACHE_GB='2GB'"):
        serve.cache_settings("2GB")


def test_every_server_of_make_serve_has_a_log_of_its_own(serve):
    assert serve.log_of(8000) != serve.log_of(8001)


def test_a_killed_server_leaves_no_shared_memory(serve):
    """vLLM's processes share memory. Killed during their start, they leave it to Python's resource tracker."""
    program = (
        "import time; from multiprocessing.shared_memory import SharedMemory; "
        "print(SharedMemory(create=True, size=4096).name, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        memory = Path("/dev/shm", process.stdout.readline().strip())
        assert memory.is_file()
        while not any(map(serve.is_resource_tracker, serve.processes_of(process.pid))):
            time.sleep(0.01)  # it has been forked, and is not Python's tracker yet
        serve.end_group(process.pid)
    assert not memory.exists()
    assert serve.processes_of(process.pid) == []


def test_make_serve_shows_the_log_without_its_warnings(serve, tmp_path):
    server = serve.Server("m", tmp_path / "log", kvbm=True)
    server.log.write_text(
        "$ vllm serve\n(EngineCore pid=1) INFO 01-31 12:00:00 [loader.py:1] Loading weights took 3 s\n"
        "(EngineCore pid=1) WARNING 01-31 12:00:00 [utils.py:1] Found ulimit of 20000\nnanobind: leaked\n"
    )
    assert server._last_log_line() == "Loading weights took 3 s"
