"""Set-ups that the doctor once described wrongly."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess

import msgspec
import pytest

import observed
from kvbm.cli.main import main
from kvbm.config import load
from kvbm.doctor import tiers
from kvbm.engines.vllm.transfer_config import EXAMPLE, TRANSFER
from kvbm.observe.format import gigabytes
from kvbm.observe.server import Server
from kvbm.observe.snapshot import Saved
from kvbm.runtime.packing_notes import Note, write_note
from kvbm.tiers.lock import FileLock

GOOD = {"DYN_KVBM_CPU_CACHE_GB": "0.1"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def disk(folder, gigabytes="0.2"):
    return {"DYN_KVBM_DISK_CACHE_GB": gigabytes, "DYN_KVBM_DISK_CACHE_DIR": folder, **GOOD}


def assert_bad(answer, name, *words):
    code, found = answer
    assert code == 1
    assert found[name]["level"] == "bad"
    for word in words:
        assert word in found[name]["text"] + found[name]["cure"]


def test_vllm_too_old_for_the_connector(ask, versions):
    versions["vllm"] = "0.11.2"
    assert_bad(ask("--quick", **GOOD), "engine-too-old", "vllm 0.11.2", "0.26 to 0.32", "pip install 'vllm==0.32.*'")


@pytest.mark.parametrize(("version", "name"), [("0.5.4", "engine-too-old"), ("0.5.24", "engine-untested")])
def test_an_sglang_release_that_kvbm_is_not_made_for(ask, versions, version, name):
    versions["sglang"] = version
    _, found = ask("--quick", **GOOD)
    assert f"sglang {version}" in found[name]["text"]
    assert "0.5.23" in found[name]["text"]
    versions["sglang"] = "0.5.23"
    assert not {"engine-too-old", "engine-untested"} & set(ask("--quick", **GOOD)[1])


def test_a_second_engine_on_the_same_disk_directory(ask, tmp_path):
    slab = tmp_path / "kvbm-model-1" / "rank-0.slab"
    slab.parent.mkdir()
    slab.write_bytes(os.urandom(1 << 20))
    lock = FileLock(slab)
    _, found = ask("--quick", **disk(tmp_path))
    assert found["disk-in-use"]["text"].startswith("An engine that runs now uses 1.05 MB")
    assert "DYN_KVBM_DISK_CACHE_DIR of its own" in found["disk-in-use"]["cure"]
    lock.release()
    assert "disk-in-use" not in ask("--quick", **disk(tmp_path))[1]


def test_room_that_a_running_engine_holds_is_not_free(ask, mount):
    folder = mount("tmpfs", "size=4m,mode=700")
    slab = folder / "kvbm-model-1" / "rank-0.slab"
    slab.parent.mkdir()
    slab.write_bytes(os.urandom(2 << 20))
    lock = FileLock(slab)
    answer = ask("--quick", **disk(folder, "0.004"))
    assert_bad(answer, "disk-space-short", "beside the 2.1 MB of a running engine", "Set it to at most 0.0020")
    lock.release()


def test_a_second_engine_on_the_same_metrics_port(ask):
    server = Server(observed.FixedSource(observed.snapshot(failures={})), "127.0.0.1", 0)
    server.start()
    try:
        _, found = ask("--quick", DYN_KVBM_METRICS="1", DYN_KVBM_METRICS_PORT=server.port, **GOOD)
    finally:
        server.close()
    assert "an engine runs here already" in found["metrics-port"]["text"]
    assert "its own DYN_KVBM_METRICS_PORT" in found["metrics-port"]["cure"]


def test_settings_outside_of_the_extra_config(ask):
    outside = json.dumps({**TRANSFER, "cpu_cache_gb": 20})
    answer = ask("--quick", "--kv-transfer-config", outside, **GOOD)
    assert_bad(answer, "setting-outside-extra", '"cpu_cache_gb"', '"kv_connector_extra_config": {"cpu_cache_gb": 20}')
    inside = {"connectors": [TRANSFER, NIXL], "DYN_KVBM_CPU_CACHE_GB": 20}
    pd = json.dumps({**TRANSFER, "kv_connector": "PdConnector", "kv_connector_extra_config": inside})
    answer = ask("--quick", "--kv-transfer-config", pd, **GOOD)
    assert_bad(answer, "setting-outside-extra", "DYN_KVBM_CPU_CACHE_GB", "first connector")


def test_a_misspelt_failure_policy(ask):
    value = EXAMPLE.replace("recompute", "recompue")
    assert_bad(ask("--quick", "--kv-transfer-config", value, **GOOD), "failure-policy", "'recompue'", "recompute")
    key = EXAMPLE.replace("failure_policy", "failure_polcy")
    answer = ask("--quick", "--kv-transfer-config", key, **GOOD)
    assert_bad(answer, "transfer-field", '"kv_load_failure_polcy"', 'Did you mean "kv_load_failure_policy"?')


def test_a_multi_connector_is_led_to_pd_connector(ask):
    extra = {"connectors": [TRANSFER, NIXL]}
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    answer = ask("--quick", "--kv-transfer-config", json.dumps(multi), **GOOD)
    assert_bad(answer, "multi-connector", '"kv_connector": "PdConnector"', "kvbm.vllm_integration.connector")


@pytest.fixture
def ext4(mount, tmp_path):
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    if subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True).returncode:
        pytest.skip("mkfs.ext4 is not installed")
    folder = mount("ext4", "loop", image)
    folder.chmod(0o700)
    return folder


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_filesystem_is_called_full_and_nothing_else(ask, mount, kind, request):
    folder = request.getfixturevalue("ext4") if kind == "ext4" else mount("tmpfs", "size=2m,mode=700")
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(1 << 14)) == 1 << 14:
            pass
    answer = ask(**disk(folder))
    assert_bad(answer, "disk-full", "is full", str(folder), "Make room")
    claims = {"o-direct-missing", "o-direct-at-open-only", "fallocate-missing", "disk-speed", "disk-slow", "disk"}
    assert not claims & set(answer[1])


def test_no_rate_without_room_for_a_measurement(ask, mount):
    _, found = ask(**disk(mount("tmpfs", "size=8m,mode=700"), "0.001"))
    assert "disk-not-measured" in found
    assert not {"disk-speed", "disk-slow"} & set(found)


def test_a_read_only_mount(ask, mount):
    folder = mount("tmpfs", "ro,mode=700")
    answer = ask("--quick", **disk(folder / "cache"))
    assert_bad(answer, "disk-read-only", "mounted read-only", str(folder), "DYN_KVBM_DISK_CACHE_DIR")


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0"), (5e6, "0.005"), (52_428_799, "0.0524"), (99.9e6, "0.0999"), (1.5678e9, "1.56"), (2345.6e9, "2340")],
)
def test_sizes_are_rounded_down_with_sense(amount, text):
    assert gigabytes(amount) == text


def test_small_sizes_are_printed_with_sense(ask, mount):
    answer = ask("--quick", **disk(mount("tmpfs", "size=40m,mode=700")))
    assert_bad(answer, "disk-space-short", "41.9 MB free", "at most 0.0419")


@pytest.mark.parametrize("value", ["ten minutes", "-5", "1e3", "0"])
def test_a_ready_timeout_that_is_no_number(ask, value):
    answer = ask(VLLM_ENGINE_READY_TIMEOUT_S=value, **GOOD)
    assert_bad(answer, "ready-timeout", f"VLLM_ENGINE_READY_TIMEOUT_S='{value}'", "the default is 600")
    assert "check-failed" not in answer[1]


@pytest.mark.parametrize("value", ["-1", "0", "nan", "many"])
def test_negative_arguments_are_refused(value, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", f"--gpu-cache-gb={value}"])
    assert stop.value.code == 2
    assert f"'{value}': expected a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "cure"), [({}, "KVBM_LOAD is auto"), ({"KVBM_LOAD": "always"}, "Set KVBM_LOAD=auto")]
)
def test_the_setting_is_described_as_it_is(ask, settings, cure):
    now = observed.snapshot(failures={}, saved=Saved(loads=5, lost_seconds=9.0))
    now = msgspec.structs.replace(now, identity=msgspec.structs.replace(now.identity, settings=settings))
    server = Server(observed.FixedSource(now), "127.0.0.1", 0)
    server.start()
    try:
        _, found = ask("--quick", "--url", server.url, **GOOD)
    finally:
        server.close()
    assert found["loads-too-slow"]["cure"].startswith(cure)


def test_a_running_engine_has_its_disk_already(ask, tmp_path):
    now = observed.snapshot(failures={})
    assert any(tier.tier == "disk" for tier in now.tiers)
    server = Server(observed.FixedSource(now), "127.0.0.1", 0)
    server.start()
    try:
        _, found = ask("--url", server.url, **disk(tmp_path, "1000000"))
    finally:
        server.close()
    assert found["disk"]["text"] == "The running engine has its disk tier."
    assert "disk-space-short" not in found


def test_a_path_that_does_not_exist_yet_is_no_fault(tmp_path):
    assert tiers._existing(tmp_path / "a" / "b") == tmp_path


def test_a_model_that_did_not_fit_packed_slots_is_shown_with_the_way_to_forget_it(ask, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = write_note(load(environ={}, files=[]), "kvbm-some-model-1f", Note(30, 70, "2026-01-31"))
    _, findings = ask("--quick", KVBM_PACK="auto")
    found = findings["unpackable-before"]
    assert found["level"] == "note"
    assert "On 2026-01-31 30 of 100 blocks of kvbm-some-model-1f did not fit packed slots" in found["text"]
    assert "KVBM_PACK=auto does not pack them" in found["text"]
    assert found["cure"].endswith(f"rm {path}")
    assert "KVBM_PACK=on packs them all the same" in ask("--quick", KVBM_PACK="on")[1]["unpackable-before"]["text"]
    assert "unpackable-before" not in ask("--quick", KVBM_PACK="off")[1]
    path.unlink()
    assert "unpackable-before" not in ask("--quick", KVBM_PACK="auto")[1]
