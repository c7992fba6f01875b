"""`kvbm doctor`: on bad set-ups it names the fault and its cure, on a good one it is content."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import closing
from importlib import metadata

import pytest

import kvbm
import observed
from kvbm import config, doctor
from kvbm.cli.main import main
from kvbm.doctor import base, gpu, memory, setup, tiers
from kvbm.engines.vllm import shortcuts
from kvbm.engines.vllm.transfer_config import EXAMPLE
from kvbm.observe.server import Server
from kvbm.observe.snapshot import HitRates, Saved
from kvbm.runtime.channel import ZmqLeader
from kvbm.tiers.lock import FileLock

REAL_SERVERS = base.servers
GOOD = {"DYN_KVBM_CPU_CACHE_GB": "0.1"}
PORTS = ("DYN_KVBM_METRICS_PORT", "DYN_KVBM_LEADER_ZMQ_PUB_PORT", "DYN_KVBM_LEADER_ZMQ_ACK_PORT")


def assert_wrong(answer, name, fault, cure):
    code, found = answer
    assert code == 1
    assert found[name]["level"] == "bad"
    assert fault in found[name]["text"]
    assert cure in found[name]["cure"]


# -- a good one -------------------------------------------------------------------------------------------------------


def test_nothing_is_wrong_with_a_good_set_up(ask, tmp_path):
    code, found = ask(
        "--gpu-cache-gb", "0.05", DYN_KVBM_DISK_CACHE_GB="0.2", DYN_KVBM_DISK_CACHE_DIR=tmp_path / "new" / "cache",
        DYN_KVBM_METRICS="1", **GOOD,
    )  # fmt: skip
    assert code == 0, found
    assert {"settings", "engine", "memory", "disk", "sizes", "metrics-port", "leader-ports"} <= set(found)
    assert not any(finding["level"] == "bad" for finding in found.values())
    assert os.listdir(tmp_path) == []  # it looked, and left nothing


def test_an_engine_that_still_loads_is_no_fault_of_this_shell(ask, monkeypatch):
    words = ["serve", "some/mo\x1bdel", "--kv-transfer-config", EXAMPLE]
    script = "import os, time; os.write(1, b'%d\\n' % os.fork()); time.sleep(60)"
    engine = subprocess.Popen([sys.executable, "-c", script, *words], stdout=subprocess.PIPE, text=True)
    try:
        forks = {int(engine.stdout.readline()), int(engine.stdout.readline())} - {0}
        found = {server.pid: server for server in REAL_SERVERS()}
        assert found[engine.pid].model == "some/mo\x1bdel"
        assert 0 <= found[engine.pid].seconds < 60
        assert not forks & set(found)
        monkeypatch.setattr(base, "servers", lambda: [found[engine.pid]])
        code, said = ask("--quick", "--kv-transfer-config", EXAMPLE)
    finally:
        for pid in (*forks, engine.pid):
            os.kill(pid, signal.SIGKILL)
        engine.wait()
    assert code == 0, said
    assert "the engine that starts has its own settings" in said["settings"]["text"]
    assert (
        f"`vllm serve some/mo\\x1bdel` with KVBM is starting (process {engine.pid}, for "
        in (said["engine-starting"]["text"])
    )
    assert "no-engine-running" not in said
    assert engine.pid not in {server.pid for server in REAL_SERVERS()}


def test_another_engine_with_the_ports_of_the_leader_is_noticed(ask):
    here = config.load({}, dict(os.environ), [])
    with closing(ZmqLeader(1, here.leader_pub_url, here.leader_ack_url)):
        _, found = ask(**GOOD)
    assert PORTS[1] in found["leader-port-taken"]["text"] or PORTS[2] in found["leader-port-taken"]["text"]
    assert "leader-ports" in ask(**GOOD)[1]


def test_the_disk_is_measured_unless_in_a_hurry(ask, tmp_path):
    disk = {"DYN_KVBM_DISK_CACHE_GB": "0.2", "DYN_KVBM_DISK_CACHE_DIR": tmp_path}
    _, found = ask(**GOOD, **disk)
    measured = {"disk-speed", "disk-slow"} & set(found)
    assert measured
    assert "GB/s" in found[measured.pop()]["text"]
    _, found = ask("--quick", **GOOD, **disk)
    assert not {"disk-speed", "disk-slow"} & set(found)


def test_for_people_there_are_sentences(monkeypatch, capsys):
    assert main(["doctor", "--quick"]) == 1
    out = capsys.readouterr().out
    python = ".".join(map(str, sys.version_info[:3]))
    versions = f"KVBM {kvbm.__version__}, Python {python}, torch 2.13.0+cpu, vllm 0.31.0+cpu"
    assert out.startswith(f"ok   versions   {versions}")
    assert "BAD  settings   At least one cache tier must be configured" in out
    assert "→ export DYN_KVBM_CPU_CACHE_GB=20" in out
    assert out.endswith("1 thing wrong.\n")
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "0.1")
    assert main(["doctor", "--quick"]) == 0
    assert capsys.readouterr().out.endswith("Nothing is wrong.\n")


# -- bad ones ---------------------------------------------------------------------------------------------------------


def test_no_tier(ask):
    assert_wrong(ask("--quick"), "no-tier", "At least one cache tier", "DYN_KVBM_CPU_CACHE_GB=20")


def test_a_value_that_cannot_be_used(ask):
    answer = ask("--quick", DYN_KVBM_CPU_CACHE_GB="20GB")
    assert_wrong(answer, "setting-refused", "DYN_KVBM_CPU_CACHE_GB='20GB' (environment)", "correct or remove")


def test_a_name_that_is_misspelt(ask):
    answer = ask("--quick", DYN_KVBM_CPU_CACHE_BG="20", **GOOD)
    assert_wrong(answer, "setting-misspelt", "did you mean DYN_KVBM_CPU_CACHE_GB?", "Correct the name")


def test_a_metrics_port_that_another_program_has(ask):
    other = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    try:
        answer = ask("--quick", DYN_KVBM_METRICS="1", DYN_KVBM_METRICS_PORT=other.server_port, **GOOD)
    finally:
        other.shutdown()
        other.server_close()
    assert_wrong(answer, "metrics-port-taken", f"DYN_KVBM_METRICS_PORT={other.server_port}", "to a free port")


def test_more_memory_than_there_is(ask):
    answer = ask("--quick", DYN_KVBM_CPU_CACHE_GB="100000")
    assert_wrong(answer, "host-memory-short", "asks for 100 TB", "Set it to at most")


def test_memory_that_is_kept_is_told_of_and_needs_room(ask, tmp_path, monkeypatch):
    from kvbm.doctor import memory

    place = tmp_path / "shm" / "kvbm-model-1"
    place.mkdir(parents=True)
    (place / "rank-0.slab").write_bytes(bytes(1 << 20))
    kept = {"KVBM_HOST_PERSIST_DIR": place.parent, **GOOD}
    code, found = ask("--quick", **kept)
    assert (code, found["memory-kept"]["level"]) == (0, "note")
    assert "kvbm cache clear" in found["memory-kept"]["cure"]
    code, found = ask("--quick", KVBM_HOST_PERSIST="1", **kept)
    assert code == 0
    assert "memory-not-kept" not in found
    with monkeypatch.context() as full:
        full.setattr(memory.shutil, "disk_usage", lambda _: memory.shutil._ntuple_diskusage(1 << 40, 1 << 40, 0))
        answer = ask("--quick", KVBM_HOST_PERSIST="1", **kept)
    assert_wrong(answer, "memory-not-kept", "has room for 1", "--shm-size")
    answer = ask("--quick", KVBM_HOST_PERSIST="1", KVBM_HOST_PERSIST_DIR=tmp_path / "missing", **GOOD)
    assert_wrong(answer, "memory-not-kept", "cannot be used", "/dev/shm")


def test_memory_of_a_running_engine_is_not_called_left_over(ask, tmp_path):
    place = tmp_path / "kvbm-model-1"
    place.mkdir()
    slabs = [place / f"rank-{rank}.slab" for rank in range(2)]
    for slab in slabs:
        slab.write_bytes(bytes(1 << 20))
    lock = FileLock(slabs[0])
    _, found = ask("--quick", KVBM_HOST_PERSIST_DIR=tmp_path, **GOOD)
    assert found["memory-kept"]["text"].startswith("Host tiers of engines that have ended hold 1.05 MB")
    other = FileLock(slabs[1])
    assert "memory-kept" not in ask("--quick", KVBM_HOST_PERSIST_DIR=tmp_path, **GOOD)[1]
    lock.release()
    other.release()


def test_more_disk_than_there_is(ask, tmp_path):
    answer = ask("--quick", DYN_KVBM_DISK_CACHE_GB="1000000", DYN_KVBM_DISK_CACHE_DIR=tmp_path, **GOOD)
    assert_wrong(answer, "disk-space-short", "asks for 1000 TB", "Set it to at most")


def test_room_that_only_caches_of_before_have(ask, tmp_path, monkeypatch):
    """Another model's would stay beside the new one."""
    slab = tmp_path / "kvbm-model-1" / "rank-0.slab"
    slab.parent.mkdir()
    slab.write_bytes(os.urandom(1 << 20))
    (tmp_path / "kvbm.log").write_bytes(os.urandom(2 << 20))  # of somebody else: the directory may be /tmp
    usage = shutil.disk_usage(tmp_path)._replace(free=int(1e9 - 1e5))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    code, found = ask("--quick", DYN_KVBM_DISK_CACHE_GB="1", DYN_KVBM_DISK_CACHE_DIR=tmp_path, **GOOD)
    assert (code, found["disk-kept"]["level"]) == (0, "note")
    assert found["disk-kept"]["text"].startswith("Existing caches hold 1.05 MB at")
    assert "disk-kept" not in ask("--quick", DYN_KVBM_DISK_CACHE_GB="0.9", DYN_KVBM_DISK_CACHE_DIR=tmp_path, **GOOD)[1]


