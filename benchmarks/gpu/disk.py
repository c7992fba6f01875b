"""Time to first token of a long prompt that only the disk has kept, beside the same prompt cold.

    python benchmarks/gpu/disk.py --json results/disk.json

Two prompts in turn, with host memory for little more than one of them and a disk for both: by a prompt's next turn the
GPU and host memory have dropped it. One engine with KVBM runs every pass, and the choice between loading and computing
is switched in it (`KVBM_LOAD`):

    cold       each prompt for the first time; then, while it is still on the GPU, the tokens that loaded KV has to
               reproduce (`reference`); then all of it goes to disk
    auto       as the cost model decides, which has only measured the disk at start and the cold prompts
    never      found, and computed all the same
    always     loaded, whatever it takes
    auto       as the cost model decides after it has seen loads

An engine without KVBM runs the same prompts (`base`), which is what all are compared with. The limit is for `auto`: the
median of either pass at most 2 % above that of `base`. What was computed has to reproduce the tokens of the cold run,
whose shapes it has; what was loaded, those of `reference`. A load that was given up half way has shapes of its own, and
no tokens to be compared with: its blocks were compared with their checksums. Status 1 when the limit is missed, or a
token is another.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import vllm_kinds
from child import Child, ChildError, Emit, run_child, wait_for_memory
from records import Record, Row, arguments, median

LIMIT = 1.02
TOKENS = 8
HOST_PROMPTS = 1.1
WARM_UP_TOKENS = 1024
PASSES = ("auto", "never", "always", "auto again")


class Engine:
    """vLLM in this process: the loop around its steps is ours, as vLLM's own process for it has one."""

    def __init__(self, llm: Any, kvbm: bool) -> None:
        self._engine = llm.llm_engine
        self._llm = llm
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._adapter = self._scheduler.connector._adapter if kvbm else None
        self._number = 0

    def run(self, tokens: vllm_kinds.Tokens, count: int = TOKENS) -> tuple[Row, list[int]]:
        """({milliseconds to the first token, tokens that were not computed}, tokens) of a prompt."""
        from vllm.sampling_params import RequestOutputKind

        self._number += 1
        parameters = vllm_kinds.greedy(count, output_kind=RequestOutputKind.DELTA)
        made: list[int] = []
        took: Row = {}
        began = time.perf_counter()
        self._engine.add_request(f"{self._number}", vllm_kinds.as_prompt(tokens), parameters)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                made += output.outputs[0].token_ids
                if made and not took:
                    ms = round((time.perf_counter() - began) * 1e3, 3)
                    took = {"ms": ms, "cached": output.num_cached_tokens}
            self._breathe()
        return took, made

    def _breathe(self) -> None:
        """A request that waits for its blocks leaves nothing to step; vLLM lets the threads that bring them run."""
        if not self._scheduler.running:
            time.sleep(0.001)

    def forget(self) -> None:
        """Nothing is left on the GPU."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM does not let go of its prefix cache: some blocks are still in use")

    def choose(self, load: str) -> None:
        """As if the engine had been started with this `KVBM_LOAD`."""
        import msgspec

        session = self._adapter.session
        session._config = msgspec.structs.replace(session._config, load=load)
        self._adapter._cost._load = load

    def settle(self, seconds: float, source: random.Random) -> float:
        """Step until all that is kept lies on disk. Returns the seconds it took."""
        began = time.monotonic()
        deadline = began + seconds
        while self._adapter.leader.busy:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not everything was on disk after {seconds:.0f} s")
            if self._scheduler.has_requests():
                self._engine.step()
                time.sleep(0.001)
            else:
                self.run(vllm_kinds.draw(source, 4), 2)  # a step, and no whole block to keep
        return round(time.monotonic() - began, 3)

    def counts(self) -> Row:
        from kvbm.tiers import disk

        counts, cost = self._adapter.leader.counts, self._adapter._cost
        return {
            "spilled": sum(counts.moved_blocks.values()),
            "passed_over": sum(counts.refused_move_blocks.values()),
            "from_disk": counts.onboarded_blocks.get(disk.TIER.name, 0),
            "given_up": counts.missed_load_blocks,
            "bad": counts.failed_load_blocks,
            "disk_gbps": round(cost.rate(disk.TIER.name).bytes_per_second / 1e9, 3),
            "prefill_tokens_per_s": round(cost.prefill_tokens_per_second),
        }


def child(task: Row, emit: Emit) -> None:
    shape = vllm_kinds.shape_of(task["dry"])
    length, count, kvbm = task["length"], task["count"], task["kind"] == "kvbm"
    prompt_bytes = length * shape.token_bytes
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if kvbm:
        # A little more than there are: the one to warm up is on disk as well.
        os.environ["DYN_KVBM_DISK_CACHE_GB"] = f"{(count + 0.6) * prompt_bytes / 1e9:.6f}"
        os.environ["DYN_KVBM_DISK_CACHE_DIR"] = task["directory"]
        os.environ["DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER"] = "1"
        os.environ["KVBM_MAX_PENDING_SPILLS"] = str(length // shape.block_size)
    began = time.perf_counter()
    llm = vllm_kinds.open_engine(
        task["kind"],
        model=vllm_kinds.model_folder(shape, Path(task["models"])),
        dry=task["dry"],
        mode=task["mode"],
        gigabytes=HOST_PROMPTS * prompt_bytes / 1e9,
        length=length + 256,
        blocks=int(2.5 * length / shape.block_size),
    )
    engine = Engine(llm, kvbm)
    emit({"what": "start", "s": round(time.perf_counter() - began, 2), **(engine.counts() if kvbm else {})})
    source = random.Random(7)
    engine.run(vllm_kinds.draw(source, min(length, WARM_UP_TOKENS)))
    prompts = [vllm_kinds.draw(source, length) for _ in range(count)]
    cold, references = [], []
    for i, prompt in enumerate(prompts):
        if kvbm:
            emit({"what": "settled", "s": engine.settle(task["limit"], source), **engine.counts()})
        engine.forget()
        took, tokens = engine.run(prompt)
        cold.append(tokens)
        emit({"what": "cold", "prompt": i, **took})
        references.append(engine.run(prompt)[1])
    if not kvbm:
        for i, prompt in enumerate(prompts):
            engine.forget()
            emit({"what": "cold", "prompt": i, **engine.run(prompt)[0]})
        return
    emit({"what": "settled", "s": engine.settle(task["limit"], source), **engine.counts()})
    whole = (length - 1) // shape.block_size * shape.block_size
    for what in PASSES:
        engine.choose(what.split()[0])
        for i, prompt in enumerate(prompts):
            engine.forget()
            before = engine.counts()
            took, tokens = engine.run(prompt)
            engine.settle(task["limit"], source)
            after = engine.counts()
            wanted = {0: cold[i], whole: references[i]}.get(took["cached"])
            moved = {name: after[name] - before[name] for name in ("from_disk", "given_up", "bad")}
            same = None if wanted is None else tokens == wanted
            emit({"what": what, "prompt": i, "same": same, **took, **after, **moved})


def summarise(rows: list[Row]) -> list[Row]:
    """A line for each engine and pass. ``ratio`` compares the median with that of the engine without KVBM; where none
    has run, with the cold prompts of the one that has."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "ms" in row:
            groups.setdefault((row["kind"], row["what"]), []).append(row)
    cold = groups.get(("base", "cold")) or groups.get(("kvbm", "cold"), [])
    floor = median(row["ms"] for row in cold) if cold else float("nan")
    summary = []
    for (kind, what), group in groups.items():
        ms = median(row["ms"] for row in group)
        checked = [row["same"] for row in group if row.get("same") is not None]
        summary.append(
            {
                "kind": kind,
                "pass": what,
                "ms": ms,
                "best_ms": min(row["ms"] for row in group),
                "worst_ms": max(row["ms"] for row in group),
                "ratio": ms / floor,
                "from_disk": sum(row.get("from_disk", 0) for row in group),
                "given_up": sum(row.get("given_up", 0) for row in group),
                "same": sum(checked) if checked else None,
                "compared": len(checked) if checked else None,
                "disk_gbps": group[-1].get("disk_gbps"),
            }
        )
    return summary


