"""More set-ups broken on purpose, as in test_broken_setups.py: what surrounds the engine is wrong.

Packages that do not fit each other, limits of the kernel and the container, variables that a service manager has
changed on their way, services that do not answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from test_broken_setups import CARD, GOOD, Bench, assert_named, name_of

import kvbm
from kvbm.doctor import gpu, limits, memory, tiers
from kvbm.engines.vllm.transfer_config import TRANSFER
from servers import free_port

SOURCES = Path(kvbm.__file__).parent.parent


class Installed:
    """A package of this name, as importlib.metadata describes it."""

    def __init__(self, version, place, url=""):
        self.version, self._place, self._url = version, place, url

    def locate_file(self, name):
        return Path(self._place, name)

    def read_text(self, name):
        return json.dumps({"url": f"file://{self._url}"}) if self._url else None


def on_a_gpu_machine(b, *, torch="2.13.0", card=CARD):
    b.versions.update(vllm="0.31.0", torch=torch)
    b.patch.setattr(gpu, "gpus", lambda: (card,))


def gpu_named_by_the_uuid_of_another_machine(b):
    on_a_gpu_machine(b, card=CARD._replace(uuid="GPU-5f8a2d1c-0000-1111-2222-333344445555"))
    return [], {"CUDA_VISIBLE_DEVICES": "GPU-deadbeef"}


def torch_for_cpus_beside_vllm_for_cuda(b):
    on_a_gpu_machine(b, torch="2.13.0+cpu")
    return [], {}


def driver_older_than_the_cuda_of_torch(b):
    on_a_gpu_machine(b, torch="2.13.0+cu130", card=CARD._replace(driver="570.86.15"))
    return [], {}


def driver_older_than_the_cuda_of_a_torch_that_does_not_say_it(b):
    b.versions["nvidia-cuda-runtime-cu12"] = "12.8.90"
    on_a_gpu_machine(b, card=CARD._replace(driver="470.82.01"))
    return [], {}


def engine_without_its_torch(b):
    del b.versions["torch"]
    return [], {}


def another_kvbm_is_installed_too(b):
    found = [Installed("2.0.0", b.folder / "one"), Installed("1.4.2", b.folder / "two")]
    b.patch.setattr(metadata, "distributions", lambda name: found)
    return [], {}


def python_path_names_another_kvbm(b):
    b.patch.setattr(metadata, "distributions", lambda name: [Installed("2.0.0", b.folder)])
    return [], {"PYTHONPATH": f"/opt/other:{SOURCES}"}


def kernel_that_does_not_overcommit(b):
    (b.folder / "overcommit").write_text("2\n")
    (b.folder / "meminfo").write_text("MemFree: 9 kB\nCommitLimit:     8000000 kB\nCommitted_AS:    7950000 kB\n")
    b.patch.setattr(memory, "OVERCOMMIT", b.folder / "overcommit")
    b.patch.setattr(memory, "MEMINFO", b.folder / "meminfo")
    return [], {}


def half_a_cpu_for_the_container(b):
    (b.folder / "cpu.max").write_text("50000 100000\n")
    b.patch.setattr(limits, "CPU_MAX", b.folder / "cpu.max")
    return [], {}


def bound_to_one_cpu(b):
    before = os.sched_getaffinity(0)
    b._request.addfinalizer(lambda: os.sched_setaffinity(0, before))
    os.sched_setaffinity(0, {min(before)})
    return [], {}


def disk_tier_where_the_system_removes_files(b):
    b.patch.setattr(tiers, "_EMPTIED", (b.folder,))
    return [], b.disk(b.folder / "kvbm")


def directory_with_the_quotes_of_an_env_file(b):
    return [], b.disk('"/mnt/nvme/kvbm"')


def disk_tier_in_blocks_and_in_gigabytes(b):
    return [], {**b.disk(b.folder), "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": "100"}


def size_in_a_file_is_true(b):
    (b.folder / "kvbm.toml").write_text("cpu_cache_gb = true\n")
    b.patch.delenv("DYN_KVBM_CPU_CACHE_GB", raising=False)
    return [], {"KVBM_CONFIG_PATH": b.folder / "kvbm.toml", "DYN_KVBM_CPU_CACHE_GB": ""}


def etcd_that_does_not_answer(b):
    address = f"http://127.0.0.1:{free_port()}"
    return [], {"DYN_RUNTIME_ENABLED_KVBM": "1", "ETCD_ENDPOINTS": address}


def etcd_that_is_a_web_server(b):
    address = f"http://127.0.0.1:{b.listen()}"
    return [], {"DYN_RUNTIME_ENABLED_KVBM": "1", "ETCD_ENDPOINTS": address}


def object_store_that_does_not_answer(b):
    b.versions["obstore"] = "0.9.0"
    address = f"http://127.0.0.1:{free_port()}"
    return [], {
        "DYN_KVBM_OBJECT_ENABLED": "1", "DYN_KVBM_OBJECT_BUCKET": "kvbm", "DYN_KVBM_OBJECT_ENDPOINT": address,
        "DYN_KVBM_OBJECT_ACCESS_KEY": "key", "DYN_KVBM_OBJECT_SECRET_KEY": "secret",
    }  # fmt: skip


def transfer(**changes):
    return ["--kv-transfer-config", json.dumps({**TRANSFER, **changes})]


CASES = [
    (gpu_named_by_the_uuid_of_another_machine, "gpu-hidden", ["'GPU-deadbeef'", "this machine has 1", "nvidia-smi -L"]),
    (torch_for_cpus_beside_vllm_for_cuda, "torch-without-cuda", ["torch 2.13.0+cpu", "build for CPUs"]),
    (driver_older_than_the_cuda_of_torch, "driver-too-old", ["570.86.15", "CUDA 13", "580 or newer"]),
    (
        driver_older_than_the_cuda_of_a_torch_that_does_not_say_it,
        "driver-too-old",
        ["470.82.01", "CUDA 12", "525 or newer"],
    ),
    (engine_without_its_torch, "no-torch", ["torch is not installed", "Install the engine again"]),
    (another_kvbm_is_installed_too, "installed-twice", ["1.4.2 in", "Uninstall all"]),
    (python_path_names_another_kvbm, "imported-from-elsewhere", [f"from {SOURCES}", "PYTHONPATH"]),
    (kernel_that_does_not_overcommit, "commit-limit", ["DYN_KVBM_CPU_CACHE_GB=0.1", "51.2 MB", "vm.overcommit_memory"]),
    (half_a_cpu_for_the_container, "cpu-limit", ["--cpus", "0.5 CPU"]),
    (bound_to_one_cpu, "cpu-limit", ["taskset", "1 CPU"]),
    (disk_tier_where_the_system_removes_files, "disk-in-tmp", ["temporary files", "DYN_KVBM_DISK_CACHE_DIR"]),
    (directory_with_the_quotes_of_an_env_file, "disk-dir-not-a-path", ['contains a "', "--env-file"]),
    (
        disk_tier_in_blocks_and_in_gigabytes,
        "setting-without-effect",
        ["DYN_KVBM_DISK_CACHE_GB=0.2 without effect", "OVERRIDE_NUM_BLOCKS=100"],
    ),
    (size_in_a_file_is_true, "setting-refused", ["cpu_cache_gb=True", "kvbm.toml", "20 or 0.5"]),
    (etcd_that_does_not_answer, "registry-unreachable", ["http://127.0.0.1:", "Connection refused", "ETCD_ENDPOINTS"]),
    (etcd_that_is_a_web_server, "registry-unreachable", ["http://127.0.0.1:", "ETCD_ENDPOINTS"]),
    (object_store_that_does_not_answer, "objects-reachable", ["http://127.0.0.1:", "DYN_KVBM_OBJECT_ENDPOINT"]),
    ({"DYN_KVBM_CPU_CACHE_GB": ""}, "no-tier", ["DYN_KVBM_CPU_CACHE_GB is set, and empty"]),
    ({"DYN_KVBM_CPU_CACHE_GB": '"20"'}, "setting-refused", ["DYN_KVBM_CPU_CACHE_GB='\"20\"'", "20 or 0.5"]),
    ({"DYN_KVBM_CPU_CACHE_GB": "20GB"}, "setting-refused", ["DYN_KVBM_CPU_CACHE_GB='20GB'", "20 or 0.5"]),
    (
        {
            "DYN_KVBM_METRICS": "1", "DYN_KVBM_METRICS_PORT": "56501", "DYN_KVBM_LEADER_ZMQ_PUB_PORT": "56501",
        },
        "metrics-port-shared",
        ["DYN_KVBM_METRICS_PORT=56501 is also DYN_KVBM_LEADER_ZMQ_PUB_PORT"],
    ),
    (
        {"DYN_KVBM_METRICS": "1", "DYN_KVBM_METRICS_PORT": "8000"},
        "metrics-port-shared",
        ["DYN_KVBM_METRICS_PORT=8000", "`vllm serve`"],
    ),
    (
        {"DYN_RUNTIME_ENABLED_KVBM": "1", "DYN_DISCOVERY_BACKEND": "kubernetes"},
        "registry-unknown",
        ["DYN_DISCOVERY_BACKEND=kubernetes", "etcd or file"],
    ),
    (
        {"DYN_KVBM_OBJECT_ENABLED": "1", "DYN_KVBM_OBJECT_BUCKET": "s3://kvbm"},
        "setting-refused",
        ["DYN_KVBM_OBJECT_BUCKET='s3://kvbm'", "bucket name"],
    ),
    (
        {"DYN_KVBM_OBJECT_ENABLED": "1", "DYN_KVBM_OBJECT_BUCKET": "kvbm", "DYN_KVBM_OBJECT_ENDPOINT": "minio:9000"},
        "setting-refused",
        ["DYN_KVBM_OBJECT_ENDPOINT='minio:9000'", "http"],
    ),
    ({"KVBM_TENANT_SHARES": "a=0.7,b=0.8"}, "setting-refused", ["KVBM_TENANT_SHARES='a=0.7,b=0.8'", "at most 1"]),
    (
        transfer(kv_connector_extra_config={"kvbm": {"cpu_cache_gb": 20}}),
        "setting-misspelt",
        ["kvbm (kv_connector_extra_config)", 'put cpu_cache_gb beside "kvbm", not in it'],
    ),
    (transfer(kv_role="kv_producer"), "connector-role", ["'kv_producer'", "kv_both"]),
]  # fmt: skip


@pytest.mark.parametrize(("case", "name", "words"), CASES, ids=[name_of(case) for case, _, _ in CASES])
def test_the_cause_is_named(ask, tmp_path, monkeypatch, mount, versions, request, case, name, words):
    assert_named(ask, case, name, words, Bench(tmp_path, monkeypatch, mount, versions, request))


def test_what_is_right_is_not_named(ask, monkeypatch, versions, tmp_path):
    bench = Bench(tmp_path, monkeypatch, None, versions, None)
    on_a_gpu_machine(bench, torch="2.13.0+cu130", card=CARD._replace(uuid="GPU-5f8a2d1c-0000-1111-2222-333344445555"))
    root = str(SOURCES.parent)
    monkeypatch.setattr(metadata, "distributions", lambda name: [Installed("2.0.0", tmp_path, root)])  # editable
    (tmp_path / "cpu.max").write_text("max 100000\n")
    monkeypatch.setattr(limits, "CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    _, found = ask("--quick", CUDA_VISIBLE_DEVICES="GPU-5f8a2d1c", PYTHONPATH=SOURCES, DYN_KVBM_METRICS="1", **GOOD)
    assert not {name for _, name, _ in CASES} & set(found)


def test_a_terminal_that_has_no_arrows_gets_the_answer_too():
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONIOENCODING": "ascii", "DYN_KVBM_CPU_CACHE_GB": "x"}
    command = [sys.executable, "-m", "kvbm.cli.main", "doctor", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert "? The engine refuses to start with it; correct or remove it." in done.stdout
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
