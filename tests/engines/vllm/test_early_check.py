"""The look at the settings when vLLM imports the connector."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from kvbm.doctor.connector import FIELDS
from kvbm.engines.vllm import early_check
from kvbm.engines.vllm.transfer_config import EXAMPLE, TRANSFER, on_command_line, our_part


@pytest.fixture(autouse=True)
def _keep_hook(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "plenty")


def command(extra=None, **changes):
    return ["vllm", "serve", "m", "--kv-transfer-config", json.dumps({**TRANSFER, **changes, **(extra or {})})]


def test_a_wrong_value_is_refused_and_not_as_a_value_error():
    with pytest.raises(early_check.SettingsRefusedError, match="DYN_KVBM_CPU_CACHE_GB='plenty'") as refused:
        early_check.check_command_line(command())
    assert not isinstance(refused.value, ValueError)


def test_a_value_that_the_json_overrides_is_no_fault():
    early_check.check_command_line(command({"kv_connector_extra_config": {"cpu_cache_gb": 1}}))


@pytest.mark.parametrize("argv", [["pytest"], ["vllm", "serve", "m"], ["vllm", "--kv-transfer-config"], []])
def test_without_the_json_nothing_is_known_yet(argv):
    early_check.check_command_line(argv)


@pytest.mark.parametrize(
    "argv", [["--kv-transfer-config", "{}"], ["--kv-transfer-config={}"], ["a", "--kv_transfer_config={}", "b"]]
)
def test_the_json_is_found_in_every_form(argv):
    assert on_command_line(argv) == "{}"


@pytest.mark.parametrize("outer", ["PdConnector", "MultiConnector"])
def test_our_part_is_found_among_others(outer):
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    whole = {"kv_connector": outer, "kv_connector_extra_config": {"connectors": [nixl, TRANSFER]}}
    assert our_part(whole) == TRANSFER
    assert (
        our_part({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [whole]}}) == TRANSFER
    )


def test_the_doctor_knows_the_fields_of_vllm():
    config = pytest.importorskip("vllm.config.kv_transfer")
    assert {field.name for field in dataclasses.fields(config.KVTransferConfig)} <= FIELDS


def test_the_message_stands_alone():
    program = "from kvbm.engines.vllm import early_check as e; import sys; e.check_command_line(sys.argv)"
    argv = [sys.executable, "-c", program, "--kv-transfer-config", EXAMPLE]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    first, last = done.stderr.strip().splitlines()
    assert first.startswith("KVBM cannot start: DYN_KVBM_CPU_CACHE_GB='plenty'")
    assert "kvbm doctor" in last
