"""Time to first token over the rate of requests: the benchmark that guides to KVBM name, with a real server.

    python benchmarks/gpu/qps.py --json results/qps.json
    python benchmarks/gpu/qps.py --mode eager --at-once 2 --budget 450 --json results/qps.json
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

Rates are taken in the order given. Once a kind has let a mean of --enough seconds pass it is not asked any faster. A
result is written as soon as it is there. With --budget, what no longer fits is left out, and said.
"""

from __future__ import annotations

import contextlib
import json
import math
import runpy
import signal
import socket
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import vllm_kinds
from child import Child, ChildError, Emit, run_child, wait_for_memory
from records import SOURCE, Record, Row, arguments

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
# Seconds that are kept for the start of servers that come later, and for the end.
LATER_START, END = 45.0, 12.0
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
    command += ["--num-gpu-blocks-override", str(task["cache_tokens"] // shape.block_size)]
    command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log", "--generation-config", "vllm"]
    if task["mode"] == "eager":
        command.append("--enforce-eager")
    if task["mode"] == "decode-graphs":
        command += ["--compilation-config", json.dumps(vllm_kinds.DECODE_GRAPHS)]
    if task["dry"]:
        command += ["--block-size", str(shape.block_size)]
    else:
        # Said outright: a server that looks at what is free would count what another takes meanwhile as its own.
        command += ["--kv-cache-memory-bytes", str(task["cache_tokens"] * shape.token_bytes)]
        command += ["--gpu-memory-utilization", "0.3"]
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


def whole_rounds(shape: Shape, qps: float) -> Shape:
    """As long as the shape says or a little longer: until every user has asked equally often."""
    turn = shape.num_users / qps
    return shape._replace(time=math.ceil(shape.time / turn - 1e-9) * turn)


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


def filling_order(shape: Shape, rates: list[float]) -> list[int]:
    """All users of all rates. Those of the first rate come last, in the order in which they will ask."""
    first = askers(whole_rounds(shape, rates[0]), rates[0])
    every = {user for qps in rates for user in askers(whole_rounds(shape, qps), qps)}
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
        kinds, size = list(self._options.kinds), self._options.at_once
        groups = [kinds[i : i + size] for i in range(0, len(kinds), size)]
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
                for i, server in enumerate(servers):
                    later = len(servers) - i - 1 + sum(map(len, groups))
                    left = self._deadline - time.monotonic() - LATER_START * len(groups)
                    try:
                        self._measure(server, time.monotonic() + left / (1 + later))
                    except (ChildError, EndpointError) as error:
                        self.failures += 1
                        self._failed(server, "failed", error)
                    server.process.end()

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
        return True

    def _failed(self, server: Server, what: str, error: Exception) -> None:
        self._record.add({"kind": server.kind, "what": what, "why": str(error)})
        print(f"{server.kind}: {what}: {error}", file=sys.stderr, flush=True)


class Sweep(Servers):
    """Every kind at every rate."""

    def __init__(self, options: Any, common: Row, shape: Shape, record: Record, deadline: float) -> None:
        super().__init__(options, common, record, deadline)
        self._shape = shape
        self._users = filling_order(shape, options.rates)

    def _measure(self, server: Server, end: float) -> None:
        """Fill, and every rate that ends in time."""
        kind, enough = server.kind, math.inf
        server.endpoint.ask(Prompt(messages=[{"role": "user", "content": "hi " * 200}]), 16, 0, 0, 0.0)
        took = fill(server.endpoint, self._shape, self._users)
        self._record.add({"kind": kind, "what": "fill", "s": round(took, 1), "users": len(self._users)})
        for qps in self._options.rates:
            shape = whole_rounds(self._shape, qps)
            if qps > enough:
                self._left_out(kind, qps, f"slower than --enough at {enough:g} requests/s already")
                continue
            patience = min(self._options.patience, end - time.monotonic() - shape.time)
            if patience < min(5.0, self._options.patience):
                self._left_out(kind, qps, "no time left")
                continue
            mean = self._rate(server, shape, qps, patience)
            if mean is None or mean > self._options.enough:
                enough = min(enough, qps)

    def _rate(self, server: Server, shape: Shape, qps: float, patience: float) -> float | None:
        """One rate; the mean time to first token."""
        outcome = run(Target(server.kind, server.endpoint), MultiRound(shape, qps), qps, patience)
        times = [s.ttft for s in outcome.samples if s.ttft is not None and not s.error]
        row = {
            "kind": server.kind,
            "what": "rate",
            "qps": qps,
            **{name: getattr(outcome.summary, name) for name in outcome.summary.__struct_fields__},
            "ttfts": [round(value, 4) for value in times],
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
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="servers to start at the same time (1)")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds for everything (no limit)")
    parser.add_argument("--mode", choices=vllm_kinds.MODES, default="graphs", help="as suite.py's (graphs)")
    began = time.monotonic()
    options = parser.parse_args()
    # Whoever ends this ends the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    least = min(options.users, options.rounds, options.answer, options.at_once)
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
    return 1 if sweep.failures else 0


if __name__ == "__main__":
    sys.exit(main())
