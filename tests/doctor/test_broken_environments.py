"""More set-ups broken on purpose, as in test_broken_setups.py: of the environment that an engine starts in."""

from __future__ import annotations

import json
import os
import resource
import subprocess

import pytest
from test_broken_setups import CARD, GOOD, Bench, assert_named

from kvbm.doctor import gpu, limits
from kvbm.engines.vllm.transfer_config import EXAMPLE, TRANSFER

REAL_NVIDIA_SMI = gpu._nvidia_smi


def limit(b, which, value):
    """Not a real limit: the tests themselves would fail of it."""
    real = resource.getrlimit
    b.patch.setattr(resource, "getrlimit", lambda each: (value, value) if each == which else real(each))


def settings_path_is_a_directory(b):
    return [], {"KVBM_CONFIG_PATH": b.folder}


def settings_file_with_a_section(b):
    (b.folder / "kvbm.toml").write_text("[kvbm]\ncpu_cache_gb = 20\n")
    return [], {"KVBM_CONFIG_PATH": b.folder / "kvbm.toml"}


def settings_file_not_in_utf8(b):
    (b.folder / "kvbm.toml").write_bytes(b"# \xe4\ncpu_cache_gb = 1\n")
    return [], {"KVBM_CONFIG_PATH": b.folder / "kvbm.toml"}


def variable_in_a_path(b):
    return [], b.disk("$NO_SUCH_VARIABLE/kvbm")


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


def drive_not_mounted(b):
    return [], b.disk(b.folder / "nvme7" / "kvbm")


def immutable_directory(b):
    folder = b.folder / "immutable"
    folder.mkdir()
    if subprocess.run(["chattr", "+i", str(folder)], capture_output=True).returncode:
        pytest.skip("this filesystem or user cannot make a directory immutable")
    b._request.addfinalizer(lambda: subprocess.run(["chattr", "-i", str(folder)], check=True))
    return [], b.disk(folder)


def little_address_space(b):
    limit(b, resource.RLIMIT_AS, 8 << 30)
    return [], {}


def few_processes(b):
    limit(b, resource.RLIMIT_NPROC, 64)
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


def metrics_host_with_a_port(b):
    return [], {"DYN_KVBM_METRICS": "1", "KVBM_METRICS_HOST": "localhost:6880"}


def leader_on_another_machine(b):
    return [], {"DYN_KVBM_LEADER_ZMQ_HOST": "192.0.2.9"}


def transfer_config_in_a_file(b):
    return ["--kv-transfer-config", "kv.json"], {}


def extra_config_as_text(b):
    return ["--kv-transfer-config", json.dumps({**TRANSFER, "kv_connector_extra_config": '{"cpu_cache_gb": 20}'})], {}


def misspelt_key_in_the_extra_config(b):
    return ["--kv-transfer-config", json.dumps({**TRANSFER, "kv_connector_extra_config": {"cpu_cache_gbs": 20}})], {}


