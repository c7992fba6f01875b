"""PdConnector with models whose layers are in several groups, in a real vLLM. Its transport is idle."""

from __future__ import annotations

import pytest
from engines import SETTINGS, do, generate
from states import BLOCK, GDN, model_folder, tokens
from test_windows import MODEL as WINDOWED

pytestmark = pytest.mark.engine

LONG = tokens(1, 700)
PATCH = {"kvbm.engines.vllm.pd:TRANSPORTS": ["NullTransport"]}


@pytest.fixture(params=[WINDOWED, GDN], ids=lambda shape: shape.name)
def engine(request, tmp_path):
    compat = pytest.importorskip("kvbm.engines.vllm.compat")
    if not compat.fails_whole_requests():
        pytest.skip("with a connector this release makes one group of all layers")
    return {
        "model": str(model_folder(request.param, tmp_path)),
        "dtype": request.param.dtype,
        "block_size": BLOCK,
        "max_num_batched_tokens": 256,
    }


def with_transport(engine, **kvbm):
    ours = {
        "kv_connector": "DynamoConnector",
        "kv_connector_module_path": "kvbm.vllm_integration.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**SETTINGS, "cpu_cache_override_num_blocks": 512, **kvbm},
    }
    idle = {"kv_connector": "NullTransport", "kv_connector_module_path": "null_transport", "kv_role": "kv_both"}
    transfer = {
        "kv_connector": "PdConnector",
        "kv_connector_module_path": "kvbm.vllm_integration.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, idle]},
    }
    return {**engine, "kv_transfer_config": transfer}


@pytest.mark.parametrize("faults", ["", "load:every=5"])
def test_a_prefix_comes_back_beside_a_transport(faults, run_scenario, baseline, engine):
    steps = [
        generate(LONG, name="cold"),
        do("drain"),
        do("reset"),
        generate(LONG, name="first"),
        do("drain"),
        do("reset"),
        generate(LONG, name="second"),
        do("drain"),
        do("metrics", "metrics"),
    ]
    story = run_scenario(steps, None, with_transport(engine, inject_faults=faults), patch=PATCH)
    wanted = baseline([LONG], engine=engine)
    assert story.tokens("cold") == story.tokens("first") == story.tokens("second") == wanted
    if faults:
        assert story["metrics"]["kvbm_transfer_failed_blocks"] > 0
    else:
        assert story["first"]["cached"] == story["second"]["cached"] == [21 * BLOCK]
