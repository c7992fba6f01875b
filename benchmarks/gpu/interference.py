"""What requests that decode notice of a long prompt which is brought back beside them.

    python benchmarks/gpu/interference.py --json results/interference.json

Sixteen requests decode. Every now and then a prompt of 32k tokens returns that the GPU has forgotten, and is over with
its first token. Compared are the times between tokens of the sixteen while it is on its way (`with`, until one step
after its first token) and in the steps just before it came (`without`, as many as those after). The times are taken in
the engine, where vLLM says them; so what the front end does with 32k tokens does not count.

With vLLM alone the prompt is computed anew beside the others: that is what all are compared with.

Right after it has been brought back the same prompt comes once more, its blocks still on the GPU. Then nothing is
copied, and what the others notice (`on the GPU`) is vLLM's own work for a prompt of that length: taking in its tokens,
giving it its blocks. Both times its first token should be the same (`same`), unless two are as likely as each other.

The 99th percentile of a dozen steps is their worst. `stretch` is that of all quiet steps before a prompt and of those
it takes, against the quiet ones alone: what one such prompt does to somebody who gets 250 tokens meanwhile.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import vllm_kinds
from child import Child, ChildError, Emit, run_child, wait_for_memory
from records import Record, Row, arguments, percentile

SHORT_PROMPT = 512
GUESTS = 3  # prompts that return in turn


class Stepper:
    """Steps an engine and keeps the time of every token of every request."""

    def __init__(self, engine: Any, now: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._now = now
        self.times: dict[str, list[float]] = {}
        self.cached: dict[str, int | None] = {}  # tokens that were not computed
        self.tokens: dict[str, list[int]] = {}

    def add(self, name: str, tokens: vllm_kinds.Tokens, count: int) -> None:
        from vllm.sampling_params import RequestOutputKind

        parameters = vllm_kinds.greedy(count, output_kind=RequestOutputKind.DELTA)
        self.times[name] = []
        self._engine.add_request(name, vllm_kinds.as_prompt(tokens), parameters)

    def step(self) -> set[str]:
        """Names of the requests that got tokens."""
        seen = set()
        for output in self._engine.step():
            if not output.outputs[0].token_ids:
                continue
            # The engine's clock where it tells: its process may have been done long before this one looked.
            metrics = getattr(output, "metrics", None)
            self.times[output.request_id].append(getattr(metrics, "last_token_ts", 0.0) or self._now())
            self.cached[output.request_id] = output.num_cached_tokens
            self.tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
            seen.add(output.request_id)
        return seen

    def step_until(self, over: Callable[[], bool], limit: float) -> None:
        deadline = self._now() + limit
        while not over():
            if self._now() > deadline:
                raise TimeoutError(f"the engine did not get there within {limit:.0f} s")
            self.step()


def gaps(times: dict[str, list[float]], since: float, until: float) -> list[float]:
    """Milliseconds between tokens, of all requests together, where the later one came in (since, until]."""
    return [
        (later - earlier) * 1e3
        for tokens in times.values()
        for earlier, later in pairwise(tokens)
        if since < later <= until
    ]


def forget(llm: Any, source: random.Random) -> None:
    """Empty vLLM's prefix cache. A connector may still hold blocks that it is copying: a few more steps see to that."""
    for _ in range(50):
        if llm.reset_prefix_cache():
            return
        llm.generate(vllm_kinds.as_prompt(vllm_kinds.draw(source, 8)), vllm_kinds.greedy(4), use_tqdm=False)
    raise RuntimeError("vLLM does not let go of its prefix cache: some blocks are still in use")


def decoded_tokens(task: Row) -> int:
    """Of each request that decodes: more than the whole run takes."""
    return 2 * (task["rounds"] + 2) * (task["quiet"] + 40)


def child(task: Row, emit: Emit) -> None:
    shape = vllm_kinds.shape_of(task["dry"])
    length, others, decoded = task["length"], task["others"], decoded_tokens(task)
    short = min(SHORT_PROMPT, length)
    decoding_tokens = others * (short + decoded)
    llm = vllm_kinds.open_engine(
        task["kind"],
        model=vllm_kinds.model_folder(shape, Path(task["models"])),
        dry=task["dry"],
        mode=task["mode"],
        gigabytes=1.1 * ((GUESTS + 2) * length + decoding_tokens) * shape.token_bytes / 1e9,
        length=max(length, short + decoded) + 256,
        # Room for what runs at a time and less than one prompt more: when a prompt returns, those that came since have
        # taken all of its blocks.
        blocks=int(decoding_tokens + 1.25 * length) // shape.block_size + others,
        disable_log_stats=False,  # for the engine's own times
    )
    watch(llm, {**task, "guests": GUESTS}, emit)


