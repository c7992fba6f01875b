"""What it takes vLLM to name the blocks of a prompt, its own way and the short one
(`kvbm.engines.vllm.shortcuts.hashing`).

    python benchmarks/hashing.py [--check] [--json FILE]

Both are given the same prompts in turn, each twice: a new prompt, and one that returns. The time is CPU time of a whole
request being made, because that is what comes before anybody can look for its blocks. Needs vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import vllm
import vllm.v1.core.kv_cache_utils as kv_cache_utils
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.request import Request

from kvbm.engines.vllm.shortcuts import hashing

BLOCK = 16
LENGTHS = (8_192, 32_768, 131_072)
VOCABULARY = 150_000
LEAST_SAVED = 0.1  # of the time, with a new prompt
LEAST_SAVED_AGAIN = 0.7


def main() -> int:
    options = given(__doc__)
    kv_cache_utils.init_none_hash(sha256)
    own = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    ways = {"own": own, "short": hashing.quick(own, BLOCK, sha256)}
    figures = []
    for length in LENGTHS:
        times: dict[str, list[float]] = {name: [] for way in ways for name in (way, f"{way}_again")}
        for seed in range(options.rounds):
            source = random.Random(f"{length} {seed}")
            tokens = [source.randrange(VOCABULARY) for _ in range(length)]
            for way, hasher in ways.items():
                for name in (way, f"{way}_again"):
                    began = time.thread_time()
                    Request("request", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
                    times[name].append(1e3 * (time.thread_time() - began))
        row = {"tokens": length, **{f"{name}_ms": round(median(rounds), 3) for name, rounds in times.items()}}
        figures.append(row)
        print(
            "{tokens:>8,} tokens: {own_ms:7.2f} ms vLLM's own way, {short_ms:7.2f} ms the short one, "
            "{short_again_ms:7.2f} ms when the prompt returns".format(**row)
        )
    keep(figures, options)
    limits = (("short_ms", LEAST_SAVED), ("short_again_ms", LEAST_SAVED_AGAIN))
    missed = [row["tokens"] for row in figures for name, least in limits if row[name] > (1 - least) * row["own_ms"]]
    if options.check and missed:
        print(f"too little saved at {', '.join(map(str, missed))} tokens")
        return 1
    return 0


def given(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--check", action="store_true", help="fail if too little is saved")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures there")
    return parser.parse_args()


def keep(figures: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Where they are wanted."""
    if options.json:
        machine = {"python": platform.python_version(), "vllm": vllm.__version__, "cores": os.cpu_count()}
        found = {"machine": machine, "rounds": options.rounds, "figures": figures}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
