"""Agents in a closed loop: contexts of 20,000 to 50,000 tokens that grow with every turn, with a real server.

    python benchmarks/gpu/agents.py --kinds kvbm native base --at-once 1 2 --budget 400 --json results/agents.json

A turn of an agent: what its tool has said, 1,000 to 3,000 tokens, joins the context; the model answers with 100 tokens,
which join it too; the tool works for some seconds. An agent whose context reaches 50,000 tokens ends, and another
begins with 20,000. At the start the agents are spread over these lengths, as they are later on. The engine's own cache
holds a third of all contexts, the host tier all of them.

The kinds are those of qps.py. One that has a host tier needs 91 GB for it, so two of them rarely fit a machine at once:
start each beside those that have none (--at-once 1 2). Kinds are measured one after the other, also where they stand
side by side. Every kind gets the same agents, the same tools' outputs and the same times of work; only the tokens of
the answers are its own. The contexts that agents
start with are computed beforehand and not measured. An agent that begins later has to compute its first turn: those
turns are counted, and left out of the times.

A turn lasts as long as its answer and the tool's work. Where all agents together need more of the GPU's cache than
there is, they also wait for one another: choose --think so that about a third of the agents decode at a time.
"""

from __future__ import annotations

import math
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import qps
import vllm_kinds
from child import Child, ChildError
from records import Record, Row, arguments

from kvbm.bench.client import Answer, Endpoint, Prompt, Sample
from kvbm.bench.results import summarise as summary_of
from kvbm.bench.runner import server_counters

MIN_SECONDS = 10.0  # of a measurement that is worth its start


class Shape(NamedTuple):
    """Lengths in tokens, times in seconds."""

    agents: int
    first: int
    last: int
    least_tool: int
    most_tool: int
    answer: int
    think: float

    @property
    def contexts(self) -> int:
        """All contexts together, at any time."""
        return self.agents * (self.first + self.last) // 2


class Turn(NamedTuple):
    agent: int
    number: int  # 0: all of its context has to be computed
    answer: Answer


class Agent:
    """One place of the loop: an agent, and those that begin after it has ended. ``source`` draws all but answers."""

    def __init__(self, place: int, shape: Shape) -> None:
        self.place = place
        self._shape = shape
        self._source = random.Random(f"agent {place}")
        self._turn = 0
        spread = (shape.last - shape.first) * place // shape.agents
        self.context = vllm_kinds.draw(self._source, shape.first + spread)

    def ask(self, endpoint: Endpoint, epoch: float) -> Turn:
        """The next turn, all but the tool's work."""
        answer = endpoint.ask(Prompt(tokens=self.context), self._shape.answer, self.place, self._turn, epoch)
        turn = Turn(self.place, self._turn, answer)
        self._turn += 1
        # Always the same number, so that every kind's contexts are equally long.
        said = (answer.tokens + vllm_kinds.draw(self._source, self._shape.answer))[: self._shape.answer]
        self.context = [*self.context, *said, *self._tool()]
        if len(self.context) > self._shape.last:
            self.context, self._turn = vllm_kinds.draw(self._source, self._shape.first), 0
        return turn

    def known(self) -> list[int]:
        """The context that is computed beforehand; the tool adds to it."""
        known = self.context
        self.context, self._turn = [*known, *self._tool()], 1
        return known

    def think(self) -> float:
        return self._source.uniform(0.5, 1.5) * self._shape.think

    def _tool(self) -> list[int]:
        return vllm_kinds.draw(self._source, self._source.randint(self._shape.least_tool, self._shape.most_tool))


