"""Time to first token over the rate of requests: the benchmark that guides to KVBM name, with a real server.

    python benchmarks/gpu/qps.py --json results/qps.json
    python benchmarks/gpu/qps.py --kinds kvbm --rates 0.25 0.5 1 2 --seconds 100

A `vllm serve` of each kind, one after the other: vLLM with its own prefix cache only (base), with its own offloading
(native), with KVBM (kvbm). The workload is `kvbm bench`'s, that of LMBenchmark's long_input_short_output_run.sh: 15
users who share 1,000 tokens and have 20,000 of their own, up to 20 questions each, answers of 100 tokens. The engine's
own cache holds about 13 such users, as on a card with 80 GB; the host tier holds all.

Before the first rate every user's history is computed once, so that short runs measure what comes back and not what is
new; users come back from one rate to the next. For the published form of the benchmark, in which every rate has users
of its own for 100 seconds, use `kvbm bench` itself.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import vllm_kinds
from child import Child, ChildError, Emit, run_child, wait_for_memory
from records import SOURCE, Record, Row, arguments

sys.path.insert(0, str(SOURCE))
from kvbm.bench.client import Endpoint, EndpointError, Prompt
from kvbm.bench.runner import Target, run
from kvbm.bench.workload import MultiRound, Shape, opening

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Of the workload's sentences; a word that is not here would be nobody's in particular.
WORDS = (
    "Here is what everybody told User has said before Question please tell me one more long story and let it end well "
    "Just to warm up user says are"
)
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
    if task["dry"]:
        command += ["--block-size", str(shape.block_size)]
    transfer = vllm_kinds.connector(task["kind"], task["gigabytes"])
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    vllm_kinds.set_environment(task["dry"], task["gigabytes"])
    sys.argv = command
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def fill(endpoint: Endpoint, shape: Shape) -> float:
    """Compute every user's history once; seconds it took."""
    began = time.monotonic()

    def one(user: int) -> str:
        prompt = Prompt(messages=[{"role": "user", "content": opening(user, shape)}])
        return endpoint.ask(prompt, 1, user, 0, began).error

    with ThreadPoolExecutor(2) as pool:
        errors = [error for error in pool.map(one, range(1, shape.num_users + 1)) if error]
    if errors:
        raise ChildError(f"{len(errors)} of {shape.num_users} first requests failed: {errors[0]}")
    return time.monotonic() - began


def measure(options: Any, task: Row, shape: Shape, record: Record) -> None:
    """One kind: start, fill, and every rate."""
    kind = task["kind"]
    began = time.monotonic()
    with Child(__file__, task, kind) as server:
        try:
            endpoint = Endpoint(f"http://127.0.0.1:{task['port']}", "model", extra={"ignore_eos": True})
            wait_until_healthy(endpoint, server, options.limit)
            record.add({"kind": kind, "what": "start", "s": round(time.monotonic() - began, 1)})
            endpoint.ask(Prompt(messages=[{"role": "user", "content": "hi " * 200}]), 16, 0, 0, began)
            record.add({"kind": kind, "what": "fill", "s": round(fill(endpoint, shape), 1)})
            for qps in options.rates:
                outcome = run(Target(kind, endpoint), MultiRound(shape, qps), qps, options.patience)
                times = [s.ttft for s in outcome.samples if s.ttft is not None and not s.error]
                record.add(
                    {
                        "kind": kind,
                        "what": "rate",
                        "qps": qps,
                        **{name: getattr(outcome.summary, name) for name in outcome.summary.__struct_fields__},
                        "ttfts": [round(value, 4) for value in times],
                        "cached": [s.cached_tokens for s in outcome.samples if not s.error],
                        "server": outcome.server,
                    }
                )
        finally:
            server.kill()


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


COLUMNS = {
    "mean": ("ttft_mean", 3),
    "median": ("ttft_p50", 3),
    "99 %": ("ttft_p99", 3),
    "answered/s": ("requests_per_second", 2),
    "cached %": ("cached_percent", 0),
    "late": ("late", 0),
    "failed": ("failed", 0),
    "unfinished": ("unfinished", 0),
    "× faster": ("faster", 1),
}
HEADER = f"{'rate':>6} {'engine':<8}" + "".join(f"{name:>12}" for name in COLUMNS)


def show(line: Row) -> str:
    cells = ("-" if line[key] is None else f"{line[key]:.{digits}f}" for key, digits in COLUMNS.values())
    return f"{line['qps']:>6g} {line['kind']:<8}" + "".join(f"{cell:>12}" for cell in cells)


def main() -> int:
    if run_child(child):
        return 0
    parser = arguments(__doc__)
    vllm_kinds.add_arguments(parser)
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 1, 1.5, 2, 3], metavar="QPS", help="(0.5 to 3)")
    parser.add_argument("--seconds", type=float, default=20, metavar="S", help="of a rate (20)")
    parser.add_argument("--users", type=int, default=15, metavar="N", help="at a time (15)")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="questions of a user (20)")
    parser.add_argument("--history", type=int, default=20000, metavar="N", help="tokens of a user's own (20000)")
    parser.add_argument("--shared", type=int, default=1000, metavar="N", help="tokens that all share (1000)")
    parser.add_argument("--answer", type=int, default=100, metavar="N", help="tokens of an answer (100)")
    parser.add_argument("--cache-tokens", type=int, default=300_000, metavar="N", help="of the engine's own (300000)")
    parser.add_argument("--gb", type=float, default=60, metavar="GB", help="size of the host tier (60)")
    parser.add_argument(
        "--patience", type=float, default=15, metavar="S", help="to wait for a rate's last answers (15)"
    )
    parser.add_argument("--mode", choices=("eager", "graphs"), default="graphs", help="with CUDA graphs, or eager")
    options = parser.parse_args()
    if min(options.users, options.rounds, options.answer) < 1 or min(options.rates) <= 0 or options.seconds <= 0:
        parser.error("--users, --rounds and --answer take at least 1, --rates and --seconds more than 0")
    vllm_kinds.check(options)
    if options.dry:
        dry = {"rates": [1.0, 2.0], "seconds": 6, "users": 4, "rounds": 5, "history": 400, "shared": 20, "answer": 8}
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
    failures = 0
    for kind in options.kinds:
        wait_for_memory()
        try:
            measure(options, {**common, "kind": kind, "port": free_port()}, shape, record)
        except (ChildError, EndpointError) as error:
            failures += 1
            record.add({"kind": kind, "what": "failed", "why": str(error)})
            print(error, file=sys.stderr)
    print(HEADER)
    for line in sorted(summarise(record.rows), key=lambda line: line["qps"]):
        print(show(line))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
