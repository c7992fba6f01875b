"""`kvbm bench` against an endpoint that does as it is told: times, failures, results and the page."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from kvbm.bench import runner
from kvbm.bench.client import Endpoint, EndpointError, Prompt
from kvbm.bench.results import Run, Sample, csv, from_json, percentile, summarise
from kvbm.bench.runner import server_counters
from kvbm.cli.main import main
from kvbm.observe import terminal
from kvbm.observe.charts import Axis

HELLO = Prompt(messages=[{"role": "user", "content": "hello"}])


class Handler(http.server.BaseHTTPRequestHandler):
    """Streams an answer in pieces; ``server.mode`` says what goes wrong."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/v1/models":
            self._whole(json.dumps({"data": [{"id": "the-model", "max_model_len": self.server.context}]}))
        elif self.path == "/metrics":
            served = self.server.served
            hits = f"vllm:prefix_cache_hits_total {served}\nvllm:external_prefix_cache_hits_total {5 * served}\n"
            self._whole(
                f'vllm:prompt_tokens_total{{engine="0"}} {10.0 * served}\nother 5\nkvbm_matched_tokens {served}\n'
                + (hits if self.server.counts_hits else "")
            )
        else:
            self.send_error(404)

    def _whole(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.served += 1
        mode = self.server.mode
        if mode == "refuse":
            self.send_error(429, "too busy")
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        chat = self.path.endswith("chat/completions")
        self._event({"choices": [{"delta": {"role": "assistant", "content": ""}} if chat else {"text": ""}]})
        time.sleep(self.server.delay)
        if mode == "error":
            self._event({"error": {"message": "the engine died"}})
            return
        for word in () if mode == "silent" else ("one ", "two"):
            self._event({"choices": [{"delta": {"content": word}} if chat else {"text": word}]})
            time.sleep(self.server.delay / 4)
        details = {"cached_tokens": 6}
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": details}
        self._event({"choices": [], "usage": usage})
        if mode == "cut":
            self.close_connection = True
            return
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event):
        self._chunk(f"data: {json.dumps(event)}\n\n".encode())

    def _chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.mode, server.delay, server.served, server.bodies, server.context = "well", 0.02, 0, [], None
    server.counts_hits = True
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(server, prompt=HELLO, **options):
    return Endpoint(server.url, "m", **options).ask(prompt, 5, user=3, number=2, epoch=time.monotonic())


# -- one request ------------------------------------------------------------------------------------------------------


