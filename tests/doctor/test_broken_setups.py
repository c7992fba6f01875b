"""Set-ups broken on purpose. `kvbm doctor` must name the cause of each: the setting or the place, and what is wrong.

A case breaks one thing of a good set-up and returns the arguments and the variables of the command. Beside it: the
finding, and words that its text or its cure must have.
"""

from __future__ import annotations

import http.server
import json
import os
import resource
import threading

import pytest

from kvbm.doctor import gpu
from kvbm.engines.vllm.transfer_config import EXAMPLE, TRANSFER

GOOD = {"DYN_KVBM_CPU_CACHE_GB": "0.1"}
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


def prefix_forgotten(b):
    return [], {"KVBM_CPU_CACHE_GB": "20"}


def lower_case_variable(b):
    return [], {"dyn_kvbm_cpu_cache_gb": "20"}


def decimal_comma(b):
    return [], {"DYN_KVBM_CPU_CACHE_GB": "0,5"}


def one_port_for_two(b):
    return [], {"DYN_KVBM_LEADER_ZMQ_PUB_PORT": "57001", "DYN_KVBM_LEADER_ZMQ_ACK_PORT": "57001"}


def metrics_on_an_address_of_another_machine(b):
    return [], {"DYN_KVBM_METRICS": "1", "KVBM_METRICS_HOST": "192.0.2.7"}


def faults_left_on(b):
    return [], {"KVBM_INJECT_FAULTS": "slow-store"}


def loads_turned_off(b):
    return [], {"KVBM_LOAD": "never"}


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


def no_inodes_left(b):
    folder = b.mount("tmpfs", "nr_inodes=1,mode=700")
    return [], b.disk(folder, "0.01")


def disk_on_nfs(b):
    b.patch.setattr("kvbm.doctor.tiers.mount_of", lambda path: (b.folder, "nfs4"))
    return [], b.disk(b.folder)


def files_limited_in_size(b):
    b.limit(resource.RLIMIT_FSIZE, 64 << 20)
    return [], b.disk(b.folder)


def few_open_files(b):
    b.limit(resource.RLIMIT_NOFILE, 256)
    return [], {}


def kept_memory_on_a_disk(b):
    return [], {"KVBM_HOST_PERSIST": "1", "KVBM_HOST_PERSIST_DIR": b.folder}


def kept_memory_in_a_small_container(b):
    return [], {"KVBM_HOST_PERSIST": "1", "KVBM_HOST_PERSIST_DIR": b.mount("tmpfs", "size=64m,mode=700")}


def both_tiers_in_one_directory(b):
    return [], {"KVBM_HOST_PERSIST": "1", "KVBM_HOST_PERSIST_DIR": b.folder, **b.disk(b.folder)}


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


def module_path_cut_short(b):
    return ["--kv-transfer-config", EXAMPLE.replace("vllm_integration.connector", "vllm_integration")], {}


def json_quoted_for_another_shell(b):
    return ["--kv-transfer-config", EXAMPLE.replace('"', "'")], {}


def pd_connector_in_the_wrong_order(b):
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    extra = {"connectors": [nixl, TRANSFER]}
    transfer = {**TRANSFER, "kv_connector": "PdConnector", "kv_connector_extra_config": extra}
    return ["--kv-transfer-config", json.dumps(transfer)], {}


def pd_connector_without_transport(b):
    transfer = {**TRANSFER, "kv_connector": "PdConnector", "kv_connector_extra_config": {"connectors": [TRANSFER]}}
    return ["--kv-transfer-config", json.dumps(transfer)], {}


