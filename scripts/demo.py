#!/usr/bin/env python3
"""Compare the same conversations with vLLM alone and with vLLM and KVBM, on this machine's CPU.

    python scripts/demo.py --out demo-results          # what `make demo` does, after it has made the environment

Several users, each with a long text of their own, take turns. Together they need more KV cache than the engine has, so
the engine evicts a user's blocks before that user's next turn. vLLM alone computes the whole conversation again; with
KVBM it loads the blocks from host memory. Both servers get the same prompts in the same order, one request at a time.

The status is 0 only if every answer had the same tokens in both runs, blocks were loaded from host memory, and the
first token of a later turn came at least four times sooner than by computing it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import models
from serve import BLOCK_SIZE, ENGINE_BLOCKS, Server, ServerError, leave_on_signals, sample_request

import kvbm

MAX_TOKENS = 16
REQUIRED_SPEED_UP = 4.0
QUESTIONS = (
    "Which of the guests would you like to meet, and why?",
    "Who stayed for the shortest time?",
    "What did the guests say about the weather?",
    "Write one sentence for the next entry.",
)
# Kinds of requests as the tables name them, in the order of a conversation.
FIRST, NEXT, AGAIN = "first turn", "next turn", "same again"
MEANING = {
    FIRST: "computed in both (cold)",
    NEXT: "evicted by the engine: computed / host hit",
    AGAIN: "engine hit in both",
}


@dataclass(frozen=True)
class Exchange:
    """One request and its answer."""

    user: int
    turn: int
    kind: str
    messages: list[dict[str, str]]
    ttft_s: float  # from just before the request to the first text that is not empty
    text: str
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int  # of the prompt: found by the engine or loaded by KVBM


@dataclass(frozen=True)
class Run:
    exchanges: list[Exchange]
    offloaded_blocks: float
    onboarded_blocks: float
    preemptions: float

    def ttfts(self, kind: str) -> list[float]:
        return [exchange.ttft_s for exchange in self.exchanges if exchange.kind == kind]

    def median(self, kind: str) -> float:
        return statistics.median(self.ttfts(kind))


def guest_book(user: int) -> str:
    """About 650 tokens that no other user shares, the same in every run."""
    chance = random.Random(user)
    names = ["Ada", "Bruno", "Chidi", "Dolores", "Emre", "Freya", "Goran", "Hana", "Ines", "Jonas", "Kavya", "Liam"]
    towns = ["Bergen", "Cusco", "Dakar", "Esfahan", "Galway", "Hobart", "Kyoto", "Lviv", "Mombasa", "Porto", "Quito"]
    skies = ["rain all day", "fog until noon", "a clear sky", "snow on the pass", "a warm wind", "thunder at night"]
    # The number comes first: all users would share the blocks of a common prefix.
    lines = [f"Hut {user + 1}: the guest book."]
    for entry in range(1, 25):
        name, town, sky = chance.choice(names), chance.choice(towns), chance.choice(skies)
        lines.append(f"{entry}. {name} from {town} stayed {chance.randint(1, 9)} nights, saw {sky}, paid {entry * 7}.")
    return "\n".join(lines)


def ask(server: Server, user: int, turn: int, kind: str, messages: list[dict[str, str]]) -> Exchange:
    body = {
        "model": server.name,
        "messages": messages,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    started = time.perf_counter()
    ttft = 0.0
    text = ""
    token_ids: list[int] = []
    usage: dict[str, Any] = {}
    with server.post("/v1/chat/completions", body) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise server.failure(f"the answer broke off: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                token_ids += choice.get("token_ids") or []
            if text and not ttft:
                ttft = time.perf_counter() - started
    ttft = ttft or time.perf_counter() - started  # an answer without text: time its end
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    exchange = Exchange(user, turn, kind, messages, ttft, text, token_ids, usage["prompt_tokens"], cached)
    print(
        f"  user {user + 1}, {f'turn {turn + 1}' if kind != AGAIN else kind:10}  first token after {ttft:5.2f} s"
        f"   {cached:4} of {exchange.prompt_tokens} prompt tokens from a cache",
        flush=True,
    )
    return exchange


def converse(server: Server, users: int, turns: int) -> list[Exchange]:
    """The users take turns. Each conversation contains the answers of this server."""
    exchanges = []
    histories: list[list[dict[str, str]]] = [[] for _ in range(users)]
    for turn in range(turns):
        for user, history in enumerate(histories):
            question = QUESTIONS[turn % len(QUESTIONS)]
            content = f"{guest_book(user)}\n\n{question}" if turn == 0 else question
            history.append({"role": "user", "content": content})
            exchange = ask(server, user, turn, FIRST if turn == 0 else NEXT, list(history))
            exchanges.append(exchange)
            if turn == turns - 1:  # the best case, for comparison: no other request in between
                exchanges.append(ask(server, user, turn, AGAIN, list(history)))
            history.append({"role": "assistant", "content": exchange.text})
    return exchanges


def replay(server: Server, script: list[Exchange]) -> list[Exchange]:
    return [ask(server, step.user, step.turn, step.kind, step.messages) for step in script]


def measure(server: Server, exchanges: list[Exchange]) -> Run:
    return Run(
        exchanges,
        offloaded_blocks=server.counter("kvbm_offload_blocks_d2h"),
        onboarded_blocks=server.counter("kvbm_onboard_blocks_h2d"),
        preemptions=server.counter("vllm:num_preemptions"),
    )


def send_sample(server: Server) -> str:
    """The first request of a fresh server, also its warm-up: it is not measured."""
    with server.post("/v1/chat/completions", sample_request(server.name)) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def answers_that_differ(alone: Run, cached: Run) -> list[str]:
    """Reasons why the demonstration has failed. Compares token ids if the server returns them, else the text."""
    return [
        f"user {a.user + 1}, turn {a.turn + 1} ({a.kind}): {a.text!r} alone, {b.text!r} with KVBM"
        for a, b in zip(alone.exchanges, cached.exchanges, strict=True)
        if (a.token_ids, a.text) != (b.token_ids, b.text)
    ]


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, no GPU used"


def versions() -> str:
    engine = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("vllm", "torch"))
    return f"kvbm {kvbm.__version__}, {engine}"


def print_table(alone: Run, cached: Run, equal: int) -> None:
    total = len(alone.exchanges)
    print(f"\nTime to first token, median\n\n  {'':12}{'vLLM alone':>12}{'with KVBM':>12}{'ratio':>9}{'n':>5}")
    for kind in (FIRST, NEXT, AGAIN):
        a, b = alone.median(kind), cached.median(kind)
        n = len(cached.ttfts(kind))
        print(f"  {kind:12}{a:10.2f} s{b:10.2f} s{a / b:8.1f}x{n:5}   {MEANING[kind]}")
    print(
        f"\n  blocks offloaded to host memory    {cached.offloaded_blocks:6.0f}   ({BLOCK_SIZE} tokens each)"
        f"\n  blocks onboarded from host memory  {cached.onboarded_blocks:6.0f}"
        f"\n  answers with the same tokens       {equal:6} of {total}"
        f"\n  preemptions, alone / with KVBM     {alone.preemptions:6.0f} / {cached.preemptions:.0f}\n"
    )


def save_json(path: Path, alone: Run, cached: Run, settings: dict[str, object]) -> None:
    summary = {
        kind: {"alone_s": alone.median(kind), "kvbm_s": cached.median(kind), "n": len(cached.ttfts(kind))}
        for kind in (FIRST, NEXT, AGAIN)
    }
    report = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": settings,
        "median_ttft": summary,
        "alone": asdict(alone),
        "kvbm": asdict(cached),
    }
    path.write_text(json.dumps(report, indent=1))


def save_plot(path: Path, alone: Run, cached: Run, model: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    grey, blue = "#8c8c8c", "#0072b2"  # told apart by colour-blind readers and in print
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.2), width_ratios=(3, 2))
    for run, label, colour, marker in ((alone, "vLLM alone", grey, "s"), (cached, "vLLM with KVBM", blue, "o")):
        turns = [e.ttft_s for e in run.exchanges if e.kind != AGAIN]
        left.plot(range(1, len(turns) + 1), turns, color=colour, marker=marker, markersize=5, lw=1, label=label)
    left.axvline(len(cached.ttfts(FIRST)) + 0.5, color="black", lw=0.8, ls=":")
    left.set(title="Every turn, in order", xlabel="request", ylabel="time to first token (s)", ylim=(0, None))
    left.annotate("every user has spoken once", (len(cached.ttfts(FIRST)) + 0.7, 0.4 * left.get_ylim()[1]))
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(loc="center right")

    for offset, run, colour in ((-0.2, alone, grey), (0.2, cached, blue)):
        medians = [run.median(kind) for kind in (FIRST, NEXT, AGAIN)]
        bars = right.bar([x + offset for x in range(3)], medians, width=0.4, color=colour)
        right.bar_label(bars, fmt="%.2f s", padding=2, fontsize=9)
    labels = ["first turn\n(cold)", "next turn\n(computed / host hit)", "same again\n(engine hit)"]
    right.set_xticks(range(3), labels)
    right.set(title="Median", ylabel="time to first token (s)")
    right.margins(y=0.12)

    users = 1 + max(e.user for e in cached.exchanges)
    speed_up = alone.median(NEXT) / cached.median(NEXT)
    figure.suptitle(
        f"{users} conversations that do not fit the engine's cache: first token {speed_up:.1f} times sooner with KVBM"
    )
    figure.text(0.01, 0.01, f"{model}, float32; {versions()}; {machine()}", fontsize=8, color="#444444")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-results"), help="folder of the results and logs")
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cpu-cache-gb", type=float, default=2)
    args = parser.parse_args()
    if args.turns < 2 or args.users < 1:
        parser.error("at least one user and two turns: a first turn has nothing to reuse")
    leave_on_signals()
    try:
        return demonstrate(args.out, args.users, args.turns, args.cpu_cache_gb)
    except ServerError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def demonstrate(out: Path, users: int, turns: int, cpu_cache_gb: float) -> int:
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    model = str(models.smollm2())

    print(f"\n[1/2] vLLM alone: {users} users, {turns} turns each", flush=True)
    with Server(model, out / "server-alone.log", kvbm=False) as server:
        send_sample(server)
        alone = measure(server, converse(server, users, turns))

    print(f"\n[2/2] vLLM with KVBM, {cpu_cache_gb:g} GB of host memory: the same requests", flush=True)
    with Server(model, out / "server-kvbm.log", kvbm=True, cpu_cache_gb=cpu_cache_gb) as server:
        print(f"  a sample request, answered: {send_sample(server)!r}", flush=True)
        cached = measure(server, replay(server, alone.exchanges))
        name = server.name

    differ = answers_that_differ(alone, cached)
    speed_up = alone.median(NEXT) / cached.median(NEXT)
    print_table(alone, cached, len(alone.exchanges) - len(differ))
    settings = {"model": name, "engine_blocks": ENGINE_BLOCKS, "block_size": BLOCK_SIZE, "cpu_cache_gb": cpu_cache_gb}
    save_json(out / "demo.json", alone, cached, settings)
    save_plot(out / "demo.png", alone, cached, name)
    print(f"Results: {out / 'demo.png'} and {out / 'demo.json'}, after {time.monotonic() - started:.0f} s")

    failures = [f"tokens differ: {line}" for line in differ]
    if not cached.onboarded_blocks:
        failures.append("no block was onboarded from host memory")
    if speed_up < REQUIRED_SPEED_UP:
        failures.append(
            f"a host hit was only {speed_up:.1f} times faster than computing ({REQUIRED_SPEED_UP:g} wanted)"
        )
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    if failures:
        print(f"Server logs: {out / 'server-alone.log'}, {out / 'server-kvbm.log'}", file=sys.stderr)
    else:
        print(f"PASSED: next turns start {speed_up:.1f} times sooner, every token the same")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
