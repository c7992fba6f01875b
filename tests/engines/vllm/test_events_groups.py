"""KV events of models whose layers are in several groups: one group stands for all, or there are none."""

from __future__ import annotations

import pytest
from engines import do, generate
from states import BLOCK, GDN, model_folder, tokens
from test_events import published
from test_windows import MODEL as WINDOWED

pytestmark = pytest.mark.engine

LONG, SHORT, OTHER = tokens(1, 700), tokens(2, 100), tokens(3, 500)


@pytest.fixture(autouse=True)
def apart():
    compat = pytest.importorskip("kvbm.engines.vllm.compat")
    if not compat.fails_whole_requests():
        pytest.skip("with a connector this release makes one group of all layers")


def make_engine(shape, tmp_path):
    folder = str(model_folder(shape, tmp_path / "models"))
    return {"model": folder, "dtype": shape.dtype, "block_size": BLOCK, **published(tmp_path)}


def replay(batches):
    """What a subscriber knows of host memory: block -> tokens. Nothing is told twice, nor of unknown blocks."""
    known = {}
    for event in (event for batch in batches for event in batch):
        if event["type"] == "AllBlocksCleared":
            known.clear()
        elif event["medium"] != "CPU":
            continue
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                del known[name]
        else:
            assert event["kv_cache_spec_kind"] == "full_attention"
            parent = event["parent_block_hash"]
            for i, name in enumerate(event["block_hashes"]):
                assert name not in known
                assert parent in (None, *known)
                known[name] = event["token_ids"][i * BLOCK : (i + 1) * BLOCK]
                parent = name
    return known


def told_of(name, *prompts):
    return do("call", name, target="states:told_of", prompts=list(prompts))


def test_subscribers_know_the_blocks_of_layers_that_see_all_tokens(run_scenario, tmp_path):
    steps = [
        generate(LONG, max_tokens=1),
        generate(SHORT, max_tokens=1),
        do("drain"),
        do("events", "first events"),
        told_of("first", LONG, SHORT),
        do("reset"),  # vLLM tells subscribers that all blocks are gone
        generate(OTHER, max_tokens=1),  # pushes some of the others out
        do("drain"),
        do("events", "second events"),
        told_of("second", LONG, SHORT, OTHER),
        do("state", "second state"),
        do("reset", connector=True),
        generate(SHORT, max_tokens=1),
        do("drain"),
        do("events", "third events"),
        told_of("third", SHORT),
        do("state", "end"),
    ]
    story = run_scenario(steps, {"cpu_cache_override_num_blocks": 110}, make_engine(WINDOWED, tmp_path))
    for name in ("first", "second", "third"):
        told = {int(block): list(found) for block, found in story[name].items()}
        assert replay(story[f"{name} events"]) == told, name
    assert (len(story["first"]), len(story["third"])) == (700 // BLOCK + 100 // BLOCK, 100 // BLOCK)
    assert story["second state"]["evictions"] > 0
    assert story["end"]["faults"] == {}


def test_of_states_no_subscriber_is_told(run_scenario, tmp_path):
    """A prefix may have its KV in host memory, and its state not."""
    steps = [generate(LONG, max_tokens=1), do("drain"), do("events", "events"), do("state", "end")]
    story = run_scenario(steps, {"cpu_cache_override_num_blocks": 110}, make_engine(GDN, tmp_path))
    assert replay(story["events"]) == {}
    assert story["end"]["published"] > 0
    assert story.said("KV events do not tell what KVBM holds")
