"""A machine without faults, and a way to run `kvbm doctor` on it."""

from __future__ import annotations

import json
import os
import subprocess
from importlib import metadata

import pytest

import kvbm
from kvbm import config
from kvbm.cli.main import main
from kvbm.doctor import base, gpu, setup
from servers import free_ports

VERSIONS = {"vllm": "0.31.0+cpu", "torch": "2.13.0+cpu", "kvbm": kvbm.__version__}
PORTS = ("DYN_KVBM_METRICS_PORT", "DYN_KVBM_LEADER_ZMQ_PUB_PORT", "DYN_KVBM_LEADER_ZMQ_ACK_PORT")


@pytest.fixture(autouse=True)
def versions(monkeypatch, tmp_path):
    """The packages that the doctor finds; a test may change them."""
    for name in list(os.environ):
        if "KVBM" in name or name.startswith("DYN_"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # of the tests themselves
    installed = dict(VERSIONS)

    def version(name):
        if name in installed:
            return installed[name]
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(config.table, "SYSTEM_FILE", tmp_path / "missing.toml")
    monkeypatch.setattr(gpu, "gpus", lambda: ())
    monkeypatch.setattr(gpu, "_nvidia_smi", lambda: ((), ""))
    monkeypatch.setattr(setup, "gpus", lambda: ())
    monkeypatch.setattr(base, "servers", list)  # other tests run engines
    monkeypatch.setattr(metadata, "version", version)
    # Others on this machine may have the usual ones.
    for name, port in zip(PORTS, free_ports(len(PORTS)), strict=True):
        monkeypatch.setenv(name, str(port))
    monkeypatch.setenv("DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR", "0")
    return installed


@pytest.fixture
def ask(monkeypatch, capsys):
    """Runs the command with these variables: (exit code, name of a finding -> finding)."""

    def run(*arguments, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        code = main(["doctor", "--json", *arguments])
        answer = json.loads(capsys.readouterr().out)
        assert answer["ok"] == (code == 0)
        return code, {finding["name"]: finding for finding in answer["findings"]}

    return run


@pytest.fixture
def mount(tmp_path):
    """Mounts a filesystem: ``mount("tmpfs", "size=1m")``. Takes root."""
    mounted = []

    def mount(kind, options="", source="none"):
        folder = tmp_path / f"mount-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", kind, *(["-o", options] if options else []), str(source), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this user cannot mount a filesystem: {done.stderr}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)
