"""Measure the time to first token with KVBM and without, and write a page with plots.

The workload is LMBenchmark's synthetic multi-round QA, which guides to KVBM use, with its parameters; the defaults are
those of its long_input_short_output_run.sh. With --trace, the command sends the requests of a file in Mooncake's format
at their own times instead. It works with any OpenAI endpoint.

examples:
  kvbm bench --base-url http://localhost:8000 --qps 0.5 1 1.5
  kvbm bench --target vllm=localhost:8000 --target kvbm=localhost:8001 --qps 0.25 0.5 1
                          two servers side by side; the others are compared with the first
  kvbm bench --target vllm=localhost:8000 --qps 1 --out without
  kvbm bench --target kvbm=localhost:8000 --qps 1 --out with
  kvbm bench --report without/bench.json with/bench.json
                          one after the other, if only one server fits on the GPU
  kvbm bench --base-url http://localhost:8000 --trace conversation.jsonl --speed 2
"""

import argparse
import json
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.cli.arguments import integer, number

if TYPE_CHECKING:
    from kvbm.bench.client import Endpoint

NAME = "bench"
HELP = "measure the time to first token with KVBM and without; writes a page with plots"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", metavar="URL", help="the endpoint, with or without /v1")
    parser.add_argument(
        "--target", action="append", default=[], metavar="NAME=URL", help="an endpoint with a name; may be repeated"
    )
    parser.add_argument("--model", help="name of the model (the endpoint's first)")
    parser.add_argument("--api-key", default="", help="if the endpoint requires one")
    parser.add_argument(
        "--out", type=Path, default=Path("bench-results"), metavar="DIR", help="for the results (bench-results)"
    )
    parser.add_argument("--csv", action="store_true", help="also write LMBenchmark's files, one for each rate")
    parser.add_argument("--report", nargs="+", type=Path, metavar="FILE", help="only write the page of these results")
    parser.add_argument(
        "--extra", default="{}", metavar="JSON", help="fields of every request, for example '{\"ignore_eos\": true}'"
    )
    parser.add_argument(
        "--warm-up", type=integer, default=10, metavar="N", help="short requests before the first run (10)"
    )
    parser.add_argument(
        "--patience", type=number, default=120, metavar="S", help="seconds to wait for the last answers (120)"
    )
    rounds = parser.add_argument_group("multi-round QA")
    rounds.add_argument(
        "--qps", nargs="+", type=number, default=[0.1], help="requests a second, one run for each (0.1)"
    )
    rounds.add_argument("--num-users", type=integer, default=15, metavar="N", help="simultaneous users (15)")
    rounds.add_argument("--num-rounds", type=integer, default=20, metavar="N", help="questions of a user (20)")
    rounds.add_argument(
        "--shared-system-prompt", type=integer, default=1000, metavar="N", help="words that all share (1000)"
    )
    rounds.add_argument(
        "--user-history-prompt", type=integer, default=20000, metavar="N", help="words of a user (20000)"
    )
    rounds.add_argument(
        "--answer-len", type=integer, default=100, metavar="N", help="maximum tokens of an answer (100)"
    )
    rounds.add_argument("--time", type=number, default=100, metavar="S", help="seconds of a run (100)")
    rounds.add_argument("--init-user-id", type=integer, metavar="N", help="number of the first user (one that is new)")
    trace = parser.add_argument_group("trace")
    trace.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines in Mooncake's format, or a KVBM record")
    trace.add_argument("--max-requests", type=integer, metavar="N", help="only the first N")
    trace.add_argument("--speed", type=number, default=1.0, metavar="X", help="replay X times as fast (1)")
    trace.add_argument("--scale", type=number, default=1.0, metavar="X", help="multiply lengths by X (1)")
    trace.add_argument("--block-tokens", type=integer, default=512, metavar="N", help="tokens of a hash id (512)")
    trace.add_argument(
        "--vocabulary", type=integer, default=10_000, metavar="N", help="upper bound of token ids (10000)"
    )


def run(args: argparse.Namespace) -> int:
    from kvbm.bench.client import EndpointError
    from kvbm.bench.workload import TraceError

    try:
        return _report(args) if args.report else _bench(args)
    except (EndpointError, TraceError, OSError, ValueError) as error:
        print(f"kvbm bench: {error}", file=sys.stderr)
        return 2


def _report(args: argparse.Namespace) -> int:
    import msgspec

    from kvbm.bench import report
    from kvbm.bench.results import from_json

    results = []
    for path in args.report:
        try:
            results.append(from_json(path.read_bytes()))
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is not a result of kvbm bench: {error}") from error
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / "bench.html"
    target.write_text(report.page(results))
    print(report.text([run for result in results for run in result.runs]))
    print(f"\n{target}")
    return 0


