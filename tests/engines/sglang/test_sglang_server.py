"""A serving SGLang on the CPU: its server, scheduler, radix tree, model and cache controller, with KVBM behind them.

benchmarks/gpu/sglang_cpu.py says what stands in for the GPU: the copies between SGLang's device and host pools.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

pytestmark = [pytest.mark.sglang, pytest.mark.engine]

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu" / "sglang_prompts.py"
LENGTH, COUNT, PAGE = 4096, 3, 64
WHOLE = LENGTH - PAGE  # of a prompt, the page with the last token is computed


def serve(factory, *more):
    """The rows of the script, whose own checks are met."""
    folder, temporary = factory.mktemp("pages"), factory.mktemp("temporary")
    command = [sys.executable, str(SCRIPT), "--dry", "--models", str(factory.mktemp("models")), "--directory"]
    command += [str(folder), "--check", "--json", str(folder / "rows.json"), *more]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, "TMPDIR": str(temporary)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((folder / "rows.json").read_text())["rows"]
    return lambda kind, what: [row for row in rows if row.get("kind") == kind and row["what"] == what]


@pytest.fixture(scope="module")
def of(tmp_path_factory):
    return serve(tmp_path_factory, "--kinds", "hicache", "kvbm", "slow", "--at-once", "2")


def test_prompts_come_back_from_the_storage_with_the_tokens_of_before(of):
    found = of("kvbm", "returned")
    assert [row["from_storage"] for row in found] == [WHOLE] * 2 * COUNT
    assert all(row["same"] for row in found)


def test_answers_are_those_of_sglang_without_a_storage(of):
    answers = {row["prompt"]: row["tokens"] for row in of("hicache", "on_gpu")}
    assert len({tuple(tokens) for tokens in answers.values()}) == COUNT
    for kind, what in (("kvbm", "on_gpu"), ("kvbm", "returned"), ("kvbm", "restarted"), ("slow", "returned")):
        assert all(row["tokens"] == answers[row["prompt"]] for row in of(kind, what))


def test_a_server_that_was_killed_has_left_its_pages_to_the_next(of):
    assert [row["from_storage"] for row in of("kvbm", "restarted")] == [WHOLE] * (COUNT - 1)


def test_a_page_with_a_flipped_bit_is_computed_again(of):
    (flipped,) = of("kvbm", "flipped")
    assert (flipped["from_storage"], flipped["same"]) == (0, True)


def test_what_a_slow_disk_has_is_computed(of):
    assert [row["from_storage"] for row in of("slow", "returned")] == [0] * 2 * COUNT
    assert all(row["same"] for row in of("slow", "returned"))
    (metrics,) = of("slow", "metrics")
    assert metrics["kvbm_refused_load_blocks_total"] >= 2 * COUNT * WHOLE / PAGE


def test_how_fast_sglang_computes_is_measured(of):
    for kind in ("kvbm", "slow"):
        (metrics,) = of(kind, "metrics")
        assert 0 < metrics["kvbm_prefill_tokens_per_second"] != 10_000  # which is the default


def test_two_ranks_bring_their_parts_back_and_find_them_after_a_kill(tmp_path_factory):
    """Tensor parallel: each rank has half of the heads, and a cache of its own."""
    of = serve(tmp_path_factory, "--kinds", "kvbm", "--ranks", "2")
    for what, count in (("returned", 2 * COUNT), ("restarted", COUNT - 1)):
        found = of("kvbm", what)
        assert [(row["from_storage"], row["same"]) for row in found] == [(WHOLE, True)] * count
    (flipped,) = of("kvbm", "flipped")
    assert (flipped["from_storage"], flipped["same"]) == (0, True)