def test_the_first_token_is_the_first_text_that_is_not_empty(server, monkeypatch):
    clock = iter((10.0, 10.5, 10.75, 11.0))  # at the start, at both words, and at the end
    monkeypatch.setattr("kvbm.bench.client.time", SimpleNamespace(monotonic=lambda: next(clock)))
    answer = Endpoint(server.url, "m").ask(HELLO, 5, user=3, number=2, epoch=9.0)
    assert answer.error == ""
    assert (answer.started, answer.ttft, answer.gaps, answer.finished) == (1.0, 0.5, [0.25], 2.0)
    assert answer.generation_seconds == 0.5
    assert (answer.text, answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == ("one two", 10, 6, 2)
    assert (answer.user, answer.round) == (3, 2)


def test_tokens_go_to_the_completions_api(server):
    answer = ask(server, Prompt(tokens=[1, 2, 3]))
    assert (answer.text, answer.error) == ("one two", "")
    assert server.bodies[0]["prompt"] == [1, 2, 3]


def test_what_is_asked_for_is_what_lmbenchmark_asks_for(server):
    ask(server, extra={"ignore_eos": True})
    body = server.bodies[0]
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (5, 0, True)


def test_an_answer_without_text_has_no_time_rather_than_zero(server):
    server.mode = "silent"
    answer = ask(server)
    assert answer.error == ""
    assert answer.ttft is None
    assert answer.generation_seconds is None


@pytest.mark.parametrize(
    ("mode", "reason"), [("refuse", "429"), ("error", "the engine died"), ("cut", "ended early|Incomplete")]
)
def test_what_goes_wrong_is_in_the_answer(server, mode, reason):
    server.mode = mode
    assert re.search(reason, ask(server).error)


def test_nobody_there_is_an_error_too():
    endpoint = Endpoint("http://127.0.0.1:1", "m")
    assert "refused" in endpoint.ask(HELLO, 5, 0, 0, time.monotonic()).error
    with pytest.raises(EndpointError, match=r"127\.0\.0\.1:1"):
        endpoint.models()


@pytest.mark.parametrize("url", ["localhost:8000", "http://localhost:8000/v1", "http://localhost:8000/v1/"])
def test_urls_are_taken_as_people_write_them(url):
    endpoint = Endpoint(url, "m")
    assert (endpoint.url, endpoint._base) == ("http://localhost:8000", "")


@pytest.mark.parametrize("url", ["ftp://x", "http://"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(EndpointError, match="not a URL"):
        Endpoint(url, "m")


def test_the_servers_own_counters_are_read(server):
    server.counts_hits = False
    ask(server)
    assert server_counters(Endpoint(server.url, "m")) == {"prompt_tokens": 10.0, "kvbm_matched_tokens": 1.0}


# -- results ----------------------------------------------------------------------------------------------------------


def sample(ttft=0.5, started=0.0, length=2.0, **changes):
    fields = {"prompt_tokens": 100, "cached_tokens": 40, "output_tokens": 11, "user": 1, "round": 1, **changes}
    return Sample(ttft=ttft, started=started, finished=started + length, **fields)


def test_a_summary_counts_what_there_is():
    samples = [sample(ttft) for ttft in (0.1, 0.2, 0.3, 0.4)]
    samples += [sample(None), sample(None, error="429", length=0.1)]
    summary = summarise(samples, unfinished=2, late=3)
    assert (summary.sent, summary.answered, summary.failed) == (8, 5, 1)
    assert (summary.without_text, summary.unfinished, summary.late) == (1, 2, 3)
    assert summary.ttft_mean == pytest.approx(0.25)
    assert (summary.ttft_p50, summary.ttft_p99, summary.ttft_max) == (0.2, 0.4, 0.4)
    assert summary.seconds == 2.0
    assert (summary.requests_per_second, summary.input_tokens_per_second) == (2.5, 250.0)
    assert summary.cached_percent == 40.0
    assert summary.tokens_per_second_of_a_request == pytest.approx(sum(10 / (2 - t) for t in (0.1, 0.2, 0.3, 0.4)) / 4)


def test_nothing_has_a_summary_too():
    summary = summarise([])
    assert (summary.sent, summary.ttft_mean, summary.requests_per_second) == (0, None, 0.0)


def test_percentiles_are_values_that_were_measured():
    assert [percentile([3, 1, 2], p) for p in (1, 50, 100)] == [1, 2, 3]


def test_files_for_lmbenchmarks_plots(server):
    run = Run(target="t", url="u", qps=1, summary=summarise([]), samples=[sample(), sample(None), sample(error="x")])
    header, *lines = csv(run).splitlines()
    names = "prompt_tokens,generation_tokens,ttft,generation_time,user_id,question_id,launch_time,finish_time"
    assert header == names
    assert lines == ["100,11,0.5,1.5,1,1,0.0,2.0"]


# -- the command ------------------------------------------------------------------------------------------------------

SMALL = ["--num-users", "2", "--num-rounds", "3", "--shared-system-prompt", "5", "--user-history-prompt", "5"]
SMALL += ["--answer-len", "2", "--time", "0.5", "--warm-up", "1"]


def test_two_targets_beside_each_other(server, tmp_path, capsys):
    server.delay = 0.02
    targets = ["--target", f"alone={server.url}", "--target", f"kvbm={server.url}"]
    assert main(["bench", *targets, "--qps", "12", "24", *SMALL, "--out", str(tmp_path), "--csv"]) == 0
    result = from_json((tmp_path / "bench.json").read_bytes())
    assert result.model == "the-model"
    assert [(run.target, run.qps) for run in result.runs] == [("alone", 12), ("kvbm", 12), ("alone", 24), ("kvbm", 24)]
    for run in result.runs:
        assert run.summary.answered == run.summary.sent > 3
        assert run.server["prompt_tokens"] == sum(s.prompt_tokens for s in run.samples)  # both saw the same
    # The same users for both targets, others for another rate.
    users = [{s.user for s in run.samples} for run in result.runs]
    assert users[0] & users[1]
    assert users[0].isdisjoint(users[2])
    out = capsys.readouterr().out
    assert "mean TTFT" in out
    assert "99 % gap" in out
    assert 0.004 < result.runs[0].summary.gap_p50 < 1
    assert str(tmp_path / "bench.html") in out
    assert len(list(tmp_path.glob("*.csv"))) == 4


@pytest.mark.parametrize(
    ("counts", "percent", "line", "short"),
    [
        (True, 60, "(50%) were loaded by the KV connector and", "hits: 50% loaded, 10% in the engine's cache"),
        (False, 60, "prompt tokens from a cache", "hits: 60%"),
    ],
)
def test_the_terminal_shows_hits(server, tmp_path, capsys, monkeypatch, counts, percent, line, short):
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.1)
    monkeypatch.setattr(runner, "COUNTERS_EVERY", 0.1)
    server.delay, server.counts_hits = 0.02, counts
    assert main(["bench", "--base-url", server.url, "--qps", "12", *SMALL, "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    *during, end = err.strip().splitlines()
    assert "sent, " in during[-1]
    assert during[-1].endswith(short)
    assert end.endswith(short)
    header, row, _, hits, *_ = out.strip().splitlines()
    assert header.split()[-2:] == ["hit", "%"]
    assert row.split()[-1] == str(percent)
    assert hits.startswith("hits of endpoint at 12: ")
    assert line in hits


def test_the_page_stands_alone(server, tmp_path):
    server.delay = 0.02
    targets = ["--target", f"a<b={server.url}", "--target", f"kvbm={server.url}"]
    assert main(["bench", *targets, "--qps", "12", "24", *SMALL, "--out", str(tmp_path)]) == 0
    page = (tmp_path / "bench.html").read_text()
    assert page.count("<svg") == 5
    assert "<script" not in page
    assert not re.search(r"(src|href)=", page)
    assert "a&lt;b" in page
    assert "a<b" not in page
    assert "NaN" not in page
    assert "comes sooner than that of" in page
    assert "prefers-color-scheme: dark" in page


def test_results_of_two_runs_make_one_page(server, tmp_path, capsys):
    server.delay = 0.02
    for name in ("without", "with"):
        assert (
            main(["bench", "--target", f"{name}={server.url}", "--qps", "12", *SMALL, "--out", str(tmp_path / name)])
            == 0
        )
    files = [str(tmp_path / name / "bench.json") for name in ("without", "with")]
    assert main(["bench", "--report", *files, "--out", str(tmp_path / "both")]) == 0
    page = (tmp_path / "both" / "bench.html").read_text()
    assert "with comes sooner than that of without" in page


def test_a_trace_is_replayed(server, tmp_path):
    server.delay = 0.0
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": t, "input_length": 600, "output_length": 9, "hash_ids": [1, t]} for t in (0, 100, 400)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert main(["bench", "--base-url", server.url, "--trace", str(trace), "--out", str(tmp_path / "out")]) == 0
    (run,) = from_json((tmp_path / "out" / "bench.json").read_bytes()).runs
    starts = [s.started for s in run.samples]
    assert starts == pytest.approx([0, 0.1, 0.4], abs=0.06)
    assert [len(body["prompt"]) for body in server.bodies] == [600] * 3
    assert "trace" in (tmp_path / "out" / "bench.html").read_text()


def test_a_history_longer_than_the_context_is_refused_before_the_first_request(server, tmp_path, capsys):
    server.context = 20_000
    assert main(["bench", "--base-url", server.url, "--qps", "1", "--out", str(tmp_path)]) == 2
    problem = capsys.readouterr().err
    assert "the longest request has about 21," in problem
    assert "context of 20,000: choose a smaller --user-history-prompt" in problem
    assert server.served == 0
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 30_000, "output_length": 9, "hash_ids": [1]}))
    assert main(["bench", "--base-url", server.url, "--trace", str(trace), "--out", str(tmp_path)]) == 2
    assert "choose a smaller --scale" in capsys.readouterr().err
    server.context, server.delay = 100, 0.0
    assert main(["bench", "--base-url", server.url, "--qps", "12", *SMALL, "--out", str(tmp_path)]) == 0


def test_failures_are_counted_and_told_by_the_exit_code(server, tmp_path, capsys):
    server.delay = 0.0
    options = ["--qps", "12", *SMALL[:-2], "--warm-up", "0", "--out", str(tmp_path)]
    server.mode = "error"
    assert main(["bench", "--base-url", server.url, *options]) == 1
    (run,) = from_json((tmp_path / "bench.json").read_bytes()).runs
    assert run.summary.failed == run.summary.sent > 0
    assert run.summary.ttft_mean is None
    assert list(run.summary.errors.values()) == [run.summary.failed]
    assert f"{run.summary.failed} failed: " in (said := capsys.readouterr().err)
    assert "the engine died" in said
    page = (tmp_path / "bench.html").read_text()
    assert "Why requests failed" in page
    assert "the engine died" in page


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "no endpoint"),
        (["--target", "kvbm"], "NAME=URL"),
        (["--target", "a=x", "--target", "a=y"], "the name is used twice"),
        (["--base-url", "http://127.0.0.1:1"], "cannot be reached"),
        (["--base-url", "http://127.0.0.1:1", "--extra", "{"], "not JSON"),
        (["--base-url", "http://127.0.0.1:1", "--extra", "1"], "JSON object"),
        (["--base-url", "http://127.0.0.1:1", "--model", "m", "--num-users", "0"], "--num-users 0"),
        (["--base-url", "http://127.0.0.1:1", "--model", "m", "--trace", "nothing.jsonl"], "nothing.jsonl"),
        (["--base-url", "http://127.0.0.1:1", "--model", "m", "--warm-up", "1"], "does not answer"),
        (["--base-url", "http://127.0.0.1:1", "--qps", "1", "0"], "--qps 0.0"),
        (["--base-url", "http://127.0.0.1:1", "--num-rounds", "0"], "--num-rounds 0"),
        (["--base-url", "http://127.0.0.1:1", "--time", "inf"], "--time inf: expected a number above 0 and up to"),
        (["--base-url", "http://127.0.0.1:1", "--num-users", "99999999999"], "and up to 100,000"),
        (["--base-url", "http://127.0.0.1:port"], "'http://127.0.0.1:port': Port could not"),
        (["--target", "a/b=x"], "must not contain a slash"),
        (["--base-url", "http://127.0.0.1:1", "--warm-up", "-1"], "--warm-up -1: expected a number of at least 0"),
        (["--base-url", "http://127.0.0.1:1", "--max-requests", "0"], "--max-requests 0: expected a number of"),
        (["--base-url", "http://127.0.0.1:1", "--time", "nan"], "--time nan: expected a number above 0"),
        (["--base-url", "http://127.0.0.1:1", "--model", "m", "--out", "/proc/nowhere"], "/proc/nowhere"),
        (["--report", "nothing.json"], "nothing.json cannot be read: No such file or directory"),
        (["--report", "bench.txt"], "bench.txt is not a result"),
        (["--qps", "fast"], "argument --qps: 'fast': expected a number"),
        (["--num-users", "1.5"], "argument --num-users: '1.5': expected a whole number"),
    ],
)
def test_what_cannot_be_done_is_said(arguments, reason, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench.txt").write_text("TTFT 1.2\n")
    try:
        code = main(["bench", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("key", [["--api-key", "sesame"], ["--api-key=sesame"], ["--api", "sesame"]])
def test_the_key_of_an_endpoint_is_in_no_result(server, tmp_path, monkeypatch, key):
    arguments = ["bench", "--base-url", server.url, "--time", "0.1", "--warm-up", "1", "--out", str(tmp_path), *key]
    monkeypatch.setattr("sys.argv", ["kvbm", *arguments])
    main(arguments)
    assert "(hidden)" in " ".join(from_json((tmp_path / "bench.json").read_bytes()).command)
    assert [path.name for path in tmp_path.iterdir() if "sesame" in path.read_text()] == []


def test_a_result_of_another_format_is_refused(tmp_path):
    with pytest.raises(msgspec.DecodeError):
        from_json(b'{"format": 1}')


# -- plots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.013), (0, 87), (0.5, 9000)])
def test_axes_have_a_handful_of_round_marks(low, high):
    marks = Axis(low, high, 0, 100).marks()
    assert 3 <= len(marks) <= 12
    assert all(low <= mark <= high * 1.001 for mark in marks)


@pytest.mark.parametrize(("low", "high"), [(0.01, 10), (0.2, 0.9), (3e-3, 4e-2)])
def test_logarithmic_axes_have_marks_too(low, high):
    axis = Axis(low, high, 0, 100, logarithmic=True)
    assert 1 <= len(axis.marks()) <= 14
    assert axis.at(low) == 0
    assert axis.at(high) == pytest.approx(100)
    assert 0 < axis.at((low * high) ** 0.5) < 100
