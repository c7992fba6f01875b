"""Time to first token of long prompts that come back after the GPU has forgotten them, side by side.

    python benchmarks/gpu/ttft.py --json results/ttft.json
    python benchmarks/gpu/ttft.py --kinds kvbm --lengths 8192 32768 65536 --modes eager graphs
    python benchmarks/gpu/ttft.py --kinds raw packed native lmcache --peers ~/peers --gb 36 --at-once 2

Round robin over a few prompts, with a GPU cache that holds two and a half of them: by a prompt's next turn the engine
has dropped it. For every engine, length and mode, in a process of its own:

    cold       each prompt for the first time, then twice more while it is still on the GPU: `on_gpu`, the least that a
               prompt can take, and `reference`, eight tokens that whatever comes back later has to reproduce
    returned   the prompts in turn, once a pass
    again      the same with eight tokens, compared with the reference; not with the cold run, whose computation has
               other shapes and in bf16 other tokens
    batch      all prompts at once

The floor of a returned prompt is the longer of `on_gpu` and its bytes at the speed of one plain pinned copy, which is
measured first. Packed blocks have fewer bytes, and a line says whether and why blocks were packed. Every single time is
in the rows. Machines and runs differ by some 15 %: compare engines within a run.

With `--at-once`, so many engines start side by side, and one after the other is measured while the others wait. They
share the host's memory: each takes the host tier and, while it starts, the weights.

An engine that fails, or takes longer than `--limit`, costs the others nothing but that time.
"""

from __future__ import annotations

import itertools
import random
import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import vllm_kinds
from child import Child, ChildError, Emit, orders, run_child, wait_for_memory
from records import Record, Row, arguments, median

REFERENCE_TOKENS = 8
PREPARE_SECONDS = 300  # to write the model
PACKED = re.compile(r"blocks are packed to (\d+) %.*|blocks of this KV cache are not packed: .*")


def _pass() -> None:
    """The GPU forgets by itself."""


def child(task: Row, emit: Emit) -> None:
    if task["kind"] == "prepare":
        prepare(task, emit)
    else:
        measure(task, emit)


def prepare(task: Row, emit: Emit) -> None:
    """The model, and what the bus can carry."""
    vllm_kinds.model_folder(vllm_kinds.shape_of(task["dry"]), Path(task["models"]))
    if task["dry"]:
        emit({"what": "bus", "to_device_gbps": 1.0, "to_host_gbps": 1.0})
        return
    from copies import plain_copies

    emit({"what": "bus", **plain_copies()})


def measure(task: Row, emit: Emit) -> None:
    shape = vllm_kinds.shape_of(task["dry"])
    length, count = task["length"], task["count"]
    began = time.perf_counter()
    llm = vllm_kinds.open_engine(
        task["kind"],
        model=vllm_kinds.model_folder(shape, Path(task["models"])),
        dry=task["dry"],
        mode=task["mode"],
        gigabytes=task["gigabytes"],
        length=length + 256,
        blocks=int(2.5 * length / shape.block_size),
        **({} if task["dry"] else vllm_kinds.beside_others(shape, int(2.5 * length))),
    )
    emit({"what": "start", "s": round(time.perf_counter() - began, 2)})
    if next(orders(), None):
        run_prompts(llm, length, count, task["passes"], emit)