def test_a_disk_tier_smaller_than_the_host_tier(ask, tmp_path):
    answer = ask("--quick", DYN_KVBM_DISK_CACHE_GB="0.05", DYN_KVBM_DISK_CACHE_DIR=tmp_path, **GOOD)
    assert_wrong(answer, "disk-smaller-than-host", "50 MB", "DYN_KVBM_DISK_CACHE_GB to at least 0.1")


def test_a_host_tier_smaller_than_the_engines_own_cache(ask):
    answer = ask("--quick", "--gpu-cache-gb", "40", **GOOD)
    assert_wrong(answer, "host-smaller-than-device", "40 GB", "DYN_KVBM_CPU_CACHE_GB to at least 40")


def test_a_folder_in_which_no_file_can_be_made(ask):
    answer = ask("--quick", DYN_KVBM_DISK_CACHE_GB="0.2", DYN_KVBM_DISK_CACHE_DIR="/proc/kvbm", **GOOD)
    assert_wrong(answer, "disk-not-writable", "/proc/kvbm", "export DYN_KVBM_DISK_CACHE_DIR=")


def test_a_filesystem_without_o_direct_and_fallocate(ask, mount, monkeypatch):
    ramfs = mount("ramfs")
    monkeypatch.setattr(tiers.shutil, "disk_usage", lambda _: tiers.shutil._ntuple_diskusage(1 << 40, 0, 1 << 40))
    disk = {"DYN_KVBM_DISK_CACHE_GB": "0.2", "DYN_KVBM_DISK_CACHE_DIR": ramfs}
    answer = ask("--quick", **disk, **GOOD)
    assert_wrong(answer, "o-direct-missing", str(ramfs), "DYN_KVBM_DISK_DISABLE_O_DIRECT=1")
    assert_wrong(answer, "fallocate-missing", str(ramfs), "DYN_KVBM_DISK_ZEROFILL_FALLBACK=1")
    assert "which is memory" in answer[1]["disk-not-a-disk"]["text"]
    # The cure cures.
    code, found = ask(
        "--quick", DYN_KVBM_DISK_DISABLE_O_DIRECT="1", DYN_KVBM_DISK_ZEROFILL_FALLBACK="1", **disk, **GOOD
    )
    assert code == 0, found


