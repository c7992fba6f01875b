"""Time to first token over the rate of requests: the benchmark that guides to KVBM name, with a real server.

    python benchmarks/gpu/qps.py --json results/qps.json
    python benchmarks/gpu/qps.py --mode decode-graphs --at-once 3 --users 10 --cache-tokens 165000 --gb 45 --least 20
    python benchmarks/gpu/qps.py --kinds kvbm --rates 0.25 0.5 1 2 --seconds 100

A `vllm serve` of each kind: vLLM with its own prefix cache only (base), with its own offloading (native), with KVBM
(kvbm). The workload is `kvbm bench`'s, that of LMBenchmark's long_input_short_output_run.sh: 15 users who share 1,000
tokens and have 20,000 of their own, up to 20 questions each, answers of 100 tokens. That is 320,000 tokens at any time;
the engine's own cache holds 250,000, the host tier all of them and those of users who join.

Users ask in turn, so that each finds in the engine's own cache what came after its last question, and not its own. For
that to be so from the first request on, every user's history is computed once beforehand, in the order in which they
will ask, and a rate lasts for whole rounds of all users. So short runs measure what comes back and not what is new;
users come back from one rate to the next. For the published form of the benchmark, in which every rate has users of its
own for 100 seconds, use `kvbm bench` itself.

Kinds that stand side by side (--at-once) take turns at every rate, in another order each time, so that a machine that
gets slower does so for all. Rates are taken in the order given. Once a kind has let a mean of --enough seconds pass it
is not asked any faster. A result is written as soon as it is there. With --budget, a rate that no longer fits for all
kinds of a group is left out for all of them, and said.

Every kind is asked the same questions at the same times, so kinds are compared question by question too. With ten
questions the 99th percentile is the slowest of them; --least asks for more where a rate is low.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import runpy
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import vllm_kinds
from child import Child, ChildError, Emit, run_child, wait_for_memory
from records import SOURCE, Record, Row, arguments
from ttft import packing_in

sys.path.insert(0, str(SOURCE))
from kvbm.bench.client import Answer, Endpoint, EndpointError, Prompt
from kvbm.bench.runner import Target, run
from kvbm.bench.workload import MultiRound, Shape, opening

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Of the workload's sentences; a word that is not here would be nobody's in particular.
WORDS = (
    "Here is what everybody told User has said before Question please tell me one more long story and let it end well "
    "Just to warm up user says are"
)
# Seconds that are kept for the start of servers that come later, for the end, and for a rate's last answers.
LATER_START, END, LAST_ANSWERS = 45.0, 12.0, 5.0
MAX_REQUESTS = 64  # at once. vLLM's own default is 1,024, whose warm-up takes gigabytes that servers side by side lack.
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def child(task: Row, emit: Emit) -> None:
    shape = vllm_kinds.shape_of(task["dry"])
    models = Path(task["models"])
    model = vllm_kinds.model_folder(shape, models)
    tokenizer = write_tokenizer(shape, models)
    if task["kind"] == "prepare":
        emit({"what": "model", "folder": model.name})
        return
    serve(task, shape, model, tokenizer)


def word(number: int) -> str:
    """A word of letters only for a token, so that an answer that is sent back is the same tokens again."""
    letters = []
    while number:
        number, digit = divmod(number, 26)
        letters.append(LETTERS[digit])
    return "z" + "".join(letters)


def write_tokenizer(shape: vllm_kinds.Dense, under: Path) -> Path:
    """A tokenizer for a model that has none: a word is a token, and so is a digit."""
    folder = under.expanduser() / f"{shape.name}-tokenizer"
    if (folder / "tokenizer_config.json").exists():
        return folder
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = ["<unk>", "<s>", "</s>", "hi", *"0123456789.,:#?!'", *WORDS.split()]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(known))}
    vocabulary |= {word(i): i for i in range(len(vocabulary), shape.vocab)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Whitespace()]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "unk_token": "<unk>",
        "eos_token": "</s>", "bos_token": "<s>", "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def serve(task: Row, shape: vllm_kinds.Dense, model: Path, tokenizer: Path) -> None:
    """vLLM's server in this process; it ends when the parent ends it."""
    command = ["serve", "--model", str(model), "--tokenizer", str(tokenizer), "--served-model-name", "model"]
    command += ["--host", "127.0.0.1", "--port", str(task["port"]), "--dtype", shape.dtype, "--seed", "0"]
    command += ["--max-model-len", str(task["length"]), "--max-num-batched-tokens", str(vllm_kinds.STEP_TOKENS)]
    command += ["--max-num-seqs", str(MAX_REQUESTS)]
    command += ["--num-gpu-blocks-override", str(task["cache_tokens"] // shape.block_size)]
    command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log", "--generation-config", "vllm"]
    if task["mode"] == "eager":
        command.append("--enforce-eager")
    if task["mode"] == "decode-graphs":
        command += ["--compilation-config", json.dumps(vllm_kinds.DECODE_GRAPHS)]
    if task["dry"]:
        command += ["--block-size", str(shape.block_size)]
    else:
        # Said outright: a server that looks at what is free would count what another takes meanwhile as its own. The
        # other number only says how much must be free when it looks.
        command += ["--kv-cache-memory-bytes", str(task["cache_tokens"] * shape.token_bytes)]
        command += ["--gpu-memory-utilization", "0.1"]
    transfer = vllm_kinds.connector(task["kind"], task["gigabytes"])
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    vllm_kinds.set_environment(task["dry"], task["gigabytes"])
    sys.argv = command
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as probes:
        found = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in found:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in found]


def wait_until_healthy(endpoint: Endpoint, server: Child, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not server.alive:
            server.receive(1)  # raises, with what it printed last
        with contextlib.suppress(EndpointError):
            endpoint.get("/health", timeout=2)
            return
        time.sleep(0.5)
    raise ChildError(f"the server was not ready within {seconds:.0f} s; it printed last:\n{server.tail()}")


def whole_rounds(shape: Shape, qps: float, least: int = 0) -> Shape:
    """As long as the shape says, and ``least`` requests take, or a little longer: until every user has asked equally
    often."""
    turn = shape.num_users / qps
    return shape._replace(time=math.ceil(max(shape.time, least / qps) / turn - 1e-9) * turn)


def askers(shape: Shape, qps: float) -> list[int]:
    """Users in the order of their first questions."""
    workload = MultiRound(shape, qps)
    nothing = Answer(user=0, round=0, started=0.0, finished=0.0)
    order: dict[int, None] = {}
    step = 1 / qps / 4
    for tick in range(int(shape.time / step) + 1):
        for ask in workload.due(tick * step):
            order.setdefault(ask.user)
            ask.done(nothing)
    return list(order)


def filling_order(shape: Shape, rates: list[float], least: int = 0) -> list[int]:
    """All users of all rates. Those of the first rate come last, in the order in which they will ask."""
    first = askers(whole_rounds(shape, rates[0], least), rates[0])
    every = {user for qps in rates for user in askers(whole_rounds(shape, qps, least), qps)}
    return [*sorted(every - set(first)), *first]


def fill(endpoint: Endpoint, shape: Shape, users: list[int]) -> float:
    """Compute every user's history once; seconds it took."""
    began = time.monotonic()

    def one(user: int) -> str:
        prompt = Prompt(messages=[{"role": "user", "content": opening(user, shape)}])
        return endpoint.ask(prompt, 1, user, 0, began).error

    with ThreadPoolExecutor(2) as pool:
        errors = [error for error in pool.map(one, users) if error]
    if errors:
        raise ChildError(f"{len(errors)} of {len(users)} first requests failed: {errors[0]}")
    return time.monotonic() - began


class Server(NamedTuple):
    """One of the kinds, started and perhaps not ready yet."""

    kind: str
    process: Child
    endpoint: Endpoint
    began: float


AT_ONCE: Any = {
    "type": int, "nargs": "+", "default": [1], "metavar": "N",
    "help": "servers to start at the same time (1): in the first group, in the second, in all others",
}  # fmt: skip


def grouped(kinds: list[str], sizes: list[int]) -> list[list[str]]:
    """Kinds in groups of these sizes, the last of which counts for all others."""
    groups, left = [], list(kinds)
    while left:
        size = sizes[min(len(groups), len(sizes) - 1)]
        groups.append(left[:size])
        left = left[size:]
    return groups


class Servers:
    """All kinds, in groups that are started at once; within a group one is asked after the other."""

    def __init__(self, options: Any, common: Row, record: Record, deadline: float) -> None:
        self._options = options
        self._common = common
        self._record = record
        self._deadline = deadline
        self.extra = {"ignore_eos": True}  # of every request
        self.failures = 0

    def run(self) -> None:
        groups = grouped(self._options.kinds, self._options.at_once)
        while groups:
            group = groups.pop(0)
            wait_for_memory()
            with contextlib.ExitStack() as running:
                servers = [
                    self._start(kind, port, running) for kind, port in zip(group, free_ports(len(group)), strict=True)
                ]
                for server in list(servers):
                    if not self._is_ready(server, last_chance=len(group) == 1):
                        servers.remove(server)
                        if len(group) > 1:
                            groups.append([server.kind])  # it may have been the company
                if servers:
                    self._measure_group(servers, LATER_START * len(groups), sum(map(len, groups)))
                for server in servers:
                    server.process.end()

    def _measure_group(self, servers: list[Server], kept: float, others: int) -> None:
        """All that is asked of servers that stand side by side. ``kept``: seconds for the start of later groups, which
        have so many ``others``."""
        for i, server in enumerate(servers):
            now = time.monotonic()
            end = now + (self._deadline - now - kept) / (len(servers) - i + others)
            self._guarded(server, partial(self._measure, server, end))
            server.process.end()

    def _guarded(self, server: Server, measure: Callable[[], None]) -> bool:
        """Whether it went well. A failure is a row, and the others go on."""
        try:
            measure()
        except (ChildError, EndpointError) as error:
            self.failures += 1
            self._failed(server, "failed", error)
            return False
        return True

    def _measure(self, server: Server, end: float) -> None:
        """All that is asked of one kind, over at this time."""
        raise NotImplementedError

    def _start(self, kind: str, port: int, running: contextlib.ExitStack) -> Server:
        task = {**self._common, "kind": kind, "port": port}
        process = running.enter_context(Child(__file__, task, kind))
        running.callback(process.kill)
        endpoint = Endpoint(f"http://127.0.0.1:{port}", "model", extra=self.extra)
        return Server(kind, process, endpoint, time.monotonic())

    def _is_ready(self, server: Server, last_chance: bool) -> bool:
        left = min(self._options.limit, self._deadline - time.monotonic())
        try:
            wait_until_healthy(server.endpoint, server.process, left)
        except (ChildError, EndpointError) as error:
            self._failed(server, "failed" if last_chance else "tried again alone", error)
            server.process.kill()
            self.failures += last_chance
            return False
        self._record.add({"kind": server.kind, "what": "start", "s": round(time.monotonic() - server.began, 1)})
        for row in packing_in(server.process.lines_with("packed")):
            self._record.add({"kind": server.kind, **row})
        return True

    def _failed(self, server: Server, what: str, error: Exception) -> None:
        self._record.add({"kind": server.kind, "what": what, "why": str(error)})
        print(f"{server.kind}: {what}: {error}", file=sys.stderr, flush=True)


class Sweep(Servers):
    """Every kind at every rate."""

    def __init__(self, options: Any, common: Row, shape: Shape, record: Record, deadline: float) -> None:
        super().__init__(options, common, record, deadline)
        self._shape = shape
        self._users = filling_order(shape, options.rates, options.least)

    def _measure_group(self, servers: list[Server], kept: float, others: int) -> None:
        """Fill all, and take turns at every rate that ends in time."""
        options, now = self._options, time.monotonic()
        end = now + (self._deadline - now - kept) * len(servers) / (len(servers) + others)
        enough = {server: math.inf for server in servers if self._guarded(server, partial(self._fill, server))}
        for turn, qps in enumerate(options.rates):
            shape = whole_rounds(self._shape, qps, options.least)
            least = min(LAST_ANSWERS, options.patience)
            asked = [server for server in enough if qps <= enough[server]]
            why = "no time left" if time.monotonic() + len(asked) * (shape.time + least) > end else ""
            for server in enough:
                if server not in asked:
                    self._left_out(server.kind, qps, f"slower than --enough at {enough[server]:g} requests/s already")
                elif why:
                    self._left_out(server.kind, qps, why)
            if why or not asked:
                continue
            first = turn % len(asked)
            for i, server in enumerate(asked[first:] + asked[:first]):
                spare = end - time.monotonic() - (len(asked) - i) * (shape.time + least)
                mean = self._rate(server, shape, qps, min(options.patience, least + max(0.0, spare)))
                if mean is None or mean > options.enough:
                    enough[server] = min(enough[server], qps)

    def _fill(self, server: Server) -> None:
        server.endpoint.ask(Prompt(messages=[{"role": "user", "content": "hi " * 200}]), 16, 0, 0, 0.0)
        took = fill(server.endpoint, self._shape, self._users)
        self._record.add({"kind": server.kind, "what": "fill", "s": round(took, 1), "users": len(self._users)})

    def _rate(self, server: Server, shape: Shape, qps: float, patience: float) -> float | None:
        """One rate; the mean time to first token."""
        outcome = run(Target(server.kind, server.endpoint), MultiRound(shape, qps), qps, patience)
        timed = [s for s in outcome.samples if s.ttft is not None and not s.error]
        row = {
            "kind": server.kind,
            "what": "rate",
            "qps": qps,
            **{name: getattr(outcome.summary, name) for name in outcome.summary.__struct_fields__},
            "ttfts": [round(s.ttft or 0.0, 4) for s in timed],
            "questions": [f"{s.user}.{s.round}" for s in timed],
            "cached": [s.cached_tokens for s in outcome.samples if not s.error],
            "server": outcome.server,
        }
        self._record.add(row)
        print(show(summarise(self._record.rows)[-1]), flush=True)
        return outcome.summary.ttft_mean

    def _left_out(self, kind: str, qps: float, why: str) -> None:
        self._record.add({"kind": kind, "what": "left out", "qps": qps, "why": why})
        print(f"{qps:>6g} {kind:<8} left out: {why}", flush=True)


def summarise(rows: list[Row]) -> list[Row]:
    """A line for every kind and rate; ``faster`` is against the first kind at the same rate."""
    rates = [row for row in rows if row["what"] == "rate"]
    first = rates[0]["kind"] if rates else None
    base = {row["qps"]: row["ttft_mean"] for row in rates if row["kind"] == first}
    lines = []
    for row in rates:
        against = base.get(row["qps"])
        faster = against / row["ttft_mean"] if against and row["ttft_mean"] else None
        lines.append({**row, "faster": faster})
    return lines


def pairs(rows: list[Row], ours: str, theirs: str) -> list[Row]:
    """For every rate, two kinds question by question: how many ours answers sooner, by how much on average, and the
    interval that holds 95 % of the averages of such questions drawn again."""
    answers: dict[tuple[float, str], dict[str, float]] = {}
    for row in rows:
        if row["what"] == "rate" and "questions" in row:
            answers[row["qps"], row["kind"]] = dict(zip(row["questions"], row["ttfts"], strict=True))
    found = []
    for (qps, kind), mine in answers.items():
        other = answers.get((qps, theirs), {})
        less = [other[question] - mine[question] for question in mine if question in other]
        if kind == ours != theirs and less:
            source = random.Random(0)
            means = sorted(statistics.fmean(source.choices(less, k=len(less))) for _ in range(2000))
            line = {"qps": qps, "kind": ours, "other": theirs, "of": len(less), "sooner": sum(s > 0 for s in less)}
            found.append({**line, "mean": statistics.fmean(less), "low": means[50], "high": means[-51]})
    return sorted(found, key=lambda line: line["qps"])


def show_pair(line: Row) -> str:
    return (
        f"{line['qps']:>6g} {line['kind']:<8} sooner than {line['other']} in {line['sooner']} of {line['of']} answers, "
        f"by {line['mean'] * 1e3:.0f} ms ({line['low'] * 1e3:.0f} to {line['high'] * 1e3:.0f})"
    )


# Gaps are between two tokens of a request, in seconds as the others.
COLUMNS = {
    "mean": ("ttft_mean", 3),
    "median": ("ttft_p50", 3),
    "99 %": ("ttft_p99", 3),
    "answered/s": ("requests_per_second", 2),
    "gap": ("gap_mean", 4),
    "99 % gap": ("gap_p99", 4),
    "cached %": ("cached_percent", 0),
    "late": ("late", 0),
    "failed": ("failed", 0),
    "unfinished": ("unfinished", 0),
    "× faster": ("faster", 1),
}
HEADER = f"{'rate':>6} {'engine':<8}" + "".join(f"{name:>12}" for name in COLUMNS)


def show(line: Row) -> str:
    return f"{line['qps']:>6g} {line['kind']:<8}" + "".join(f"{cell:>12}" for cell in cells(line, COLUMNS))


def cells(line: Row, columns: Mapping[str, tuple[str, int]], missing: str = "-") -> list[str]:
    """What a table says in these columns; results of before a column was added do not have it."""
    values = ((line.get(key), digits) for key, digits in columns.values())
    return [missing if value is None else f"{value:.{digits}f}" for value, digits in values]


def main() -> int:
    if run_child(child):
        return 0
    parser = arguments(__doc__)
    vllm_kinds.add_arguments(parser)
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[1, 1.5, 2, 3, 0.5, 4], metavar="QPS", help="(0.5 to 4)"
    )
    parser.add_argument("--seconds", type=float, default=15, metavar="S", help="of a rate, at least (15)")
    parser.add_argument("--users", type=int, default=15, metavar="N", help="at a time (15)")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="questions of a user (20)")
    parser.add_argument("--history", type=int, default=20000, metavar="N", help="tokens of a user's own (20000)")
    parser.add_argument("--shared", type=int, default=1000, metavar="N", help="tokens that all share (1000)")
    parser.add_argument("--answer", type=int, default=100, metavar="N", help="tokens of an answer (100)")
    parser.add_argument("--cache-tokens", type=int, default=250_000, metavar="N", help="of the engine's own (250000)")
    parser.add_argument("--gb", type=float, default=60, metavar="GB", help="size of the host tier (60)")
    parser.add_argument(
        "--patience", type=float, default=20, metavar="S", help="to wait for a rate's last answers (20)"
    )
    parser.add_argument(
        "--enough", type=float, default=3, metavar="S", help="a kind whose mean is above this is asked no faster (3)"
    )
    parser.add_argument(
        "--least", type=int, default=0, metavar="N", help="questions at every rate, at least (no limit)"
    )
    parser.add_argument("--at-once", **AT_ONCE)
    parser.add_argument("--budget", type=float, metavar="S", help="seconds for everything (no limit)")
    parser.add_argument("--mode", choices=vllm_kinds.MODES, default="graphs", help="as suite.py's (graphs)")
    began = time.monotonic()
    options = parser.parse_args()
    # Whoever ends this ends the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    least = min(options.users, options.rounds, options.answer, *options.at_once)
    if least < 1 or min(*options.rates, options.seconds, 1 if options.budget is None else options.budget) <= 0:
        parser.error("--users, --rounds, --answer and --at-once take at least 1, the others more than 0")
    vllm_kinds.check(options)
    if options.dry:
        dry = {"rates": [1.0, 2.0], "seconds": 4, "users": 4, "rounds": 4, "history": 400, "shared": 20, "answer": 8}
        vars(options).update(dry, cache_tokens=1600, gb=0.05, mode="eager")
    shape = Shape(options.users, options.rounds, options.shared, options.history, options.answer, options.seconds)
    length = options.shared + options.history + options.rounds * (options.answer + 40) + 256
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "models", "limit")}
    settings["model"] = vllm_kinds.shape_of(options.dry).name
    record = Record("qps", settings, options.json)
    common = {"models": str(options.models), "dry": options.dry, "mode": options.mode, "gigabytes": options.gb}
    common |= {"cache_tokens": options.cache_tokens, "length": length}
    with Child(__file__, {"kind": "prepare", **common}, "prepare") as running:
        for row in running.rows(options.limit):
            record.add(row)
    print(HEADER, flush=True)
    deadline = began + options.budget - END if options.budget is not None else math.inf
    sweep = Sweep(options, common, shape, record, deadline)
    sweep.run()
    print("\n" + HEADER)
    for line in sorted(summarise(record.rows), key=lambda line: line["qps"]):
        print(show(line))
    for other in ("base", "native"):
        for line in pairs(record.rows, "kvbm", other):
            print(show_pair(line))
    return 1 if sweep.failures else 0


if __name__ == "__main__":
    sys.exit(main())
