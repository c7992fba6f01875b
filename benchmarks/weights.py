"""How long it takes to fingerprint the weights that an engine has loaded (`kvbm.engines.weights`).

    python benchmarks/weights.py [--device cuda] [--gb 16] [--check] [--json FILE]

The weights are random numbers in tensors of a model's shapes: matrices of 117 MB (a projection of Qwen3-8B in 16 bits)
and as many vectors of 8 kB. An engine pays this once, at its start, where something it keeps outlives it. Needs no
engine. On a GPU the first round is left out: it loads kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from statistics import median

import torch

from kvbm.engines.weights import Named, digest_of

MATRIX = (14_336, 4_096)
VECTOR = (4_096,)
MAX_SECONDS = 0.5  # for 16 GB on a GPU
MAX_TEMPORARY = 64 << 20  # bytes: an engine has claimed nearly all of a GPU's memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gb", type=float, default=16.0, help="size of the weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="fail if a GPU takes too long, or too much memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures there")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch finds no GPU here")
        return 2

    named = make(options.device, options.gb)
    size = sum(tensor.nbytes for each in named for tensor in each.parts)
    seconds, digests, temporary = [], set(), 0
    for _ in range(options.rounds + 1):
        if options.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        began = time.perf_counter()
        digests.add(digest_of(named))
        seconds.append(time.perf_counter() - began)
        if options.device == "cuda":
            temporary = max(temporary, torch.cuda.max_memory_allocated() - before)
    seconds = seconds[1:]
    figures = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else f"cpu, {os.cpu_count()} cores",
        "gb": round(size / 1e9, 3),
        "tensors": len(named),
        "seconds": round(median(seconds), 4),
        "gb_per_second": round(size / 1e9 / median(seconds), 2),
        "temporary_mib": round(temporary / 2**20, 1),
    }
    print(
        "{device}: {gb} GB in {tensors} tensors hashed in {seconds} s, {gb_per_second} GB/s, {temporary_mib} MiB of "
        "temporary memory".format(**figures)
    )
    if options.json:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
        options.json.write_text(
            json.dumps({"machine": machine, "rounds": options.rounds, "figures": figures}, indent=2) + "\n"
        )
    if len(digests) != 1:
        print("the digest of the same weights was not the same every time")
        return 1
    slow = figures["seconds"] > MAX_SECONDS * max(1.0, size / 16e9)
    if options.check and options.device == "cuda" and (slow or temporary > MAX_TEMPORARY):
        print(f"more than {MAX_SECONDS} s for 16 GB, or more than {MAX_TEMPORARY >> 20} MiB")
        return 1
    return 0


def make(device: str, gigabytes: float) -> list[Named]:
    """At least one matrix. Random bits: 16 of them may be any number, and it does not matter here which."""
    found = []
    each = 2 * MATRIX[0] * MATRIX[1]
    for number in range(max(1, round(gigabytes * 1e9 / each))):
        for name, shape in (("matrix", MATRIX), ("vector", VECTOR)):
            bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)
            found.append(Named(f"layers.{number}.{name}", [bits.view(torch.bfloat16)]))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