def verdict(lines: list[Row]) -> list[str]:
    """What is wrong with a result, a sentence each."""
    wrong = [
        f"{line['kind']}, {line['pass']}: only {line['same']} of {line['compared']} answers are the right ones"
        for line in lines
        if line["same"] != line["compared"]
    ]
    wrong += [
        f"{line['pass']}: {line['ratio']:.3f} of the time that the prompt takes cold, and {LIMIT} is the limit"
        for line in lines
        if line["pass"].startswith("auto") and not line["ratio"] <= LIMIT
    ]
    if not any(line["pass"] == "always" and line["from_disk"] for line in lines):
        wrong.append("nothing has come from disk")
    return wrong


COLUMNS = {
    "ms": ("ms", "10.1f"),
    "best": ("best_ms", "10.1f"),
    "worst": ("worst_ms", "10.1f"),
    "ratio": ("ratio", "8.3f"),
    "from disk": ("from_disk", "11"),
    "given up": ("given_up", "10"),
}
HEADER = f"{'engine':<8}{'pass':<12}" + "".join(f"{head:>{form.split('.')[0]}}" for head, (_, form) in COLUMNS.items())


def show(line: Row) -> str:
    cells = "".join(f"{line[name]:>{form}}" for name, form in COLUMNS.values())
    same = "" if line["compared"] is None else f"  {line['same']} of {line['compared']} answers are right"
    return f"{line['kind']:<8}{line['pass']:<12}{cells}{same}"