class Loop:
    """All agents of one kind, each in a thread of its own, until the end."""

    def __init__(self, endpoint: Endpoint, shape: Shape) -> None:
        self._endpoint = endpoint
        self._agents = [Agent(place, shape) for place in range(shape.agents)]
        self.turns: list[Turn] = []

    def fill(self) -> float:
        """Compute the contexts that agents start with; seconds it took."""
        began = time.monotonic()

        def one(agent: Agent) -> str:
            return self._endpoint.ask(Prompt(tokens=agent.known()), 1, agent.place, 0, began).error

        with ThreadPoolExecutor(2) as pool:
            errors = [error for error in pool.map(one, self._agents) if error]
        if errors:
            raise ChildError(f"{len(errors)} of {len(self._agents)} first requests failed: {errors[0]}")
        return time.monotonic() - began

    def run(self, seconds: float, patience: float) -> int:
        """Turns that begin within so many seconds; how many did not end in time."""
        over, epoch = threading.Event(), time.monotonic()

        def live(agent: Agent) -> None:
            while not over.wait(agent.think()):
                self.turns.append(agent.ask(self._endpoint, epoch))

        threads = [threading.Thread(target=live, args=(agent,), daemon=True) for agent in self._agents]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        over.set()
        deadline = time.monotonic() + patience
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in threads)


class Agents(qps.Servers):
    """Every kind once."""

    def __init__(self, options: Any, common: Row, shape: Shape, record: Record, deadline: float) -> None:
        super().__init__(options, common, record, deadline)
        self._shape = shape
        self.extra["return_token_ids"] = True

    def _measure(self, server: qps.Server, end: float) -> None:
        kind, loop = server.kind, Loop(server.endpoint, self._shape)
        server.endpoint.ask(Prompt(tokens=[11] * 200), 16, 0, 0, 0.0)
        took = loop.fill()
        self._record.add({"kind": kind, "what": "fill", "s": round(took, 1)})
        seconds = min(self._options.seconds, end - time.monotonic() - self._options.patience)
        if seconds < min(MIN_SECONDS, self._options.seconds):
            raise ChildError("no time left to measure")
        before = server_counters(server.endpoint)
        unfinished = loop.run(seconds, self._options.patience)
        after = server_counters(server.endpoint)
        counted = {name: after[name] - before.get(name, 0.0) for name in after}
        self._record.add({"kind": kind, "what": "agents", "asked_for": round(seconds, 1),
                          **of_turns(list(loop.turns), unfinished), "server": counted})  # fmt: skip
        print(show(summarise(self._record.rows)[-1]), flush=True)


def of_turns(turns: list[Turn], unfinished: int) -> Row:
    """The figures of a kind. Times to first token are those of turns that come back, gaps of all."""
    samples = [Sample.of(turn.answer) for turn in turns]
    back = [Sample.of(turn.answer) for turn in turns if turn.number]
    every, summary = summary_of(samples, unfinished), summary_of(back)
    row = {name: getattr(every, name) for name in every.__struct_fields__}
    for name in ("ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99", "ttft_max", "cached_percent"):
        row[name] = getattr(summary, name)
    return {
        **row,
        "turns_per_second": every.requests_per_second,
        "first_turns": len(turns) - len(back),
        "ttfts": [round(sample.ttft, 4) for sample in back if sample.ttft is not None and not sample.error],
        "lengths": [sample.prompt_tokens for sample in back if not sample.error],
        "cached": [sample.cached_tokens for sample in back if not sample.error],
    }


def summarise(rows: list[Row]) -> list[Row]:
    """A line for every kind; ``faster`` is against the first."""
    lines = [row for row in rows if row["what"] == "agents"]
    first = lines[0]["ttft_mean"] if lines else None
    return [{**row, "faster": first / row["ttft_mean"] if first and row["ttft_mean"] else None} for row in lines]


COLUMNS = {
    "mean": ("ttft_mean", 3),
    "median": ("ttft_p50", 3),
    "99 %": ("ttft_p99", 3),
    "gap": ("gap_mean", 4),
    "99 % gap": ("gap_p99", 4),
    "turns/s": ("turns_per_second", 2),
    "cached %": ("cached_percent", 0),
    "first": ("first_turns", 0),
    "failed": ("failed", 0),
    "unfinished": ("unfinished", 0),
    "× faster": ("faster", 1),
}
HEADER = f"{'engine':<8}" + "".join(f"{name:>12}" for name in COLUMNS)