def connector_of_another_cache(b):
    return ["--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'], {}


def host_tier_of_a_few_blocks(b):
    return [], {"DYN_KVBM_CPU_CACHE_GB": "0.001"}


def size_in_blocks_beside_one_in_gigabytes(b):
    return [], {"DYN_KVBM_CPU_CACHE_GB": "100", "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "100"}


def bytes_for_gigabytes(b):
    return [], {"DYN_KVBM_CPU_CACHE_GB": "100000000000"}


def kept_memory_on_a_read_only_mount(b):
    return [], {"KVBM_HOST_PERSIST": "1", "KVBM_HOST_PERSIST_DIR": b.mount("tmpfs", "ro,mode=700")}


def prefix_with_two_letters_swapped(b):
    return [], {"DYN_KVMB_DISK_CACHE_GB": "10"}


def host_for_cpu(b):
    return [], {"DYN_KVBM_HOST_CACHE_GB": "10"}


def disk_directory_without_a_size(b):
    return [], {"DYN_KVBM_DISK_CACHE_DIR": b.folder, "DYN_KVBM_METRICS": "1"}


def disk_tier_smaller_than_a_block(b):
    return [], b.disk(b.folder, "0.0001")


def disk_directory_in_s3(b):
    return [], b.disk("s3://bucket/kvbm")


def two_disk_directories(b):
    return [], b.disk("/mnt/a:/mnt/b")


def port_of_the_peers_in_use(b):
    address = f"127.0.0.1:{b.listen()}"
    return [], {"KVBM_PEERS_ENABLED": "1", "KVBM_PEER_LISTEN": address, "KVBM_PEER_SECRET": "0123456789abcdef"}


def home_of_nobody(b):
    return [], b.disk("~no-such-user/kvbm")


def tier_turned_off_in_the_extra_config(b):
    return ["--kv-transfer-config", json.dumps({**TRANSFER, "kv_connector_extra_config": {"cpu_cache_gb": 0}})], {}


def transfer_config_wrapped_in_its_name(b):
    return ["--kv-transfer-config", json.dumps({"kv_transfer_config": TRANSFER})], {}


def disk_tier_without_a_host_tier(b):
    return [], {**b.disk(b.folder), "DYN_KVBM_CPU_CACHE_GB": "0"}


def peers_named_and_off(b):
    return [], {"KVBM_PEERS": "10.0.0.1:23280"}


def bucket_named_and_off(b):
    return [], {"DYN_KVBM_OBJECT_BUCKET": "cache"}


def word_for_a_number_of_vllm(b):
    return ["--kv-transfer-config", json.dumps({**TRANSFER, "kv_parallel_size": "two"})], {}


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
    (settings_path_is_a_directory, "setting-refused", ["KVBM_CONFIG_PATH", "Is a directory"]),
    (settings_file_with_a_section, "setting-misspelt", ["put cpu_cache_gb at the top", "[kvbm]"]),
    (settings_file_not_in_utf8, "setting-refused", ["kvbm.toml", "utf-8"]),
    (variable_in_a_path, "disk-dir-not-a-path", ["DYN_KVBM_DISK_CACHE_DIR=$NO_SUCH_VARIABLE", "contains a $"]),
    (relative_disk_directory, "disk-dir-missing", ["DYN_KVBM_DISK_CACHE_DIR=cache/kvbm", "is relative"]),
    (disk_directory_is_a_dangling_link, "disk-dir-missing", ["gone/away", "does not exist"]),
    (disk_directory_of_another_user, "disk-not-private", ["belongs to uid 65534", "DYN_KVBM_DISK_CACHE_DIR"]),
    (disk_tier_in_memory, "disk-not-a-disk", ["tmpfs", "memory"]),
    (drive_not_mounted, "disk-dir-missing", ["nvme7", "does not exist", "mount it"]),
    (immutable_directory, "disk-not-writable", ["is not writable", "lsattr"]),
    (little_address_space, "address-space-limit", ["8.59 GB", "ulimit -v"]),
    (few_processes, "process-limit", ["ulimit -u allows 64"]),
    (few_processes_in_a_container, "process-limit", ["the container's pids limit allows 100", "--pids-limit"]),
    (shared_memory_of_docker, "shared-memory-small", ["67.1 MB", "--shm-size"]),
    (tmpdir_does_not_exist, "tmpdir", ["TMPDIR=", "is not a directory"]),
    (tmpdir_too_long_for_a_socket, "tmpdir", ["TMPDIR=", "too long"]),
    (metrics_host_with_a_port, "setting-refused", ["KVBM_METRICS_HOST='localhost:6880'", "without scheme or port"]),
    (leader_on_another_machine, "leader-elsewhere", ["DYN_KVBM_LEADER_ZMQ_HOST=192.0.2.9", "not an address"]),
    (transfer_config_in_a_file, "transfer-json", ["not JSON", "For example"]),
    (extra_config_as_text, "transfer-field", ["kv_connector_extra_config", "It takes an object"]),
    (misspelt_key_in_the_extra_config, "setting-misspelt", ["did you mean cpu_cache_gb?"]),
    (connector_of_another_cache, "connector-name", ["kvbm.vllm_integration.connector"]),
    (host_tier_of_a_few_blocks, "tier-tiny", ["DYN_KVBM_CPU_CACHE_GB=0.001", "1 MB"]),
    (size_in_blocks_beside_one_in_gigabytes, "memory-unknown", ["DYN_KVBM_CPU_CACHE_GB=100 has no effect"]),
    (bytes_for_gigabytes, "host-memory-short", ["DYN_KVBM_CPU_CACHE_GB=100000000000", "not in bytes"]),
    (kept_memory_on_a_read_only_mount, "memory-not-kept", ["KVBM_HOST_PERSIST_DIR", "Read-only"]),
    (prefix_with_two_letters_swapped, "setting-misspelt", ["did you mean DYN_KVBM_DISK_CACHE_GB?"]),
    (disk_directory_without_a_size, "setting-without-effect", ["DYN_KVBM_DISK_CACHE_DIR without effect"]),
    (disk_tier_smaller_than_a_block, "tier-tiny", ["DYN_KVBM_DISK_CACHE_GB=0.0001", "100 kB"]),
    (disk_directory_in_s3, "disk-dir-not-a-path", ["DYN_KVBM_DISK_CACHE_DIR=s3:/bucket", "DYN_KVBM_OBJECT_BUCKET"]),
    (two_disk_directories, "disk-dir-not-a-path", ["DYN_KVBM_DISK_CACHE_DIR=/mnt/a:/mnt/b", "one path"]),
    (port_of_the_peers_in_use, "peer-listen", ["KVBM_PEER_LISTEN=127.0.0.1:", "in use"]),
    (home_of_nobody, "setting-refused", ["DYN_KVBM_DISK_CACHE_DIR='~no-such-user/kvbm'", "home directory"]),
    (tier_turned_off_in_the_extra_config, "no-tier", ["cpu_cache_gb is 0 in kv_connector_extra_config"]),
    (transfer_config_wrapped_in_its_name, "transfer-field", ['Leave out "kv_transfer_config"']),
    (disk_tier_without_a_host_tier, "disk-without-host", ["experimental", "DYN_KVBM_CPU_CACHE_GB"]),
    (peers_named_and_off, "setting-without-effect", ["KVBM_PEERS without effect", "KVBM_PEERS_ENABLED"]),
    (bucket_named_and_off, "setting-without-effect", ["DYN_KVBM_OBJECT_BUCKET", "DYN_KVBM_OBJECT_ENABLED"]),
    (word_for_a_number_of_vllm, "transfer-field", ["\"kv_parallel_size\" is 'two'", "number"]),
    (driver_that_does_not_fit_its_library, "driver-broken", ["Driver/library version mismatch"]),
    (gpu_that_is_not_there, "gpu-hidden", ["CUDA_VISIBLE_DEVICES='0,1'", "this machine has 1"]),
    (records_on_a_full_filesystem, "record-dir", ["KVBM_RECORD_DIR", "full"]),
    (host_for_cpu, "setting-misspelt", ["did you mean DYN_KVBM_CPU_CACHE_GB?"]),
]


@pytest.mark.parametrize(("case", "name", "words"), CASES, ids=[case.__name__ for case, _, _ in CASES])
def test_the_cause_is_named(ask, tmp_path, monkeypatch, mount, versions, request, case, name, words):
    assert_named(ask, case, Bench(tmp_path, monkeypatch, mount, versions, request), name, words)


def test_the_good_set_up_has_none_of_these(ask):
    _, found = ask("--quick", "--kv-transfer-config", EXAMPLE, DYN_KVBM_METRICS="1", **GOOD)
    assert not {name for _, name, _ in CASES if name != "shared-memory-small"} & set(found)
