"""`kvbm bench` on the CPU: vLLM alone and with KVBM beside each other, and figures that agree with the servers' own."""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest

from conftest import PROJECT
from kvbm.bench.results import Result, from_json
from kvbm.cli.main import main
from servers import start_server

RESULTS = PROJECT / "observe-results"
# Four conversations of 500 tokens and more; the engine's own cache holds 40 blocks of 32.
SHAPE = ["--num-users", "4", "--num-rounds", "6", "--shared-system-prompt", "10", "--user-history-prompt", "480"]
SHAPE += ["--answer-len", "6", "--time", "30", "--warm-up", "2", "--extra", '{"ignore_eos": true}']
RATES = (0.3, 0.5)


@pytest.fixture(scope="module")
def servers(start):
    """A real model of 135 million parameters, which takes seconds to compute a prompt on a CPU."""
    command = [sys.executable, str(PROJECT / "scripts" / "models.py"), "smollm2"]
    model = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900).stdout.strip()
    options = ["--num-gpu-blocks-override", "40", "--enable-prompt-tokens-details"]
    kvbm = {"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "400"}
    return {
        "vllm": start_server(start, model, {}, connector=None, options=options),
        "kvbm": start_server(start, model, kvbm, options=options),
    }


@pytest.fixture(scope="module")
def result(servers) -> Result:
    targets = [f"--target={name}={server.url}" for name, server in servers.items()]
    command = ["bench", *targets, "--qps", *map(str, RATES), *SHAPE, "--out", str(RESULTS / "bench"), "--csv"]
    for _ in range(3):
        assert main(command) == 0
        result = from_json((RESULTS / "bench" / "bench.json").read_bytes())
        # Another program may stop a server for seconds: its users then fall behind, and ask less than tests count on.
        if not any(run.summary.late for run in result.runs):
            break
    return result


def test_every_request_is_answered_and_timed(result):
    assert [(run.target, run.qps) for run in result.runs] == [(name, qps) for qps in RATES for name in ("vllm", "kvbm")]
    for run in result.runs:
        assert run.summary.answered == run.summary.sent >= 8
        assert run.summary.without_text == run.summary.failed == run.summary.unfinished == 0
        assert all(0 < sample.ttft < sample.finished - sample.started for sample in run.samples)
        assert all(sample.output_tokens == 6 for sample in run.samples)


def test_the_figures_agree_with_the_servers_own(result):
    for run in result.runs:
        assert run.server["prompt_tokens"] == sum(sample.prompt_tokens for sample in run.samples)
        assert run.server["generation_tokens"] == sum(sample.output_tokens for sample in run.samples)
        hits = run.server["engine_cache_hit_tokens"] + run.server.get("external_cache_hit_tokens", 0)
        assert sum(sample.cached_tokens for sample in run.samples) == hits
        if run.target == "kvbm":
            assert run.server["external_cache_hit_tokens"] == run.server["kvbm_matched_tokens"]
            assert run.server["kvbm_onboard_blocks_h2d"] * 32 == run.server["kvbm_matched_tokens"] > 0


def test_kvbm_brings_back_what_vllm_has_dropped(result):
    for qps in RATES:
        alone, kvbm = (next(r for r in result.runs if (r.target, r.qps) == (name, qps)) for name in ("vllm", "kvbm"))
        assert kvbm.summary.cached_percent > (alone.summary.cached_percent or 0) + 20
        # The same questions of the same users, those that only KVBM had something for. A slower server is asked fewer.
        computed = {(s.user, s.round): s.ttft for s in alone.samples if s.cached_tokens < 400}
        loaded = {(s.user, s.round): s.ttft for s in kvbm.samples if s.cached_tokens > 400}
        ratios = [loaded[question] / computed[question] for question in loaded.keys() & computed.keys()]
        assert len(ratios) >= 3
        assert statistics.median(ratios) < 0.6


def test_a_page_is_made(result):
    page = (RESULTS / "bench" / "bench.html").read_text()
    assert page.count("<svg") == 5
    assert "of kvbm comes sooner than that of vllm" in page


def test_a_mooncake_trace_is_replayed(servers, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [
        f'{{"timestamp": {400 * i}, "input_length": {3000 + 10 * i}, "output_length": 60, "hash_ids": [0, {i % 3 + 1}, '
        f"{i % 3 + 10}, {i % 3 + 20}, {i % 3 + 30}, {100 + i}]}}"
        for i in range(12)
    ]
    trace.write_text("\n".join(rows))
    options = ["--trace", str(trace), "--scale", "0.2", "--extra", '{"ignore_eos": true}', "--out", str(tmp_path)]
    assert main(["bench", f"--target=kvbm={servers['kvbm'].url}", *options]) == 0
    (run,) = from_json((tmp_path / "bench.json").read_bytes()).runs
    assert run.summary.answered == 12
    assert [sample.prompt_tokens for sample in run.samples] == [600 + 2 * i for i in range(12)]
    assert {sample.output_tokens for sample in run.samples} == {12}
    assert run.samples[-1].started >= 4.4  # 11 times 400 ms
    # What comes back shares 510 of 600 tokens: 15 blocks of 32.
    assert all(sample.cached_tokens >= 480 for sample in run.samples[3:])


def test_the_client_of_lmbenchmark_is_answered(servers):
    """The calls that its script makes, with the library that it makes them with."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(api_key="EMPTY", base_url=f"{servers['kvbm'].url}/v1", timeout=120)
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi " * 100}],
        stream=True,
        max_tokens=6,
        temperature=0.0,
        stream_options={"include_usage": True},
        extra_headers={"x-user-id": "7"},
    )
    chunks = list(stream)
    assert any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].usage.prompt_tokens > 100
    assert chunks[-1].usage.completion_tokens > 0


def test_the_command_can_be_called_as_users_do(servers, tmp_path):
    command = [sys.executable, "-m", "kvbm.cli.main", "bench", "--base-url", f"{servers['kvbm'].url}/v1", "--qps", "1"]
    done = subprocess.run(
        [*command, *SHAPE, "--time", "4", "--out", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "mean TTFT" in done.stdout
    assert "mean time to first token" in done.stderr
