"""What ttft.py, interference.py and throughput.py measure, with one start of each engine: for a GPU that is paid by the
minute.

    python benchmarks/gpu/suite.py --out results --name 2026-01-31
    python benchmarks/gpu/suite.py --kinds base native kvbm --parts ttft throughput --gb 50 --out results

Engines, by default one without KVBM and one with it, start side by side, each in a process of its own with a cache of
two and a half of the longest prompts, and stand side by side on the GPU. They take turns; none ever runs beside the
other. With 65,536 tokens an engine of this model takes 45 GB of the GPU, so three fit an H200, and 50 GB of host memory
hold the longest prompts of each that has a host tier. The engine without a tier computes each prompt once; it would
only do so again as the prompt returns. Between the turns of a prompt the engine is made to forget it, because its cache
has room for several of the short ones. Everything else is as in those three scripts, and so are the files: ``NAME-
ttft.json``, ``NAME-interference.json``, ``NAME-throughput.json``. A part that fails is noted in its file, and the next
one goes on.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import interference
import throughput
import ttft
import vllm_kinds
from child import Child, ChildError, Emit, orders, run_child, wait_for_memory
from records import Record, Row, arguments

KINDS = ("base", "kvbm")
PARTS = ("ttft", "interference", "throughput")


def model_of(task: Row) -> Path:
    make = vllm_kinds.config_folder if task["dummy"] else vllm_kinds.model_folder
    return make(vllm_kinds.shape_of(task["dry"]), Path(task["models"]))


def child(task: Row, emit: Emit) -> None:
    shape = vllm_kinds.shape_of(task["dry"])
    began = time.perf_counter()
    llm = vllm_kinds.open_engine(
        task["kind"],
        model=model_of(task),
        dry=task["dry"],
        mode=task["mode"],
        gigabytes=task["gb"],
        length=task["longest"] + 256,
        blocks=int(2.5 * task["longest"]) // shape.block_size,
        disable_log_stats=False,
        # vLLM's own default is 1,024, whose warm-up takes gigabytes that engines side by side lack.
        max_num_seqs=max(128, task["requests"]),
        **({"load_format": "dummy"} if task["dummy"] else {}),
        **({} if task["dry"] else vllm_kinds.beside_others(shape, int(2.5 * task["longest"]))),
    )
    emit({"what": "start", "s": round(time.perf_counter() - began, 2)})
    source = random.Random(3)

    def forget() -> None:
        interference.forget(llm, source)

    for order in orders():
        try:
            if order["do"] == "ttft":
                ttft.run_prompts(llm, order["length"], order["count"], order["passes"], emit, forget)
            elif order["do"] == "interference":
                interference.watch(llm, {**task, **order}, emit)
            else:
                emit(throughput.run_round(llm, order["seed"], order["requests"], order["inputs"], order["outputs"]))
        except Exception as error:
            emit({"what": "failed", "why": f"{type(error).__name__}: {error}"})
        emit({"what": "over"})


def answers(engine: Child, order: Row, limit: float) -> Iterator[Row]:
    """The rows that an order brings."""
    engine.send(order)
    while True:
        row = engine.receive(limit)
        if row is None:
            raise ChildError("an engine has ended")
        if row["what"] == "over":
            return
        yield row


class Suite:
    def __init__(self, options: Row, engines: dict[str, Child], starts: dict[str, float]) -> None:
        self._options = options
        self._engines = engines
        self._starts = starts
        self._began = time.monotonic()
        self._shape = vllm_kinds.shape_of(options["dry"])
        self.failures = 0

    def _record(self, name: str, settings: Row) -> Record:
        options = self._options
        common = {"kinds": list(self._engines), "mode": options["mode"], "dry": options["dry"]}
        path = Path(options["out"]) / f"{options['name']}-{name}.json"
        return Record(name, {**common, **settings, "model": self._shape.name, "suite": True}, path)

    def _run(self, record: Record, kind: str, order: Row, what: Row) -> None:
        for row in answers(self._engines[kind], order, self._options["limit"]):
            self.failures += row["what"] == "failed"
            record.add({**what, **row})

    def ttft(self, bus: Row) -> None:
        options = self._options
        settings = {"lengths": options["lengths"], "modes": [options["mode"]], "passes": options["passes"]}
        record = self._record("ttft", {**settings, "gb": options["gb"]})
        record.add(bus)
        print(ttft.HEADER, flush=True)
        for length in options["lengths"]:
            count = options["count"] if length < options["longest"] else max(4, options["count"] - 2)
            for kind in self._engines:
                what = {"kind": kind, "length": length, "mode": options["mode"]}
                what["bytes"] = self._shape.loaded_bytes(length)
                record.add({**what, "what": "start", "s": self._starts[kind]})
                # Without a tier, a prompt that returns is as cold as the first time.
                passes = 1 if kind == "base" else options["passes"]
                order = {"do": "ttft", "length": length, "count": count, "passes": passes}
                self._run(record, kind, order, what)
                print(ttft.show(ttft.summarise(record.rows)[-1]), flush=True)

    def interference(self, kinds: list[str]) -> None:
        options = self._options
        length = options["guest"]
        order = {"do": "interference", "length": length, "others": options["others"], "rounds": options["rounds"]}
        order |= {"quiet": options["quiet"], "limit": options["limit"]}
        decoding = options["others"] * (interference.SHORT_PROMPT + interference.decoded_tokens(order))
        # More than there is room for beside those that decode.
        order["guests"] = max(2, int(2.5 * options["longest"] - decoding) // length + 2)
        record = self._record("interference", {**order, "modes": [options["mode"]], "turns": options["turns"]})
        for turn in range(options["turns"]):
            for kind in kinds if turn % 2 == 0 else kinds[::-1]:
                what = {"kind": kind, "mode": options["mode"], "turn": turn}
                self._run(record, kind, {**order, "first": turn * options["rounds"]}, what)
                print(f"turn {turn} of {kind} over after {time.monotonic() - self._began:.0f} s", flush=True)
        print(interference.HEADER, flush=True)
        for line in interference.summarise(record.rows):
            print(interference.show(line), flush=True)

    def throughput(self) -> None:
        options = self._options
        settings = {name: options[name] for name in ("requests", "inputs", "outputs", "repeats")}
        record = self._record("throughput", settings)
        order = list(self._engines)
        for number in range(options["repeats"] + 1):
            for kind in order:
                self._run(
                    record, kind, {"do": "round", "seed": 1000 + number, **settings}, {"kind": kind, "round": number}
                )
            order = order[1:] + order[:1]
        for line in throughput.summarise(record.rows):
            print(f"median   {line['kind']:<8}{line['s']:>9.3f} s{line['tokens_per_s']:>11.0f} tokens/s", end="")
            print(f"  {line['changes_percent']} % against {next(iter(self._engines))}", flush=True)


def main() -> int:
    if run_child(child):
        return 0
    parser = arguments(__doc__)
    vllm_kinds.add_arguments(parser, KINDS)
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR", help="where the files go (results)")
    parser.add_argument("--name", default=time.strftime("%Y-%m-%d"), help="what their names begin with (the date)")
    parser.add_argument(
        "--mode",
        choices=vllm_kinds.MODES,
        default="graphs",
        help="with CUDA graphs, eager, or with CUDA graphs of decode steps and without torch.compile",
    )
    parser.add_argument(
        "--dummy",
        action="store_true",
        help="vLLM's dummy weights: a start without a model on disk, tokens without sense",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure, in this order")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768, 65536], metavar="N", help="of ttft")
    parser.add_argument(
        "--count", type=int, default=6, metavar="N", help="prompts of each length; of the longest two less"
    )
    parser.add_argument(
        "--passes", type=int, default=3, metavar="N", help="turns of each prompt, the cold one included (3)"
    )
    parser.add_argument("--gb", type=float, default=60, metavar="GB", help="size of the host tier (60)")
    parser.add_argument("--guest", type=int, default=32768, metavar="N", help="tokens of a prompt that returns (32768)")
    parser.add_argument("--others", type=int, default=16, metavar="N", help="requests that decode meanwhile (16)")
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="how often one returns (6)")
    parser.add_argument("--turns", type=int, default=1, metavar="N", help="how often an engine has those rounds (1)")
    parser.add_argument("--quiet", type=int, default=240, metavar="N", help="steps without it before each (240)")
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="of throughput (64)")
    parser.add_argument("--inputs", type=int, default=2048, metavar="N", help="tokens of each (2048)")
    parser.add_argument("--outputs", type=int, default=128, metavar="N", help="tokens it decodes (128)")
    parser.add_argument("--repeats", type=int, default=4, metavar="N", help="measured rounds, after one to warm up (4)")
    arguments_given = parser.parse_args()
    if arguments_given.count < 4 or arguments_given.passes < 2 or min(arguments_given.lengths) < 64:
        parser.error("--count takes at least 4, --passes at least 2, --lengths at least 64")
    if arguments_given.dummy and "ttft" in arguments_given.parts:
        parser.error("--dummy: ttft compares tokens, which say nothing with vLLM's dummy weights; choose --parts")
    vllm_kinds.check(arguments_given)
    options = {**vars(arguments_given), "longest": max(arguments_given.lengths)}
    for name in ("out", "models"):
        options[name] = str(options[name])
    options.pop("json")
    if options["dummy"]:
        model_of(options)  # before two engines write it at once
    wait_for_memory()
    try:
        with contextlib.ExitStack() as stack:
            bus: Row = {}
            if not options["dummy"]:
                with Child(ttft.__file__, {"kind": "prepare", **options}, "prepare") as running:
                    bus = next(running.rows(options["limit"]))
            engines = {
                kind: stack.enter_context(Child(__file__, {**options, "kind": kind}, kind)) for kind in options["kinds"]
            }
            starts = {}
            for kind, engine in engines.items():
                row = engine.receive(options["limit"])
                if row is None:
                    raise ChildError(f"{kind} ended before it was ready")
                starts[kind] = row["s"]
                print(f"{kind} started in {row['s']:.1f} s", flush=True)
                for line in engine.lines_with(" packed"):
                    print(f"  {line}", flush=True)
            suite = Suite(options, engines, starts)
            for part in options["parts"]:
                if part == "ttft":
                    suite.ttft(bus)
                elif part == "interference":
                    suite.interference([kind for kind in engines if kind != "base"] or list(engines))
                else:
                    suite.throughput()
    except ChildError as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if suite.failures else 0


if __name__ == "__main__":
    sys.exit(main())
