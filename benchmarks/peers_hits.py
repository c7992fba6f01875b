"""Time to first token of a prompt from a neighbour's host memory, and of the same prompt from the engine's own.

    python benchmarks/peers_hits.py [--prompts 8] [--rounds 3] [--check] [--json FILE]

Two real vLLMs on the CPU, with a model whose KV takes 49 kB a token. Engine A computes the prompts, then rests. Engine
B answers each of them three ways, one after the other: from A (after it has forgotten the prompt and that A has it),
from its own host memory, and from vLLM's prefix cache. Every answer must have A's tokens. In the first round A's server
reads each block for its checksum; later rounds find the checksums.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "scripts", "tests/engines/vllm", "tests")]

import driver  # noqa: E402
import warm_start  # noqa: E402
from random_models import Dense, model_folder  # noqa: E402

SHAPE = Dense("qwen3-small-random-bench", 12, 512, 8, 8, 64, 1024, 151936, "float32", 32)
OWN_SHARE = 0.9
TOKENS = 4


def engine(pipe: Any, model: str, run_dir: str, name: str, length: int, blocks: int) -> None:
    """An engine's process: carries out (prompt, what to forget first) until it is told None."""
    os.setsid()
    log = os.open(f"{run_dir}/{name}.txt", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warm_start.ease_processes()
    pages = length // SHAPE.block_size
    scenario = driver.Scenario(
        {"model": model, "max_model_len": length + 64, "num_gpu_blocks_override": 2 * pages + 16,
         "max_num_batched_tokens": 8192},
        {"cpu_cache_override_num_blocks": blocks, "load": "always", "peers_enabled": True, "peer_dir": run_dir,
         "peer_name": name},
    )  # fmt: skip
    peers = scenario.adapter.leader.manager.catalogs["peer"]
    assert peers._server.is_ready.wait(60)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        prompt, forget = order
        if forget != "nothing":
            assert scenario.reset()
        if forget == "everything":
            near = scenario.adapter.leader.manager.near
            near.drop(list(near.findable))
            peers._lookup.clear()
            while not peers._lookup._finder.members():
                time.sleep(0.01)
        read = sum(source[2] for source in scenario.sources())
        began = time.perf_counter()
        scenario.add(["request"], [prompt], TOKENS)
        while not any(output.outputs[0].token_ids for output in scenario.engine.step()):
            pass
        seconds = time.perf_counter() - began
        tokens = scenario.finish()["request"]
        scenario.drain()
        pipe.send((seconds, tokens, sum(source[2] for source in scenario.sources()) - read))
    scenario.close()
    os._exit(0)


class Engine:
    def __init__(self, *arguments: Any) -> None:
        self.pipe, its = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=engine, args=(its, *arguments))
        self._process.start()
        its.close()
        self.pipe.recv()

    def ask(self, prompt: list[int], forget: str) -> tuple[float, list[int], int]:
        self.pipe.send((prompt, forget))
        return self.pipe.recv()

    def close(self) -> None:
        self.pipe.send(None)
        self._process.join()


@contextmanager
def two_engines(length: int, prompts: int) -> Iterator[tuple[Engine, Engine]]:
    model = str(model_folder(SHAPE, Path("~")))
    pages = length // SHAPE.block_size
    with tempfile.TemporaryDirectory(prefix="peers-") as run_dir:
        os.chmod(run_dir, 0o700)
        engines = []
        for name, blocks in ("a", (prompts + 1) * pages), ("b", 2 * pages):
            engines.append(Engine(model, run_dir, name, length, blocks))
        yield engines[0], engines[1]
        for each in engines:
            each.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--check", action="store_true", help=f"exit with 1 below {OWN_SHARE:.0%} of the own speed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    os.environ.update({name: os.environ.get(name, value) for name, value in driver.DEFAULTS.items()})
    warm_start.prepare()
    source, length = random.Random("peers"), options.length
    prompts = [[source.randrange(10, 150_000) for _ in range(length)] for _ in range(options.prompts)]
    ways = {"peer": "everything", "own": "device", "prefix cache": "nothing"}
    times: dict[tuple[str, bool], list[float]] = {}
    with two_engines(length, options.prompts) as (a, b):
        for prompt in prompts:
            a.ask(prompt, "device")
        wanted = [a.ask(prompt, "device")[1] for prompt in prompts]
        b.ask(prompts[0], "everything")
        b.ask(prompts[0], "device")
        for n in range(options.rounds):
            for prompt, tokens in list(zip(prompts, wanted, strict=True))[not n :]:
                for way, forget in ways.items():
                    seconds, found, blocks = b.ask(prompt, forget)
                    assert found == tokens, f"{way}: {found}, and A had {tokens}"
                    assert blocks == (len(prompt) - 1) // SHAPE.block_size * (way == "peer"), (way, blocks)
                    times.setdefault((way, n > 0), []).append(seconds * 1e3)
    print(f"{length} tokens, {length * SHAPE.token_bytes / 1e6:.0f} MB, {os.cpu_count()} cores; ms to the first token")
    for (way, later), found in times.items():
        print(f"{way:14} {'later' if later else 'first'} reads: median {statistics.median(found):6.1f}, "
              f"least {min(found):6.1f}, of {len(found)}")  # fmt: skip
    shares = []  # of the prompts one by one: a busy moment hits both
    for later in (False, True):
        pairs = zip(times["own", later], times["peer", later], strict=True)
        shares.append(statistics.median(own / peer for own, peer in pairs))
    first, more = shares
    print(f"from the neighbour at {first:.0%} of the speed of own hits, later {more:.0%} (promise: {OWN_SHARE:.0%})")
    if options.json:
        about = {"tokens": length, "bytes": length * SHAPE.token_bytes, "cores": os.cpu_count()}
        ms = {f"{way}, {'later' if later else 'first'}": found for (way, later), found in times.items()}
        options.json.write_text(json.dumps({**about, "first_share": first, "later_share": more, "ms": ms}) + "\n")
    return int(options.check and min(shares) < OWN_SHARE)


if __name__ == "__main__":
    raise SystemExit(main())
