"""What KVBM costs where there is nothing to reuse: tokens a second with prompts that never come again.

    python benchmarks/gpu/throughput.py --json results/throughput.json

64 requests of 2,048 tokens, 128 tokens each to decode, all at once. The engines stand side by side on the GPU, each in
a process of its own, and take turns, in another order every time: a machine that gets slower with time does so for all.
Every repeat draws new prompts, the same for all engines.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from pathlib import Path
from typing import Any

import vllm_kinds
from child import Child, ChildError, Emit, orders, run_child, wait_for_memory
from records import Record, Row, arguments, median


def child(task: Row, emit: Emit) -> None:
    shape = vllm_kinds.shape_of(task["dry"])
    requests, inputs, outputs = task["requests"], task["inputs"], task["outputs"]
    blocks = requests * -(-(inputs + outputs + 1) // shape.block_size) + 64
    llm = vllm_kinds.open_engine(
        task["kind"],
        model=vllm_kinds.model_folder(shape, Path(task["models"])),
        dry=task["dry"],
        mode=task["mode"],
        # What vLLM's own cache holds, and half as much again.
        gigabytes=1.5 * blocks * shape.block_size * shape.token_bytes / 1e9,
        length=inputs + outputs + 16,
        blocks=blocks,
        gpu_memory_utilization=0.3,  # the others are there too
    )
    emit({"what": "ready"})
    for order in orders():
        emit(run_round(llm, order["seed"], requests, inputs, outputs))


def run_round(llm: Any, seed: int, requests: int, inputs: int, outputs: int) -> Row:
    """All requests at once, and how long they take."""
    source = random.Random(seed)
    prompts = [vllm_kinds.as_prompt(vllm_kinds.draw(source, inputs)) for _ in range(requests)]
    began = time.perf_counter()
    results = llm.generate(prompts, vllm_kinds.greedy(outputs), use_tqdm=False)
    seconds = time.perf_counter() - began
    made = sum(len(result.outputs[0].token_ids) for result in results)
    cached = sum(result.num_cached_tokens or 0 for result in results)
    return {"what": "run", "s": round(seconds, 4), "made": made, "computed": requests * inputs, "cached": cached}


def summarise(rows: list[Row]) -> list[Row]:
    """A line an engine; ``change_percent`` compares each repeat with the first engine's of the same round."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["what"] == "run":
            measured = groups.setdefault(row["kind"], [])
            if row["round"]:
                measured.append(row)
    groups = {kind: group for kind, group in groups.items() if group}
    first = {row["round"]: row["s"] for row in next(iter(groups.values()), [])}
    summary = []
    for kind, group in groups.items():
        ratios = [(first[row["round"]] / row["s"] - 1) * 100 for row in group if row["round"] in first]
        summary.append(
            {
                "kind": kind,
                "repeats": len(group),
                "s": median(row["s"] for row in group),
                "tokens_per_s": median((row["made"] + row["computed"]) / row["s"] for row in group),
                "change_percent": median(ratios) if ratios else None,
                "changes_percent": [round(ratio, 2) for ratio in ratios],
                "cached": sum(row["cached"] for row in group),
            }
        )
    return summary


def main() -> int:
    if run_child(child):
        return 0
    parser = arguments(__doc__)
    vllm_kinds.add_arguments(parser, ("base", "kvbm"))
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="requests at once (64)")
    parser.add_argument("--inputs", type=int, default=2048, metavar="N", help="tokens of a prompt (2048)")
    parser.add_argument("--outputs", type=int, default=128, metavar="N", help="tokens to decode (128)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="measured rounds, after one to warm up (7)")
    parser.add_argument("--mode", choices=("eager", "graphs"), default="graphs", help="with CUDA graphs, or eager")
    options = parser.parse_args()
    if min(options.requests, options.inputs, options.outputs, options.repeats) < 1:
        parser.error("--requests, --inputs, --outputs and --repeats take at least 1")
    vllm_kinds.check(options)
    names = ("kinds", "requests", "inputs", "outputs", "repeats", "mode", "dry")
    settings = {name: getattr(options, name) for name in names}
    record = Record("throughput", {**settings, "model": vllm_kinds.shape_of(options.dry).name}, options.json)
    wait_for_memory()
    try:
        with contextlib.ExitStack() as stack:
            engines: dict[str, Child] = {}
            # One after the other: an engine that measures free memory must not meet one that is taking it.
            for kind in options.kinds:
                task = {**settings, "kind": kind, "models": str(options.models)}
                engines[kind] = stack.enter_context(Child(__file__, task, kind))
                if engines[kind].receive(options.limit) is None:
                    raise ChildError(f"{kind} ended before it was ready")
            order = list(engines)
            for number in range(options.repeats + 1):
                for kind in order:
                    engines[kind].send({"seed": 1000 + number})
                    row = engines[kind].receive(options.limit)
                    if row is None:
                        raise ChildError(f"{kind} ended in round {number}")
                    record.add({"kind": kind, "round": number, **row})
                    rate = (row["made"] + row["computed"]) / row["s"]
                    print(f"round {number}  {kind:<8}{row['s']:>9.3f} s{rate:>11.0f} tokens/s", flush=True)
                order = order[1:] + order[:1]
    except ChildError as error:
        record.add({"what": "failed", "why": str(error)})
        print(error, file=sys.stderr)
        return 1
    for line in summarise(record.rows):
        print(f"median   {line['kind']:<8}{line['s']:>9.3f} s{line['tokens_per_s']:>11.0f} tokens/s", end="")
        print(f"{line['change_percent']:>+8.2f} % against {options.kinds[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
