"""More set-ups broken on purpose, as in test_broken_setups.py: containers without a home, other platforms, JSON that a
text program has changed."""

from __future__ import annotations

import json
import platform
import sys

import pytest
from test_broken_setups import CARD, Bench, assert_named, name_of

from kvbm.doctor import gpu, memory
from kvbm.engines.vllm.transfer_config import EXAMPLE, TRANSFER


def home_that_cannot_be_written(b):
    b.patch.delenv("XDG_CACHE_HOME", raising=False)
    b.patch.delenv("VLLM_CACHE_ROOT", raising=False)
    return [], {"HOME": b.mount("tmpfs", "ro,mode=755")}


def vllm_for_rocm(b):
    b.versions["vllm"] = "0.31.0+rocm700"
    return [], {}


def vllm_for_rocm_beside_an_nvidia_gpu(b):
    b.patch.setattr(gpu, "gpus", lambda: (CARD,))
    return vllm_for_rocm(b)


def another_processor(b):
    b.patch.setattr(platform, "machine", lambda: "aarch64")
    return [], {}


def a_python_of_the_future(b):
    b.patch.setattr(sys, "version_info", (3, 15, 0, "final", 0))
    b.patch.setattr(platform, "python_version", lambda: "3.15.0")
    return [], {}


def windows_subsystem_for_linux(b):
    b.patch.setattr(platform, "release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    return [], {}


def memory_of_one_node_only(b):
    for node, free in enumerate((50_000, 90_000_000)):
        folder = b.folder / f"node{node}"
        folder.mkdir()
        rows = (("MemTotal", 99_000_000), ("MemFree", free), ("FilePages", 10_000))
        (folder / "meminfo").write_text("".join(f"Node {node} {name}:  {value} kB\n" for name, value in rows))
    (b.folder / "status").write_text("Name:\tpython\nMems_allowed:\t01\nMems_allowed_list:\t0\n")
    b.patch.setattr(memory, "STATUS", b.folder / "status")
    b.patch.setattr(memory, "NODES", b.folder)
    return [], {}


def with_extra(**fields):
    return ["--kv-transfer-config", json.dumps({**TRANSFER, "kv_connector_extra_config": fields})]


PEERS = {"KVBM_PEERS_ENABLED": "1", "KVBM_PEER_LISTEN": "127.0.0.1:23280"}
QUOTED = EXAMPLE.replace(' "', " “").replace('",', "”,")

CASES = [
    (home_that_cannot_be_written, "engine-cache", [".cache/vllm", "not writable", "VLLM_CACHE_ROOT"]),
    (vllm_for_rocm, "not-nvidia", ["0.31.0+rocm700", "NVIDIA"]),
    (vllm_for_rocm_beside_an_nvidia_gpu, "not-nvidia", ["0.31.0+rocm700", "CUDA build"]),
    (another_processor, "platform-untested", ["aarch64"]),
    (a_python_of_the_future, "platform-untested", ["Python 3.15.0"]),
    (windows_subsystem_for_linux, "platform-untested", ["WSL 2", "pinned memory"]),
    (memory_of_one_node_only, "memory-node", ["DYN_KVBM_CPU_CACHE_GB=0.1", "61.4 MB", "--cpuset-mems"]),
    (PEERS, "peers-secret", ["KVBM_PEER_SECRET_FILE", "16 characters"]),
    (["--kv-transfer-config", QUOTED], "transfer-json", ["typographic quotes"]),
    (
        with_extra(kv_load_failure_policy="recompute"),
        "transfer-field",
        ['"kv_load_failure_policy" stands in', "beside"],
    ),
    (with_extra(kv_role="kv_both"), "transfer-field", ['"kv_role" stands in', "beside"]),
]


@pytest.mark.parametrize(("case", "name", "words"), CASES, ids=[name_of(case) for case, _, _ in CASES])
def test_the_cause_is_named(ask, tmp_path, monkeypatch, mount, versions, request, case, name, words):
    assert_named(ask, case, name, words, Bench(tmp_path, monkeypatch, mount, versions, request))


def test_sudo_is_named_where_no_variable_arrived(ask):
    found = ask("--quick", SUDO_USER="me")[1]
    assert "sudo -E" in found["no-tier"]["cure"]


def test_a_usual_platform_has_none_of_these(ask, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "release", lambda: "6.8.0")
    _, found = ask("--quick", "--kv-transfer-config", EXAMPLE, DYN_KVBM_CPU_CACHE_GB="0.1")
    assert not {name for _, name, _ in CASES} & set(found)