def _bench(args: argparse.Namespace) -> int:
    import kvbm
    from kvbm.bench import report
    from kvbm.bench.results import Result, Run, csv, to_json
    from kvbm.bench.runner import Interrupted, Target, describe_errors, run, warm
    from kvbm.bench.workload import MultiRound, Replay, Shape, Workload, read_trace

    for name, least in (("warm_up", 0), ("patience", 0), ("max_requests", 1), ("block_tokens", 1)):
        value = getattr(args, name)
        if value is not None and not value >= least:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected a number of at least {least}")
    shape = Shape(
        args.num_users, args.num_rounds, args.shared_system_prompt, args.user_history_prompt, args.answer_len, args.time
    )
    lines = read_trace(args.trace, args.max_requests) if args.trace else []
    rates = [0.0] if args.trace else args.qps

    def workload_at(qps: float, first: int) -> Workload:
        if args.trace:
            return Replay(lines, args.speed, args.scale, args.vocabulary, args.block_tokens)
        return MultiRound(shape, qps, first)

    longest = max(workload_at(qps, 0).longest for qps in rates)  # rejects invalid parameters before the first request
    targets = [Target(name, endpoint) for name, endpoint in _endpoints(args, longest).items()]
    # New users, so that blocks of an earlier run give no hits.
    first = args.init_user_id if args.init_user_id is not None else int(datetime.now().timestamp()) % 10**8 * 100
    runs: list[Run] = []
    interrupted = False
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.trace:
        for target in targets:
            warm(target, args.warm_up)
    try:
        for qps in rates:
            for target in targets:
                runs.append(run(target, workload_at(qps, first), qps, args.patience))
            # The same users for every target, others for every rate.
            first += 2 * args.num_users + int(args.time * qps)
    except Interrupted as stop:
        interrupted = True
        runs.append(stop.run)
        print("stopped; these are the results so far", file=sys.stderr)
    described = (
        {"trace": args.trace.name, "requests": len(lines), "speed": args.speed, "scale": args.scale}
        if args.trace
        else {**shape._asdict(), "qps": args.qps}
    )
    result = Result(
        taken=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=_without_key(["kvbm", *sys.argv[1:]]),
        model=targets[0].endpoint.model,
        workload=described,
        machine={"client": platform.machine(), "kvbm": kvbm.__version__},
        runs=runs,
    )
    (args.out / "bench.json").write_bytes(to_json(result))
    (args.out / "bench.html").write_text(report.page([result]))
    if args.csv:
        for one in runs:
            (args.out / f"{one.target}_output_{one.qps:g}.csv").write_text(csv(one))
    print(f"\n{report.text(runs)}\n\n{args.out / 'bench.html'}")
    for one in runs:
        if one.summary.errors:
            print(f"{one.target} at {one.qps:g}/s: {describe_errors(one.summary.errors)}", file=sys.stderr)
    failed = any(one.summary.failed or not one.summary.answered for one in runs)
    return 1 if interrupted or failed else 0


def _without_key(command: list[str]) -> list[str]:
    """Results are published, so they must not contain the API key."""
    shown: list[str] = []
    for word in command:
        name, sign, _ = word.partition("=")
        if shown and _is_key(shown[-1]):
            word = "(hidden)"
        elif sign and _is_key(name):
            word = f"{name}=(hidden)"
        shown.append(word)
    return shown


def _is_key(option: str) -> bool:
    return len(option) > 3 and "--api-key".startswith(option)  # argparse accepts abbreviations


def _endpoints(args: argparse.Namespace, longest: int) -> "dict[str, Endpoint]":
    """Raises ValueError if the longest request does not fit the context of a model: it would fail."""
    from kvbm.bench.client import Endpoint, EndpointError

    try:
        extra = json.loads(args.extra)
    except ValueError as error:
        raise ValueError(f"--extra {args.extra!r}: not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ValueError(f'--extra {args.extra!r}: expected a JSON object, for example {{"ignore_eos": true}}')  # noqa: TRY004
    named = {}
    for text in args.target:
        name, separator, url = text.partition("=")
        if not separator or not name or not url:
            raise ValueError(f"--target {text!r}: expected NAME=URL, for example kvbm=http://localhost:8000")
        if "/" in name:
            raise ValueError(f"--target {text!r}: the name becomes a file name and must not contain a slash")
        if name in named:
            raise ValueError(f"--target {text!r}: the name is used twice")
        named[name] = url
    if args.base_url:
        named = {"endpoint": args.base_url, **named}
    if not named:
        raise ValueError("no endpoint: give --base-url URL, or --target NAME=URL once or more")
    endpoints = {}
    for name, url in named.items():
        endpoint = Endpoint(url, args.model or "", args.api_key, extra)
        try:
            models = endpoint.models()
        except EndpointError:
            if not args.model:
                raise
            models = {}  # a server without this list can still be measured
        if not endpoint.model:
            if not models:
                raise EndpointError(f"{endpoint.url} has no model; name one with --model")
            endpoint.model = next(iter(models))
        context = models.get(endpoint.model)
        if context is not None and longest > context:
            shorter = "--scale" if args.trace else "--user-history-prompt, --shared-system-prompt or --answer-len"
            raise ValueError(
                f"the longest request has about {longest:,} tokens, and {endpoint.model} at {endpoint.url} has a "
                f"context of {context:,}: choose a smaller {shorter}, or serve the model with a larger --max-model-len"
            )
        endpoints[name] = endpoint
    return endpoints