def main() -> int:
    if run_child(child):
        return 0
    parser = arguments(__doc__)
    vllm_kinds.add_arguments(parser, ("base", "kvbm"))
    parser.add_argument("--length", type=int, default=32768, metavar="N", help="tokens of a prompt (32768)")
    parser.add_argument("--count", type=int, default=2, metavar="N", help="prompts (2); one would stay in host memory")
    parser.add_argument("--mode", choices=("eager", "graphs"), default="eager", help="with CUDA graphs, or eager")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="where to put the disk tier (a folder beside the model)"
    )
    options = parser.parse_args()
    if options.count < 2 or options.length < 64 or "native" in options.kinds:
        parser.error("--count takes at least 2, --length at least 64, and --kinds base and kvbm")
    vllm_kinds.check(options)
    shape = vllm_kinds.shape_of(options.dry)
    names = ("kinds", "length", "count", "mode", "dry")
    settings = {name: getattr(options, name) for name in names}
    record = Record("disk", {**settings, "model": shape.name}, options.json)
    folder = Path(tempfile.mkdtemp(prefix="kvbm-bench-", dir=(options.directory or options.models).expanduser()))
    failed = False
    try:
        for kind in options.kinds:
            task = {**settings, "kind": kind, "models": str(options.models), "directory": str(folder)}
            wait_for_memory()
            with Child(__file__, {**task, "limit": options.limit}, kind) as running:
                for row in running.rows(options.limit):
                    record.add({"kind": kind, **row})
    except ChildError as error:
        failed = True
        record.add({"kind": kind, "what": "failed", "why": str(error)})
        print(error, file=sys.stderr)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lines = summarise(record.rows)
    print(HEADER, *(show(line) for line in lines), sep="\n")
    wrong = verdict(lines) if "kvbm" in options.kinds and not failed else []
    if options.dry:  # of times that mean nothing
        wrong = [text for text in wrong if "limit" not in text]
    for text in wrong:
        print(text, file=sys.stderr)
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