def watch(llm: Any, task: Row, emit: Emit) -> None:
    """Sixteen that decode, and guests that come and go: more of them than the GPU has room for."""
    length, others, rounds, quiet = task["length"], task["others"], task["rounds"], task["quiet"]
    short, decoded = min(SHORT_PROMPT, length), decoded_tokens(task)
    source = random.Random(11)
    prompts = [vllm_kinds.draw(source, length) for _ in range(task["guests"])]
    for prompt in prompts:
        llm.generate(vllm_kinds.as_prompt(prompt), vllm_kinds.greedy(1), use_tqdm=False)
    forget(llm, source)
    stepper = Stepper(llm.llm_engine)
    decoding = [f"decode-{i}" for i in range(others)]
    for name in decoding:
        stepper.add(name, vllm_kinds.draw(source, short), decoded)

    def length_of(name: str) -> int:
        return len(stepper.times[name])

    stepper.step_until(lambda: all(length_of(name) >= 8 for name in decoding), task["limit"])

    def come(guest: str, prompt: vllm_kinds.Tokens) -> Row:
        """Let a prompt come after some quiet steps, and see what the others notice."""
        before = stepper.times[decoding[0]][-1]
        target = length_of(decoding[0]) + quiet
        stepper.step_until(lambda: length_of(decoding[0]) >= target, task["limit"])
        came = max(stepper.times[name][-1] for name in decoding)
        added = time.perf_counter()
        stepper.add(guest, prompt, 1)
        stepper.step_until(lambda: length_of(guest) > 0, task["limit"])
        ttft = (time.perf_counter() - added) * 1e3
        first = stepper.times.pop(guest)[0]
        after = length_of(decoding[0]) + 1
        stepper.step_until(lambda: length_of(decoding[0]) >= after, task["limit"])
        left = max(stepper.times[name][-1] for name in decoding)
        ours = {name: stepper.times[name] for name in decoding}
        during = gaps(ours, came, left)
        steps = max(1, round(len(during) / others))
        start = [at for at in stepper.times[decoding[0]] if at <= came][-(steps + 1) :][0]
        return {
            "cached": stepper.cached[guest],
            "token": stepper.tokens.pop(guest)[0],
            "ttft_ms": round(ttft, 3),
            "engine_ms": round((first - came) * 1e3, 3),
            "with_ms": [round(gap, 3) for gap in during],
            "without_ms": [round(gap, 3) for gap in gaps(ours, start, came)],
            "steps_ms": [round(gap, 3) for gap in gaps({"": stepper.times[decoding[0]]}, came, left)],
            "quiet_steps_ms": [round(gap, 3) for gap in gaps({"": stepper.times[decoding[0]]}, before, came)],
        }

    # The first return in an engine's life is not measured: it compiles what is left to compile.
    for number in range(rounds + 1):
        for what in ("onboarding", "on the GPU"):
            row = come(f"{what} {number}", prompts[number % len(prompts)])
            if number:
                emit({"what": what, "round": task.get("first", 0) + number, **row})
    llm.llm_engine.abort_request(decoding)


def summarise(rows: list[Row]) -> list[Row]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["mode"], row["kind"]), []).append(row)
    summary = []
    for (mode, kind), group in groups.items():
        line: Row = {"mode": mode, "kind": kind}
        line["failed"] = next((row["why"] for row in group if row["what"] == "failed"), None)
        rounds = [row for row in group if row["what"] == "onboarding"]
        line["rounds"] = len(rounds)
        line["cached"] = percentile([row["cached"] for row in rounds], 50) if rounds else None
        line["ttft_ms"] = percentile([row["ttft_ms"] for row in rounds], 50) if rounds else None
        for when in ("with", "without"):
            values = [gap for row in rounds for gap in row[f"{when}_ms"]]
            line[f"{when}_gaps"] = len(values)
            for name, percent in (("p50", 50), ("p99", 99), ("max", 100)):
                line[f"{when}_{name}_ms"] = percentile(values, percent) if values else None
        own = [row for row in group if row["what"] == "on the GPU"]
        values = [gap for row in own for gap in row["with_ms"]]
        line["on_gpu_p99_ms"] = percentile(values, 99) if values else None
        line["on_gpu_cached"] = percentile([row["cached"] for row in own], 50) if own else None
        kept = {row["round"]: row["token"] for row in own if "token" in row}
        pairs = [(row["token"], kept[row["round"]]) for row in rounds if "token" in row and row["round"] in kept]
        line["same"] = f"{sum(one == other for one, other in pairs)} of {len(pairs)}" if pairs else None
        both = (line["with_p99_ms"], line["without_p99_ms"])
        line["p99_raised_percent"] = (both[0] / both[1] - 1) * 100 if all(both) else None
        for name, some in (("", rounds), ("on_gpu_", own)):
            line[f"{name}stretch_raised_percent"] = _raised_over_a_stretch(some)
        summary.append(line)
    return summary