def test_a_filesystem_that_takes_o_direct_only_at_open(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(tiers._Probe, "takes_direct", lambda self, at_open: at_open)
    disk = {"DYN_KVBM_DISK_CACHE_GB": "0.2", "DYN_KVBM_DISK_CACHE_DIR": tmp_path}
    answer = ask("--quick", **disk, **GOOD)
    assert_wrong(answer, "o-direct-at-open-only", str(tmp_path), "DYN_KVBM_DISK_ALLOCATOR_TYPE=open-direct")
    code, _ = ask("--quick", DYN_KVBM_DISK_ALLOCATOR_TYPE="open-direct", **disk, **GOOD)
    assert code == 0


@pytest.mark.parametrize(("read", "level"), [(0.1e9, "bad"), (0.5e9, "note"), (3e9, "good")])
def test_a_slow_disk(ask, tmp_path, monkeypatch, read, level):
    monkeypatch.setattr(tiers._Probe, "speed", lambda self, direct: tiers.Speed(read, read))
    _, found = ask(DYN_KVBM_DISK_CACHE_GB="0.2", DYN_KVBM_DISK_CACHE_DIR=tmp_path, **GOOD)
    assert found["disk-speed" if level == "good" else "disk-slow"]["level"] == level


def test_a_start_that_takes_longer_than_the_engine_waits(ask, monkeypatch):
    monkeypatch.setattr(memory, "fault_in_speed", lambda: 1000.0)
    answer = ask(**GOOD)
    assert_wrong(answer, "start-too-slow", "vLLM gives its engine 10 min", "VLLM_ENGINE_READY_TIMEOUT_S=")
    code, found = ask(VLLM_ENGINE_READY_TIMEOUT_S="10000000", **GOOD)
    assert code == 0, found


def test_no_engine(ask, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert_wrong(ask("--quick", **GOOD), "no-engine", "vllm", "the engine's own environment")


def test_an_engine_that_was_not_tested(ask, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.99.1")
    _, found = ask("--quick", **GOOD)
    assert found["engine-untested"]["level"] == "note"
    assert "KVBM supports" in found["engine-untested"]["text"]


@pytest.mark.parametrize(("switch", "name"), [("1", "shortcuts"), ("0", "shortcuts-off")])
def test_loops_of_vllm_that_are_replaced_are_listed(ask, switch, name):
    _, found = ask("--quick", KVBM_FAST_PROMPTS=switch, **GOOD)
    assert {"shortcuts", "shortcuts-off"} & set(found) == {name}
    assert "KVBM_FAST_PROMPTS" in found[name]["text"]
    for each in shortcuts.describe("0.31.0"):
        assert each.replaces in found[name]["text"]


def test_a_release_without_shortcuts_has_none_to_list(ask, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.99.1")
    assert not {"shortcuts", "shortcuts-off"} & set(ask("--quick", **GOOD)[1])


def pd(*children):
    """A PdConnector with these in it."""
    outer = {**json.loads(EXAMPLE), "kv_connector": "PdConnector"}
    return json.dumps({**outer, "kv_connector_extra_config": {"connectors": list(children)}})


@pytest.mark.parametrize(
    ("text", "name", "cure"),
    [
        ("{", "transfer-json", "DynamoConnector"),
        ("[]", "transfer-json", "DynamoConnector"),
        ('{"kv_connector": "KvbmConnector"}', "connector-name", '"kv_connector'),
        ('{"kv_connector": "DynamoConnector"}', "connector-name", "kvbm.vllm_integration.connector"),
        (EXAMPLE.replace("kv_both", "kv_producer"), "connector-role", "kv_both"),
        (pd({"kv_connector": "DynamoConnector"}), "connector-name", "kvbm.vllm_integration.connector"),
        (pd(), "connector-name", "kvbm.vllm_integration.connector"),
    ],
)
def test_a_connector_that_is_named_wrongly(ask, text, name, cure):
    assert_wrong(ask("--quick", "--kv-transfer-config", text, **GOOD), name, "", cure)


def test_a_connector_that_is_named_well(ask):
    code, found = ask("--quick", "--kv-transfer-config", EXAMPLE, **GOOD)
    assert (code, found["connector"]["level"]) == (0, "good")
    code, found = ask("--quick", "--kv-transfer-config", EXAMPLE.replace("recompute", "fail"), **GOOD)
    assert (code, found["failure-policy"]["level"]) == (0, "note")


def test_prefill_and_decode_apart_is_named_well_too(ask):
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    code, found = ask("--quick", "--kv-transfer-config", pd(json.loads(EXAMPLE), nixl), **GOOD)
    assert (code, found["connector"]["level"]) == (0, "good")


@pytest.mark.parametrize("wrapped", [False, True])
def test_settings_in_what_vllm_is_started_with_count(ask, wrapped):
    ours = {**json.loads(EXAMPLE), "kv_connector_extra_config": {"cpu_cache_gb": 0.25}}
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    code, found = ask("--quick", "--kv-transfer-config", pd(ours, nixl) if wrapped else json.dumps(ours))
    assert code == 0
    assert "cpu_cache_gb=0.25" in found["settings"]["text"]


# -- GPUs, as nvidia-smi shows them -----------------------------------------------------------------------------------


def test_cards_are_read_from_what_nvidia_smi_prints():
    card = gpu._card("NVIDIA H200, 143771, 580.95.05, 16, 16")
    assert card == gpu.Card("NVIDIA H200", 143771 << 20, "580.95.05", 16, 16)
    assert gpu._card("GPU, [N/A], 1.0, [N/A], [N/A]").memory == 0


def test_a_card_with_half_of_its_lanes(ask, monkeypatch):
    card = gpu.Card("NVIDIA H200", 143771 << 20, "580.95.05", 8, 16)
    monkeypatch.setattr(gpu, "gpus", lambda: (card,))
    answer = ask("--quick", **GOOD)
    assert_wrong(answer, "pcie-narrow", "8 of its 16 PCIe lanes", "slot")


def test_tiers_are_compared_with_the_cards_memory(ask, monkeypatch):
    monkeypatch.setattr(setup, "gpus", lambda: (gpu.Card("NVIDIA H200", 143771 << 20, "580", 16, 16),))
    _, found = ask("--quick", **GOOD)
    assert "151 GB" in found["host-maybe-smaller-than-device"]["text"]


@pytest.mark.parametrize(("rate", "level"), [(3e9, "bad"), (12e9, "note"), (50e9, "good")])
def test_the_bus_is_measured(ask, monkeypatch, rate, level):
    class Cuda:
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 1)

    class Torch:
        cuda = Cuda

    monkeypatch.setitem(sys.modules, "torch", Torch)
    monkeypatch.setattr(gpu, "gpus", lambda: (gpu.Card("NVIDIA H200", 1 << 37, "580", 16, 16),))
    monkeypatch.setattr(gpu, "measure", lambda torch, device: (rate, rate))
    _, found = ask(**GOOD)
    assert found["bandwidth" if level == "good" else "bus-slow"]["level"] == level


# -- a running engine -------------------------------------------------------------------------------------------------


@pytest.fixture
def engine():
    source = observed.FixedSource(observed.snapshot(failures={}))
    server = Server(source, "127.0.0.1", 0)
    server.start()
    yield server, source
    server.close()


def test_an_engine_that_gains_is_well(ask, engine):
    server, _ = engine
    code, found = ask("--quick", "--url", server.url)
    assert code == 0, found
    assert "It helps" in found["gain"]["text"]
    assert "The running engine: vllm 0.31.0 with KVBM 2.0." in found["versions"]["text"]


def test_an_engine_without_gain_is_told_why(ask, engine):
    server, source = engine
    nothing = {"hit_rates": HitRates(requests=50, blocks=500), "saved": Saved(), "outcomes": {"not found": 50}}
    common = {"failures": {}, "refused_loads": {}, "matched_blocks": {}, "matched_tokens": 0}
    source.now = observed.snapshot(**nothing, **common, missed={"new": 50})
    _, found = ask("--quick", "--url", str(server.port))
    assert "have not repeated so far" in found["no-repeats"]["text"]
    source.now = observed.snapshot(**nothing, **common, missed={"evicted": 50})
    answer = ask("--quick", "--url", server.url)
    assert_wrong(answer, "tier-too-small", "too small", "DYN_KVBM_DISK_CACHE_GB")


def test_an_engine_on_the_configured_port_is_found_by_itself(ask, engine):
    server, _ = engine
    code, found = ask("--quick", DYN_KVBM_METRICS="1", DYN_KVBM_METRICS_PORT=server.port, **GOOD)
    assert code == 0
    assert "KVBM of a/model answers" in found["metrics-port"]["text"]
    assert "gain" in found
    assert found["memory"]["text"].endswith(
        "A second engine would fit beside the 400 MB of the running engine's host tier."
    )


def test_a_host_tier_too_large_is_named_beside_a_running_engine(ask, engine, monkeypatch):
    server, _ = engine
    monkeypatch.setattr(memory, "available_memory", lambda: 300_000_000)
    url = ("--quick", "--url", server.url)
    _, found = ask(*url)
    assert found["memory"]["text"] == "The running engine's host tier takes 400 MB; 300 MB are available."
    answer = ask(*url, DYN_KVBM_CPU_CACHE_GB="100")
    assert_wrong(answer, "host-memory-short", "beside the 400 MB of the running engine's host tier", "at most 0.285")
    # The size that the running engine may have itself.
    code, found = ask(*url, DYN_KVBM_CPU_CACHE_GB="0.4")
    assert (code, found["memory-second"]["level"]) == (0, "note")
    assert "A second engine with this size would not fit" in found["memory-second"]["text"]
    assert "at most 0.285" in found["memory-second"]["cure"]


def test_an_engine_that_was_named_and_is_not_there(ask):
    answer = ask("--quick", "--url", "127.0.0.1:1", **GOOD)
    assert_wrong(answer, "engine-not-reachable", "DYN_KVBM_METRICS=1", "")


# -- itself -----------------------------------------------------------------------------------------------------------


def test_a_check_that_breaks_is_a_finding(ask, monkeypatch):
    class Broken:
        name = "broken"

        def run(self, case):
            raise ZeroDivisionError("oh")

    monkeypatch.setattr(doctor, "CHECKS", (Broken(), *doctor.CHECKS[:2]))
    code, found = ask("--quick", **GOOD)
    assert code == 1
    assert "ZeroDivisionError: oh" in found["check-failed"]["text"]
    assert "settings" in found  # the others go on


def test_no_text_of_a_finding_controls_the_terminal(monkeypatch, capsys):
    class Hostile:
        name = "hostile"

        def run(self, case):
            raise OSError("two\nlines \x1b[2J\u202e")

    monkeypatch.setattr(doctor, "CHECKS", (Hostile(),))
    assert main(["doctor", "--quick"]) == 1
    assert r"OSError: two lines \x1b[2J\u202e" in capsys.readouterr().out