CASES = [
    (settings_file_missing, "setting-refused", ["kvbm.toml", "No such file"]),
    (settings_file_is_yaml, "setting-refused", ["kvbm.toml", "not a TOML file"]),
    (prefix_forgotten, "setting-misspelt", ["KVBM_CPU_CACHE_GB", "did you mean DYN_KVBM_CPU_CACHE_GB?"]),
    (lower_case_variable, "setting-misspelt", ["dyn_kvbm_cpu_cache_gb", "did you mean DYN_KVBM_CPU_CACHE_GB?"]),
    (decimal_comma, "setting-refused", ["DYN_KVBM_CPU_CACHE_GB='0,5'", "20 or 0.5"]),
    (one_port_for_two, "setting-refused", ["57001", "two different ports"]),
    (metrics_on_an_address_of_another_machine, "metrics-host", ["KVBM_METRICS_HOST=192.0.2.7", "cannot listen"]),
    (faults_left_on, "faults-injected", ["KVBM_INJECT_FAULTS", "Remove it"]),
    (loads_turned_off, "never-load", ["KVBM_LOAD=never", "auto"]),
    (disk_directory_is_a_file, "disk-not-writable", ["DYN_KVBM_DISK_CACHE_DIR", "is not a directory"]),
    (disk_directory_is_a_loop_of_links, "disk-not-writable", ["DYN_KVBM_DISK_CACHE_DIR", "symbolic links"]),
    (disk_directory_has_a_name_too_long, "disk-not-writable", ["DYN_KVBM_DISK_CACHE_DIR", "too long"]),
    (disk_directory_open_to_all, "disk-not-private", ["DYN_KVBM_DISK_CACHE_DIR", "chmod"]),
    (no_inodes_left, "disk-full", ["no free inodes"]),
    (disk_on_nfs, "disk-not-a-disk", ["nfs4", "another machine", "NVMe"]),
    (files_limited_in_size, "file-size-limit", ["67.1 MB", "ulimit -f"]),
    (few_open_files, "open-files", ["256 open files", "ulimit -n"]),
    (kept_memory_on_a_disk, "persist-not-memory", ["KVBM_HOST_PERSIST_DIR", "not memory", "/dev/shm"]),
    (kept_memory_in_a_small_container, "memory-not-kept", ["KVBM_HOST_PERSIST", "67.1 MB", "--shm-size"]),
    (both_tiers_in_one_directory, "setting-refused", ["cannot use the same directory"]),
    (records_below_a_file, "record-dir", ["KVBM_RECORD_DIR", "not a directory"]),
    (cpu_build_on_a_gpu_machine, "cpu-build", ["0.31.0+cpu", "CUDA build"]),
    (gpus_hidden, "gpu-hidden", ["CUDA_VISIBLE_DEVICES"]),
    (url_of_another_service, "engine-not-reachable", ["DYN_KVBM_METRICS"]),
    (module_path_cut_short, "connector-name", ["'kvbm.vllm_integration'", "kvbm.vllm_integration.connector"]),
    (json_quoted_for_another_shell, "transfer-json", ["not JSON"]),
    (pd_connector_in_the_wrong_order, "connector-order", ["NixlConnector, DynamoConnector", "first"]),
    (pd_connector_without_transport, "connector-order", ["takes two", "NixlConnector"]),
]


@pytest.mark.parametrize(("case", "name", "words"), CASES, ids=[case.__name__ for case, _, _ in CASES])
def test_the_cause_is_named(ask, tmp_path, monkeypatch, mount, versions, request, case, name, words):
    assert_named(ask, case, Bench(tmp_path, monkeypatch, mount, versions, request), name, words)


def assert_named(ask, case, bench, name, words):
    arguments, broken = case(bench)
    code, found = ask("--quick", *arguments, **{**GOOD, **broken})
    assert name in found, {each: finding["text"] for each, finding in found.items()}
    text = f"{found[name]['text']} {found[name]['cure']}"
    assert [word for word in words if word not in text] == [], text
    assert found[name]["level"] != "good"
    assert code == (found[name]["level"] == "bad") or any(finding["level"] == "bad" for finding in found.values())
    assert "check-failed" not in found


def test_the_good_set_up_has_none_of_these(ask):
    _, found = ask("--quick", "--kv-transfer-config", EXAMPLE, **GOOD)
    assert not {name for _, name, _ in CASES} & set(found)