def run_prompts(llm: Any, length: int, count: int, passes: int, emit: Emit, forget: Callable[[], None] = _pass) -> None:
    """All measurements of one length, with one pass the cold ones only. ``forget`` is called before a prompt returns,
    where the GPU has room for more of them than there are."""
    source = random.Random(length)  # no prompt begins like one of another length

    def run(prompt: Any, tokens: int = 1) -> tuple[Row, list[int]]:
        began = time.perf_counter()
        (output,) = llm.generate(prompt, vllm_kinds.greedy(tokens), use_tqdm=False)
        took = {"ms": round((time.perf_counter() - began) * 1e3, 3), "cached": output.num_cached_tokens}
        return took, list(output.outputs[0].token_ids)

    def fresh(tokens: int) -> Any:
        return vllm_kinds.as_prompt(vllm_kinds.draw(source, tokens))

    run(fresh(length))
    run(fresh(min(512, length)), REFERENCE_TOKENS)
    prompts = [fresh(length) for _ in range(count)]
    references = []
    for i, prompt in enumerate(prompts):
        emit({"what": "cold", "prompt": i, **run(prompt)[0]})
        emit({"what": "on_gpu", "prompt": i, **run(prompt)[0]})
        took, tokens = run(prompt, REFERENCE_TOKENS)
        emit({"what": "reference", "prompt": i, **took})
        references.append(tokens)
    if passes == 1:
        return
    for number in range(1, passes):
        for i, prompt in enumerate(prompts):
            forget()
            emit({"what": "returned", "pass": number, "prompt": i, **run(prompt)[0]})
    same = 0
    for i, prompt in enumerate(prompts):
        forget()
        took, tokens = run(prompt, REFERENCE_TOKENS)
        same += tokens == references[i]
        emit({"what": "again", "prompt": i, "same": tokens == references[i], **took})
    distinct = len({tuple(tokens) for tokens in references})
    emit({"what": "tokens", "same": same, "of": count, "distinct": distinct})
    forget()
    began = time.perf_counter()
    llm.generate(prompts, vllm_kinds.greedy(1), use_tqdm=False)
    emit({"what": "batch", "prompts": count, "ms": round((time.perf_counter() - began) * 1e3, 3)})


def summarise(rows: list[Row]) -> list[Row]:
    """A line for every engine, length and mode: medians, and what they are to be compared with."""
    bus = next((row["to_device_gbps"] for row in rows if row["what"] == "bus"), None)
    lines: dict[tuple[int, str, str], list[Row]] = {}
    for row in rows:
        if "kind" in row:
            lines.setdefault((row["length"], row["mode"], row["kind"]), []).append(row)
    summary = []
    for (length, mode, kind), group in lines.items():
        times = {
            what: [row["ms"] for row in group if row["what"] == what]
            for what in ("cold", "on_gpu", "returned", "again", "batch")
        }
        line: Row = {"length": length, "mode": mode, "kind": kind}
        line |= {f"{what}_ms": median(values) if values else None for what, values in times.items()}
        line["worst_returned_ms"] = max(times["returned"], default=None)
        cached = [row["cached"] / length * 100 for row in group if row["what"] == "returned"]
        line["hit_percent"] = median(cached) if cached else None
        tokens = next((row for row in group if row["what"] == "tokens"), None)
        line["same_tokens"] = f"{tokens['same']} of {tokens['of']}" if tokens else None
        line["start_s"] = next((row["s"] for row in group if row["what"] == "start"), None)
        size = next((row["bytes"] for row in group if "bytes" in row), None)
        packing = next((row for row in group if row["what"] == "packing"), {"ratio": 1, "said": ""})
        line["packing"] = packing["said"]
        line["bus_ms"] = packing["ratio"] * size / bus / 1e6 if size and bus else None
        floors = [ms for ms in (line["bus_ms"], line["on_gpu_ms"]) if ms is not None]
        line["floor_ms"] = max(floors) if len(floors) == 2 else None
        line["failed"] = next((row["why"] for row in group if row["what"] == "failed"), None)
        summary.append(line)
    return summary


COLUMNS = {
    "cold": "cold_ms",
    "on GPU": "on_gpu_ms",
    "returned": "returned_ms",
    "worst": "worst_returned_ms",
    "batch": "batch_ms",
    "floor": "floor_ms",
    "hits %": "hit_percent",
}
HEADER = f"{'tokens':>7} {'mode':<7}{'engine':<8}" + "".join(f"{name:>10}" for name in COLUMNS) + "  same tokens"


def show(line: Row) -> str:
    start = f"{line['length']:>7} {line['mode']:<7}{line['kind']:<8}"
    if line["failed"]:
        return f"{start} failed: {line['failed'].splitlines()[0]}"
    cells = (f"{line[name]:.1f}" if line[name] is not None else "-" for name in COLUMNS.values())
    return start + "".join(f"{cell:>10}" for cell in cells) + f"  {line['same_tokens']}"


def packing_in(log: list[str]) -> list[Row]:
    """What the first rank has said about packed blocks, and their size by that of raw ones."""
    found = next(filter(None, map(PACKED.search, log)), None)
    return [{"what": "packing", "ratio": int(found[1] or 100) / 100, "said": found[0]}] if found else []


