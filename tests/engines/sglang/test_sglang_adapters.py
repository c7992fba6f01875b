"""SGLang servers with LoRA adapters get no storage backend."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvbm.engines.sglang.adapters import refuse_adapters


@pytest.fixture
def server(monkeypatch):
    """The arguments of the server in whose process this is."""
    arguments = SimpleNamespace(enable_lora=None, lora_paths=None)
    context = ModuleType("sglang.srt.runtime_context")
    context.get_server_args = lambda: arguments
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, context.__name__, context)
    return arguments


def test_a_server_with_adapters_is_told_so_at_start(server):
    refuse_adapters()
    server.enable_lora = True
    with pytest.raises(ValueError, match="--enable-lora"):
        refuse_adapters()
    server.enable_lora, server.lora_paths = None, ["sql=/adapters/sql"]
    with pytest.raises(ValueError, match="--lora-paths"):
        refuse_adapters()


def test_a_server_that_does_not_say_whether_it_has_adapters_is_refused(server, monkeypatch):
    def not_set():
        raise ValueError("server args are not set")

    monkeypatch.setattr(sys.modules["sglang.srt.runtime_context"], "get_server_args", not_set)
    with pytest.raises(ValueError, match=r"runtime_context\.get_server_args failed.*not set"):
        refuse_adapters()
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", ModuleType("sglang.srt.runtime_context"))
    with pytest.raises(ValueError, match="ImportError"):
        refuse_adapters()
