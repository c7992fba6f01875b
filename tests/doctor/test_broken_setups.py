"""Set-ups broken on purpose. `kvbm doctor` must name the cause of each: the setting or the place, and what is wrong.

A case breaks one thing of a good set-up: by a variable, by an argument, or by a function that returns arguments and
variables of the command. Beside it: the finding, and words that its text or its cure must have.
"""

from __future__ import annotations

import http.server
import json
import os
import resource
import subprocess
import threading

import pytest

from kvbm.doctor import gpu, limits
from kvbm.engines.vllm.transfer_config import EXAMPLE, TRANSFER

GOOD = {"DYN_KVBM_CPU_CACHE_GB": "0.1"}
REAL_NVIDIA_SMI = gpu._nvidia_smi
CARD = gpu.Card("NVIDIA H200", 143771 << 20, "580.95.05", 16, 16)


class Bench:
    """What a case may break."""

    def __init__(self, tmp_path, monkeypatch, mount, versions, request):
        self.folder, self.patch, self.mount, self.versions = tmp_path, monkeypatch, mount, versions
        self._request = request

    def limit(self, which, value):
        before = resource.getrlimit(which)
        resource.setrlimit(which, (value, before[1]))
        self._request.addfinalizer(lambda: resource.setrlimit(which, before))

    def pretend_limit(self, which, value):
        """Not a real limit: the tests themselves would fail of it."""
        real = resource.getrlimit
        self.patch.setattr(resource, "getrlimit", lambda each: (value, value) if each == which else real(each))

    def listen(self):
        """The port of a program that is not KVBM."""
        server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self._request.addfinalizer(server.server_close)
        self._request.addfinalizer(server.shutdown)
        return server.server_port

    def disk(self, folder, gigabytes="0.2"):
        return {"DYN_KVBM_DISK_CACHE_GB": gigabytes, "DYN_KVBM_DISK_CACHE_DIR": str(folder)}


def settings_file_missing(b):
    return [], {"KVBM_CONFIG_PATH": b.folder / "kvbm.toml"}


def settings_file_is_yaml(b):
    (b.folder / "kvbm.toml").write_text("cpu_cache_gb: 20\n")
    return [], {"KVBM_CONFIG_PATH": b.folder / "kvbm.toml"}


def settings_path_is_a_directory(b):
    return [], {"KVBM_CONFIG_PATH": b.folder}


def settings_file_with_a_section(b):
    (b.folder / "kvbm.toml").write_text("[kvbm]\ncpu_cache_gb = 20\n")
    return [], {"KVBM_CONFIG_PATH": b.folder / "kvbm.toml"}


def settings_file_not_in_utf8(b):
    (b.folder / "kvbm.toml").write_bytes(b"# \xe4\ncpu_cache_gb = 1\n")
    return [], {"KVBM_CONFIG_PATH": b.folder / "kvbm.toml"}


def disk_directory_is_a_file(b):
    (b.folder / "cache").touch()
    return [], b.disk(b.folder / "cache")


def disk_directory_is_a_loop_of_links(b):
    os.symlink(b.folder / "two", b.folder / "one")
    os.symlink(b.folder / "one", b.folder / "two")
    return [], b.disk(b.folder / "one")


def disk_directory_has_a_name_too_long(b):
    return [], b.disk(b.folder / ("x" * 300))


def disk_directory_open_to_all(b):
    place = b.folder / "shared"
    place.mkdir()
    place.chmod(0o777)
    return [], b.disk(place)


def disk_on_nfs(b):
    b.patch.setattr("kvbm.doctor.tiers.mount_of", lambda path: (b.folder, "nfs4"))
    return [], b.disk(b.folder)


def relative_disk_directory(b):
    b.patch.chdir(b.folder)
    return [], b.disk("cache/kvbm")


def disk_directory_is_a_dangling_link(b):
    (b.folder / "link").symlink_to(b.folder / "gone" / "away")
    return [], b.disk(b.folder / "link")


def disk_directory_of_another_user(b):
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    (b.folder / "theirs").mkdir()
    os.chown(b.folder / "theirs", 65534, 65534)
    return [], b.disk(b.folder / "theirs" / "kvbm")


def disk_tier_in_memory(b):
    return [], b.disk(b.mount("tmpfs", "mode=700"))


def disk_directory_without_a_size(b):
    return [], {"DYN_KVBM_DISK_CACHE_DIR": b.folder, "DYN_KVBM_METRICS": "1"}