class Engine:
    """A kind in a process of its own. A failure is a row, and no exception."""

    def __init__(self, task: Row, options: Any, record: Record, running: ExitStack) -> None:
        kind = task["kind"]
        self._what = {name: task[name] for name in ("kind", "length", "mode")}
        self._limit = options.limit
        self._record = record
        self._has_failed = False
        self._bytes = vllm_kinds.shape_of(options.dry).loaded_bytes(task["length"])
        self._process = running.enter_context(Child(__file__, task, kind, vllm_kinds.import_path(kind, options.peers)))

    def start(self) -> None:
        """Wait until it has started."""
        began = time.monotonic()
        try:
            row = self._process.receive(self._limit)
            if row is None:
                raise ChildError("ended before it was ready")
            self._add(row)
        except ChildError as error:
            self._failed(error)
        self._limit -= time.monotonic() - began

    def measure(self) -> bool:
        """Whether all went well."""
        if not self._has_failed:
            try:
                self._process.send({"do": "measure"})
                for row in self._process.rows(self._limit):
                    self._add(row)
                for row in packing_in(self._process.lines_with("packed")):
                    self._add(row)
            except ChildError as error:
                self._failed(error)
        rows = [row for row in self._record.rows if self._what.items() <= row.items() or row["what"] == "bus"]
        (line,) = summarise(rows)
        print(show(line), *filter(None, [line["packing"]]), sep="\n        ", flush=True)
        return not self._has_failed

    def _add(self, row: Row) -> None:
        self._record.add({**self._what, "bytes": self._bytes, **row})

    def _failed(self, error: ChildError) -> None:
        self._has_failed = True
        self._record.add({**self._what, "what": "failed", "why": str(error)})
        print(error, file=sys.stderr)


def main() -> int:
    if run_child(child):
        return 0
    parser = arguments(__doc__)
    vllm_kinds.add_arguments(parser, peers=True)
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[32768], metavar="N", help="tokens of a prompt (32768)"
    )
    parser.add_argument(
        "--modes", nargs="+", choices=("eager", "graphs"), default=["eager"], help="with CUDA graphs, or eager"
    )
    parser.add_argument(
        "--count", type=int, default=6, metavar="N", help="prompts (6); at least 4, or they stay on the GPU"
    )
    parser.add_argument(
        "--passes", type=int, default=3, metavar="N", help="turns of each prompt, the cold one included (3)"
    )
    parser.add_argument(
        "--gb", type=float, metavar="GB", help="size of the host tier; else what all prompts need and a tenth"
    )
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="engines to start at the same time (1)")
    options = parser.parse_args()
    if options.count < 4 or options.passes < 2 or min(options.lengths) < 64 or options.at_once < 1:
        parser.error("--count takes at least 4, --passes at least 2, --lengths at least 64, --at-once at least 1")
    if options.peers is None and set(options.kinds) & set(vllm_kinds.PEERS):
        parser.error(f"{' and '.join(vllm_kinds.PEERS)} need --peers, the folder their packages were installed to")
    vllm_kinds.check(options)
    shape = vllm_kinds.shape_of(options.dry)
    names = ("kinds", "lengths", "modes", "count", "passes", "gb", "dry")
    record = Record("ttft", {**{name: getattr(options, name) for name in names}, "model": shape.name}, options.json)
    common = {"models": str(options.models), "dry": options.dry}
    failures = 0
    try:
        with Child(__file__, {"kind": "prepare", **common}, "prepare") as running:
            for row in running.rows(PREPARE_SECONDS):
                record.add(row)
    except ChildError as error:  # then there is no floor, and the first engine has to write the model
        failures += 1
        print(error, file=sys.stderr)
    print(HEADER, flush=True)
    size = options.at_once
    groups = [options.kinds[i : i + size] for i in range(0, len(options.kinds), size)]
    for mode, length, group in itertools.product(options.modes, options.lengths, groups):
        # The warm-up prompt and one that is evicted too late: room for two more than there are.
        gigabytes = options.gb or 1.1 * (options.count + 2) * length * shape.token_bytes / 1e9
        task = {**common, "length": length, "mode": mode, "count": options.count, "passes": options.passes}
        wait_for_memory()
        with ExitStack() as running:
            engines = [
                Engine({**task, "kind": kind, "gigabytes": gigabytes}, options, record, running) for kind in group
            ]
            for engine in engines:
                engine.start()
            for engine in engines:
                failures += not engine.measure()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