def show(line: Row) -> str:
    return f"{line['kind']:<8}" + "".join(f"{cell:>12}" for cell in qps.cells(line, COLUMNS))


def main() -> int:
    parser = arguments(__doc__)
    vllm_kinds.add_arguments(parser)
    parser.add_argument("--agents", type=int, default=16, metavar="N", help="at a time (16)")
    parser.add_argument("--first", type=int, default=20_000, metavar="N", help="tokens an agent begins with (20000)")
    parser.add_argument("--last", type=int, default=50_000, metavar="N", help="tokens at which it ends (50000)")
    parser.add_argument("--tool", type=int, nargs=2, default=[1000, 3000], metavar="N", help="of its tools (1000 3000)")
    parser.add_argument("--answer", type=int, default=100, metavar="N", help="tokens of an answer (100)")
    parser.add_argument("--think", type=float, default=4, metavar="S", help="a tool's work, half as long or half again")
    parser.add_argument("--seconds", type=float, default=75, metavar="S", help="of a kind, at most (75)")
    parser.add_argument("--patience", type=float, default=10, metavar="S", help="to wait for the last answers (10)")
    parser.add_argument("--cache-tokens", type=int, metavar="N", help="of the engine's own cache (a third of all)")
    parser.add_argument("--gb", type=float, metavar="GB", help="size of the host tier (all contexts and a tenth)")
    parser.add_argument("--at-once", **qps.AT_ONCE)
    parser.add_argument("--budget", type=float, metavar="S", help="seconds for everything (no limit)")
    parser.add_argument("--mode", choices=vllm_kinds.MODES, default="decode-graphs", help="as suite.py's")
    began = time.monotonic()
    options = parser.parse_args()
    # Whoever ends this ends the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    least = min(options.agents, options.answer, *options.at_once, *options.tool)
    if least < 1 or not 0 < options.first < options.last or options.tool[0] > options.tool[1]:
        parser.error("--agents, --answer, --at-once and --tool take at least 1, --first less than --last")
    if min(options.seconds, options.think, 1 if options.budget is None else options.budget) <= 0:
        parser.error("--seconds, --think and --budget take more than 0")
    vllm_kinds.check(options)
    if options.dry:
        dry = {"agents": 4, "first": 200, "last": 500, "tool": [20, 60], "answer": 8, "think": 0.3, "seconds": 4}
        vars(options).update(dry, mode="eager")
    shape = Shape(options.agents, options.first, options.last, *options.tool, options.answer, options.think)
    model = vllm_kinds.shape_of(options.dry)
    # Contexts are computed beforehand up to the last length; the first tool adds to that.
    length = shape.last + shape.most_tool + shape.answer + 64
    if options.cache_tokens is None:
        # Room for the longest context in any case.
        options.cache_tokens = max(shape.contexts // 3, length + 4 * model.block_size)
    if options.gb is None:
        options.gb = 1.1 * shape.contexts * model.token_bytes / 1e9
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "models", "limit")}
    record = Record("agents", {**settings, "model": model.name}, options.json)
    common = {"models": str(options.models), "dry": options.dry, "mode": options.mode, "gigabytes": options.gb}
    common |= {"cache_tokens": options.cache_tokens, "length": length}
    with Child(qps.__file__, {"kind": "prepare", **common}, "prepare") as running:
        for row in running.rows(options.limit):
            record.add(row)
    print(HEADER, flush=True)
    deadline = began + options.budget - qps.END if options.budget is not None else math.inf
    agents = Agents(options, common, shape, record, deadline)
    agents.run()
    print("\n" + HEADER)
    for line in summarise(record.rows):
        print(show(line))
    return 1 if agents.failures else 0


if __name__ == "__main__":
    sys.exit(main())
