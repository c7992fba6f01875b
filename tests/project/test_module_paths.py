"""Where configurations look for KVBM: every path that guides have named leads to the same classes."""

from __future__ import annotations

import importlib

import pytest

import kvbm


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("kvbm.vllm_integration.connector", ("DynamoConnector", "PdConnector")),
        ("kvbm.vllm_integration.connector.dynamo_connector", ("DynamoConnector", "DynamoConnectorMetadata")),
        ("kvbm.vllm_integration.connector.pd_connector", ("PdConnector", "PdConnectorMetadata")),
        ("dynamo.llm.vllm_integration.connector", ("DynamoConnector", "PdConnector", "PdConnectorMetadata")),
    ],
)
def test_every_path_leads_to_the_same_classes(module, names):
    pytest.importorskip("vllm")
    found, ours = importlib.import_module(module), importlib.import_module("kvbm.vllm_integration.connector")
    assert [getattr(found, name) for name in names] == [getattr(ours, name) for name in names]


@pytest.mark.parametrize("name", ["BlockManager", "KvbmLeader", "KvbmWorker"])
def test_what_earlier_releases_had_is_refused_with_where_to_go(name):
    with pytest.raises(ImportError, match=rf"kvbm\.{name} .* kvbm\.vllm_integration\.connector"):
        getattr(kvbm, name)
    assert not hasattr(kvbm, "Anything")
