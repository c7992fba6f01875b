"""What an adapter is called where blocks outlive the engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvbm.engines.vllm import keys


@pytest.fixture
def lora(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "_first_seen", {})
    (tmp_path / "adapter.safetensors").write_bytes(b"1")
    return SimpleNamespace(lora_name="x", lora_int_id=1, lora_path=str(tmp_path), file=tmp_path / "adapter.safetensors")


def next_engine(monkeypatch):
    monkeypatch.setattr(keys, "_first_seen", {})
    monkeypatch.setattr(keys, "_this_process", "another")


def test_the_next_engine_finds_what_was_computed_with_the_same_files(lora, monkeypatch):
    name = keys.adapter_name(lora)
    assert keys.adapter_name(lora) == name
    next_engine(monkeypatch)
    assert keys.adapter_name(lora) == name


def test_files_that_change_under_an_engine_share_nothing_with_the_engines_after_it(lora, monkeypatch):
    """The engine may go on with the adapter that it has in memory, or may have read the new one."""
    before = keys.adapter_name(lora)
    lora.file.write_bytes(b"22")
    doubtful = keys.adapter_name(lora)
    next_engine(monkeypatch)
    after = keys.adapter_name(lora)
    assert len({before, doubtful, after}) == 3


def test_adapters_of_one_name_in_two_folders_are_two(lora, tmp_path):
    other = SimpleNamespace(**{**vars(lora), "lora_path": str(tmp_path.parent)})
    assert keys.adapter_name(lora) != keys.adapter_name(other)


def test_a_request_is_known_by_its_adapters_whole_name(lora):
    request = SimpleNamespace(lora_request=lora, mm_features=(), cache_salt=None)
    assert keys.scope_of(request).lora == keys.adapter_name(lora)