def disk_tier_smaller_than_a_block(b):
    return [], b.disk(b.folder, "0.0001")


def disk_directory_in_s3(b):
    return [], b.disk("s3://bucket/kvbm")


def two_disk_directories(b):
    return [], b.disk("/mnt/a:/mnt/b")


def disk_tier_without_a_host_tier(b):
    return [], {**b.disk(b.folder), "DYN_KVBM_CPU_CACHE_GB": "0"}


def no_inodes_left(b):
    folder = b.mount("tmpfs", "nr_inodes=1,mode=700")
    return [], b.disk(folder, "0.01")


def variable_in_a_path(b):
    return [], b.disk("$NO_SUCH_VARIABLE/kvbm")


def drive_not_mounted(b):
    return [], b.disk(b.folder / "nvme7" / "kvbm")


def immutable_directory(b):
    folder = b.folder / "immutable"
    folder.mkdir()
    if subprocess.run(["chattr", "+i", str(folder)], capture_output=True).returncode:
        pytest.skip("this filesystem or user cannot make a directory immutable")
    b._request.addfinalizer(lambda: subprocess.run(["chattr", "-i", str(folder)], check=True))
    return [], b.disk(folder)


def home_of_nobody(b):
    return [], b.disk("~no-such-user/kvbm")


def files_limited_in_size(b):
    b.limit(resource.RLIMIT_FSIZE, 64 << 20)
    return [], b.disk(b.folder)


def both_tiers_in_one_directory(b):
    return [], {"KVBM_HOST_PERSIST": "1", "KVBM_HOST_PERSIST_DIR": b.folder, **b.disk(b.folder)}


def few_open_files(b):
    b.limit(resource.RLIMIT_NOFILE, 256)
    return [], {}


def kept_memory_on_a_disk(b):
    return [], {"KVBM_HOST_PERSIST": "1", "KVBM_HOST_PERSIST_DIR": b.folder}


def kept_memory_in_a_small_container(b):
    return [], {"KVBM_HOST_PERSIST": "1", "KVBM_HOST_PERSIST_DIR": b.mount("tmpfs", "size=64m,mode=700")}


def records_below_a_file(b):
    (b.folder / "file").touch()
    return [], {"DYN_KVBM_ENABLE_RECORD": "1", "KVBM_RECORD_DIR": b.folder / "file" / "records"}


def cpu_build_on_a_gpu_machine(b):
    b.patch.setattr(gpu, "gpus", lambda: (CARD,))
    return [], {}


def gpus_hidden(b):
    b.versions["vllm"] = "0.31.0"
    b.patch.setattr(gpu, "gpus", lambda: (CARD,))
    return [], {"CUDA_VISIBLE_DEVICES": ""}


def url_of_another_service(b):
    return ["--url", str(b.listen())], {}


def pd_connector_in_the_wrong_order(b):
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    extra = {"connectors": [nixl, TRANSFER]}
    transfer = {**TRANSFER, "kv_connector": "PdConnector", "kv_connector_extra_config": extra}
    return ["--kv-transfer-config", json.dumps(transfer)], {}


def pd_connector_without_transport(b):
    transfer = {**TRANSFER, "kv_connector": "PdConnector", "kv_connector_extra_config": {"connectors": [TRANSFER]}}
    return ["--kv-transfer-config", json.dumps(transfer)], {}


def little_address_space(b):
    b.pretend_limit(resource.RLIMIT_AS, 8 << 30)
    return [], {}


def few_processes(b):
    b.pretend_limit(resource.RLIMIT_NPROC, 64)
    b.patch.setattr(os, "geteuid", lambda: 1000)
    return [], {}


def few_processes_in_a_container(b):
    (b.folder / "pids.max").write_text("100\n")
    b.patch.setattr(limits, "PIDS_MAX", b.folder / "pids.max")
    return [], {}


def shared_memory_of_docker(b):
    b.patch.setattr(limits, "SHARED_MEMORY", b.mount("tmpfs", "size=64m"))
    return [], {}


def tmpdir_does_not_exist(b):
    return [], {"TMPDIR": b.folder / "gone"}


def tmpdir_too_long_for_a_socket(b):
    folder = b.folder / ("x" * 100)
    folder.mkdir()
    return [], {"TMPDIR": folder}


def kept_memory_on_a_read_only_mount(b):
    return [], {"KVBM_HOST_PERSIST": "1", "KVBM_HOST_PERSIST_DIR": b.mount("tmpfs", "ro,mode=700")}