def _raised_over_a_stretch(rounds: list[Row]) -> float | None:
    """By how many per cent one return raises the p99 of a stretch of steps: those before it and those it takes."""
    with_it = [percentile(row["quiet_steps_ms"] + row["steps_ms"], 99) for row in rounds if "steps_ms" in row]
    without = [percentile(row["quiet_steps_ms"], 99) for row in rounds if "steps_ms" in row]
    return (percentile(with_it, 50) / percentile(without, 50) - 1) * 100 if with_it else None


_COLUMNS = (
    "p50 without",
    "p50 with",
    "p99 without",
    "p99 on GPU",
    "p99 with",
    "max with",
    "p99 raised",
    "stretch",
    "on GPU",
    "TTFT",
    "same",
)
HEADER = f"{'mode':<14}{'engine':<8}" + "".join(f"{name:>12}" for name in _COLUMNS)


def show(line: Row) -> str:
    if line["failed"]:
        return f"{line['mode']:<14}{line['kind']:<8} failed: {line['failed'].splitlines()[0]}"
    names = (
        "without_p50_ms",
        "with_p50_ms",
        "without_p99_ms",
        "on_gpu_p99_ms",
        "with_p99_ms",
        "with_max_ms",
        "p99_raised_percent",
        "stretch_raised_percent",
        "on_gpu_stretch_raised_percent",
        "ttft_ms",
    )
    cells = [
        f"{line[name]:.1f}" + (" %" if name.endswith("percent") else "") if line[name] is not None else "-"
        for name in names
    ]
    cells.append(line["same"] or "-")
    return f"{line['mode']:<14}{line['kind']:<8}" + "".join(f"{cell:>12}" for cell in cells)


def main() -> int:
    if run_child(child):
        return 0
    parser = arguments(__doc__)
    vllm_kinds.add_arguments(parser)
    parser.add_argument(
        "--length", type=int, default=32768, metavar="N", help="tokens of the prompt that returns (32768)"
    )
    parser.add_argument("--others", type=int, default=16, metavar="N", help="requests that decode (16)")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="how often a prompt returns (8)")
    parser.add_argument("--quiet", type=int, default=240, metavar="N", help="steps without it before each (240)")
    parser.add_argument(
        "--modes", nargs="+", choices=("eager", "graphs"), default=["graphs"], help="with CUDA graphs, or eager"
    )
    options = parser.parse_args()
    if min(options.others, options.rounds, options.quiet) < 1 or options.length < 64:
        parser.error("--others, --rounds and --quiet take at least 1, --length at least 64")
    vllm_kinds.check(options)
    names = ("kinds", "length", "others", "rounds", "quiet", "modes", "dry")
    settings = {name: getattr(options, name) for name in names}
    record = Record("interference", {**settings, "model": vllm_kinds.shape_of(options.dry).name}, options.json)
    failures = 0
    print(HEADER, flush=True)
    for mode in options.modes:
        for kind in options.kinds:
            what = {"kind": kind, "mode": mode}
            task = {**settings, **what, "models": str(options.models), "limit": options.limit}
            wait_for_memory()
            try:
                with Child(__file__, task, kind) as running:
                    for row in running.rows(options.limit):
                        record.add({**what, **row})
            except ChildError as error:
                failures += 1
                record.add({**what, "what": "failed", "why": str(error)})
                print(error, file=sys.stderr)
            lines = summarise(record.rows)
            if lines:
                print(show(lines[-1]), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