def port_of_the_peers_in_use(b):
    address = f"127.0.0.1:{b.listen()}"
    return [], {"KVBM_PEERS_ENABLED": "1", "KVBM_PEER_LISTEN": address, "KVBM_PEER_SECRET": "0123456789abcdef"}


def driver_that_does_not_fit_its_library(b):
    program = b.folder / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    program.chmod(0o755)
    b.patch.setenv("PATH", f"{b.folder}:{os.environ['PATH']}")
    b.patch.setattr(gpu, "_nvidia_smi", REAL_NVIDIA_SMI)
    REAL_NVIDIA_SMI.cache_clear()
    b._request.addfinalizer(REAL_NVIDIA_SMI.cache_clear)
    return [], {}


def gpu_that_is_not_there(b):
    b.versions["vllm"] = "0.31.0"
    b.patch.setattr(gpu, "gpus", lambda: (CARD,))
    return [], {"CUDA_VISIBLE_DEVICES": "0,1"}


def records_on_a_full_filesystem(b):
    folder = b.mount("tmpfs", "size=64k,mode=700")
    return [], {"DYN_KVBM_ENABLE_RECORD": "1", "KVBM_RECORD_DIR": folder}


CASES = [
    ({"KVBM_CPU_CACHE_GB": "20"}, "setting-misspelt", ["KVBM_CPU_CACHE_GB", "did you mean DYN_KVBM_CPU_CACHE_GB?"]),
    (
        {"dyn_kvbm_cpu_cache_gb": "20"},
        "setting-misspelt",
        ["dyn_kvbm_cpu_cache_gb", "did you mean DYN_KVBM_CPU_CACHE_GB?"],
    ),
    ({"DYN_KVBM_CPU_CACHE_GB": "0,5"}, "setting-refused", ["DYN_KVBM_CPU_CACHE_GB='0,5'", "20 or 0.5"]),
    (
        {"DYN_KVBM_LEADER_ZMQ_PUB_PORT": "57001", "DYN_KVBM_LEADER_ZMQ_ACK_PORT": "57001"},
        "setting-refused",
        ["57001", "two different ports"],
    ),
    (
        {"DYN_KVBM_METRICS": "1", "KVBM_METRICS_HOST": "192.0.2.7"},
        "metrics-host",
        ["KVBM_METRICS_HOST=192.0.2.7", "cannot listen"],
    ),
    ({"KVBM_INJECT_FAULTS": "slow-store"}, "faults-injected", ["KVBM_INJECT_FAULTS", "Remove it"]),
    ({"KVBM_LOAD": "never"}, "never-load", ["KVBM_LOAD=never", "auto"]),
    (
        ["--kv-transfer-config", EXAMPLE.replace("vllm_integration.connector", "vllm_integration")],
        "connector-name",
        ["'kvbm.vllm_integration'", "kvbm.vllm_integration.connector"],
    ),
    (["--kv-transfer-config", EXAMPLE.replace('"', "'")], "transfer-json", ["not JSON"]),
    (
        {"DYN_KVBM_METRICS": "1", "KVBM_METRICS_HOST": "localhost:6880"},
        "setting-refused",
        ["KVBM_METRICS_HOST='localhost:6880'", "without scheme or port"],
    ),
    (
        {"DYN_KVBM_LEADER_ZMQ_HOST": "192.0.2.9"},
        "leader-elsewhere",
        ["DYN_KVBM_LEADER_ZMQ_HOST=192.0.2.9", "not an address"],
    ),
    (["--kv-transfer-config", "kv.json"], "transfer-json", ["not JSON", "For example"]),
    (
        ["--kv-transfer-config", json.dumps({**TRANSFER, "kv_connector_extra_config": '{"cpu_cache_gb": 20}'})],
        "transfer-field",
        ["kv_connector_extra_config", "It takes an object"],
    ),
    (
        ["--kv-transfer-config", json.dumps({**TRANSFER, "kv_connector_extra_config": {"cpu_cache_gbs": 20}})],
        "setting-misspelt",
        ["did you mean cpu_cache_gb?"],
    ),
    (
        ["--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'],
        "connector-name",
        ["kvbm.vllm_integration.connector"],
    ),
    ({"DYN_KVBM_CPU_CACHE_GB": "0.001"}, "tier-tiny", ["DYN_KVBM_CPU_CACHE_GB=0.001", "1 MB"]),
    (
        {"DYN_KVBM_CPU_CACHE_GB": "100", "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "100"},
        "memory-unknown",
        ["DYN_KVBM_CPU_CACHE_GB=100 has no effect"],
    ),
    (
        {"DYN_KVBM_CPU_CACHE_GB": "100000000000"},
        "host-memory-short",
        ["DYN_KVBM_CPU_CACHE_GB=100000000000", "not in bytes"],
    ),
    ({"DYN_KVMB_DISK_CACHE_GB": "10"}, "setting-misspelt", ["did you mean DYN_KVBM_DISK_CACHE_GB?"]),
    ({"DYN_KVBM_HOST_CACHE_GB": "10"}, "setting-misspelt", ["did you mean DYN_KVBM_CPU_CACHE_GB?"]),
    (
        ["--kv-transfer-config", json.dumps({**TRANSFER, "kv_connector_extra_config": {"cpu_cache_gb": 0}})],
        "no-tier",
        ["cpu_cache_gb is 0 in kv_connector_extra_config"],
    ),
    (
        ["--kv-transfer-config", json.dumps({"kv_transfer_config": TRANSFER})],
        "transfer-field",
        ['Leave out "kv_transfer_config"'],
    ),
    ({"KVBM_PEERS": "10.0.0.1:23280"}, "setting-without-effect", ["KVBM_PEERS without effect", "KVBM_PEERS_ENABLED"]),
    (
        {"DYN_KVBM_OBJECT_BUCKET": "cache"},
        "setting-without-effect",
        ["DYN_KVBM_OBJECT_BUCKET", "DYN_KVBM_OBJECT_ENABLED"],
    ),
    (
        ["--kv-transfer-config", json.dumps({**TRANSFER, "kv_parallel_size": "two"})],
        "transfer-field",
        ["\"kv_parallel_size\" is 'two'", "number"],
    ),
    (settings_file_missing, "setting-refused", ["kvbm.toml", "No such file"]),
    (settings_file_is_yaml, "setting-refused", ["kvbm.toml", "not a TOML file"]),
    (settings_path_is_a_directory, "setting-refused", ["KVBM_CONFIG_PATH", "Is a directory"]),
    (settings_file_with_a_section, "setting-misspelt", ["put cpu_cache_gb at the top", "[kvbm]"]),
    (settings_file_not_in_utf8, "setting-refused", ["kvbm.toml", "utf-8"]),
    (disk_directory_is_a_file, "disk-not-writable", ["DYN_KVBM_DISK_CACHE_DIR", "is not a directory"]),
    (disk_directory_is_a_loop_of_links, "disk-not-writable", ["DYN_KVBM_DISK_CACHE_DIR", "symbolic links"]),
    (disk_directory_has_a_name_too_long, "disk-not-writable", ["DYN_KVBM_DISK_CACHE_DIR", "too long"]),
    (disk_directory_open_to_all, "disk-not-private", ["DYN_KVBM_DISK_CACHE_DIR", "chmod"]),
    (disk_on_nfs, "disk-not-a-disk", ["nfs4", "another machine", "NVMe"]),
    (relative_disk_directory, "disk-dir-missing", ["DYN_KVBM_DISK_CACHE_DIR=cache/kvbm", "is relative"]),
    (disk_directory_is_a_dangling_link, "disk-dir-missing", ["gone/away", "does not exist"]),
    (disk_directory_of_another_user, "disk-not-private", ["belongs to uid 65534", "DYN_KVBM_DISK_CACHE_DIR"]),
    (disk_tier_in_memory, "disk-not-a-disk", ["tmpfs", "memory"]),
    (disk_directory_without_a_size, "setting-without-effect", ["DYN_KVBM_DISK_CACHE_DIR without effect"]),
    (disk_tier_smaller_than_a_block, "tier-tiny", ["DYN_KVBM_DISK_CACHE_GB=0.0001", "100 kB"]),
    (disk_directory_in_s3, "disk-dir-not-a-path", ["DYN_KVBM_DISK_CACHE_DIR=s3:/bucket", "DYN_KVBM_OBJECT_BUCKET"]),
    (two_disk_directories, "disk-dir-not-a-path", ["DYN_KVBM_DISK_CACHE_DIR=/mnt/a:/mnt/b", "one path"]),
    (disk_tier_without_a_host_tier, "disk-without-host", ["experimental", "DYN_KVBM_CPU_CACHE_GB"]),
    (no_inodes_left, "disk-full", ["no free inodes"]),
    (variable_in_a_path, "disk-dir-not-a-path", ["DYN_KVBM_DISK_CACHE_DIR=$NO_SUCH_VARIABLE", "contains a $"]),
    (drive_not_mounted, "disk-dir-missing", ["nvme7", "does not exist", "mount it"]),
    (immutable_directory, "disk-not-writable", ["is not writable", "lsattr"]),
    (home_of_nobody, "setting-refused", ["DYN_KVBM_DISK_CACHE_DIR='~no-such-user/kvbm'", "home directory"]),
    (files_limited_in_size, "file-size-limit", ["67.1 MB", "ulimit -f"]),
    (both_tiers_in_one_directory, "setting-refused", ["cannot use the same directory"]),
    (few_open_files, "open-files", ["256 open files", "ulimit -n"]),
    (kept_memory_on_a_disk, "persist-not-memory", ["KVBM_HOST_PERSIST_DIR", "not memory", "/dev/shm"]),
    (kept_memory_in_a_small_container, "memory-not-kept", ["KVBM_HOST_PERSIST", "67.1 MB", "--shm-size"]),
    (records_below_a_file, "record-dir", ["KVBM_RECORD_DIR", "not a directory"]),
    (cpu_build_on_a_gpu_machine, "cpu-build", ["0.31.0+cpu", "CUDA build"]),
    (gpus_hidden, "gpu-hidden", ["CUDA_VISIBLE_DEVICES"]),
    (url_of_another_service, "engine-not-reachable", ["DYN_KVBM_METRICS"]),
    (pd_connector_in_the_wrong_order, "connector-order", ["NixlConnector, DynamoConnector", "first"]),
    (pd_connector_without_transport, "connector-order", ["takes two", "NixlConnector"]),
    (little_address_space, "address-space-limit", ["8.59 GB", "ulimit -v"]),
    (few_processes, "process-limit", ["ulimit -u allows 64"]),
    (few_processes_in_a_container, "process-limit", ["the container's pids limit allows 100", "--pids-limit"]),
    (shared_memory_of_docker, "shared-memory-small", ["67.1 MB", "--shm-size"]),
    (tmpdir_does_not_exist, "tmpdir", ["TMPDIR=", "is not a directory"]),
    (tmpdir_too_long_for_a_socket, "tmpdir", ["TMPDIR=", "too long"]),
    (kept_memory_on_a_read_only_mount, "memory-not-kept", ["KVBM_HOST_PERSIST_DIR", "Read-only"]),
    (port_of_the_peers_in_use, "peer-listen", ["KVBM_PEER_LISTEN=127.0.0.1:", "in use"]),
    (driver_that_does_not_fit_its_library, "driver-broken", ["Driver/library version mismatch"]),
    (gpu_that_is_not_there, "gpu-hidden", ["CUDA_VISIBLE_DEVICES='0,1'", "this machine has 1"]),
    (records_on_a_full_filesystem, "record-dir", ["KVBM_RECORD_DIR", "full"]),
]


def name_of(case):
    return case.__name__ if callable(case) else str(case)


@pytest.mark.parametrize(("case", "name", "words"), CASES, ids=[name_of(case) for case, _, _ in CASES])
def test_the_cause_is_named(ask, tmp_path, monkeypatch, mount, versions, request, case, name, words):
    assert_named(ask, case, name, words, Bench(tmp_path, monkeypatch, mount, versions, request))


def assert_named(ask, case, name, words, bench):
    if callable(case):
        arguments, broken = case(bench)
    else:
        arguments, broken = ([], case) if isinstance(case, dict) else (case, {})
    code, found = ask("--quick", *arguments, **{**GOOD, **broken})
    assert name in found, {each: finding["text"] for each, finding in found.items()}
    text = f"{found[name]['text']} {found[name]['cure']}"
    assert [word for word in words if word not in text] == [], text
    assert found[name]["level"] != "good"
    assert code == (found[name]["level"] == "bad") or any(finding["level"] == "bad" for finding in found.values())
    assert "check-failed" not in found


def test_the_good_set_up_has_none_of_these(ask):
    _, found = ask("--quick", "--kv-transfer-config", EXAMPLE, DYN_KVBM_METRICS="1", **GOOD)
    assert not {name for _, name, _ in CASES if name != "shared-memory-small"} & set(found)
