"""Runs the same requests with and without a connector and compares the answers, byte for byte of KV behind them.

On a machine with a GPU::

    PYTHONPATH=src:tests/engines python -m trtllm_sim --device cuda --cuda-graphs
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_sim.api import GENERATIONS
from trtllm_sim.executor import Options
from trtllm_sim.launch import KVBM, differences, run
from trtllm_sim.workload import Work


def main() -> int:
    parser = argparse.ArgumentParser("trtllm_sim", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N; all ranks share it")
    parser.add_argument("--cuda-graphs", action="store_true", help="replay decode steps from a CUDA graph")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--cancel", type=float, default=0.2, help="share of the requests that are cancelled")
    parser.add_argument("--seeds", type=int, default=1, help="how many different workloads")
    parser.add_argument("--generations", default=",".join(GENERATIONS), help="of the connector interface")
    parser.add_argument("--config", type=Path, help="YAML with kv_connector_config; KVBM's own by default")
    parser.add_argument("--host-blocks", type=int, default=120, help="of KVBM's host tier")
    parser.add_argument("--layers", type=int, default=Options.layers)
    parser.add_argument("--block-size", type=int, default=Options.block_size)
    parser.add_argument("--width", type=int, default=Options.width, help="bytes of K, and of V, a token and layer")
    parser.add_argument("--disk", type=Path, help="a directory for KVBM's disk tier, under a small host tier")
    parser.add_argument("--faults", default="", help="KVBM_INJECT_FAULTS of a further run")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one run")
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    args = parser.parse_args()

    options = Options(
        ranks=args.ranks, device=args.device, cuda_graphs=args.cuda_graphs, layers=args.layers,
        block_size=args.block_size, width=args.width,
    )  # fmt: skip
    connector = KVBM
    if args.config is not None:
        import yaml

        connector = yaml.safe_load(args.config.read_text())["kv_connector_config"]
    results: list[dict[str, Any]] = []
    for seed in range(1, args.seeds + 1):
        work = Work(requests=args.requests, cancel=args.cancel, seed=seed)
        expected = run(replace(options, env={}), work, args.timeout)
        control = run(replace(options, env={}, corrupt=(args.ranks - 1, 20)), work, args.timeout)
        results.append(_verdict("control: one bit flipped", seed, expected, control, same=False))
        for name, change in _cases(args):
            # Blocks so small are sooner computed than loaded; what is loaded here is loaded to be looked at.
            env = {"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(args.host_blocks), "KVBM_LOAD": "always"}
            if args.disk is not None:
                env.update(_disk(args.disk, args.host_blocks))
            env.update(change.pop("env", {}))
            found = run(replace(options, connector=connector, env=env, **change), work, args.timeout)
            results.append(_verdict(name, seed, expected, found))
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    failed = [result for result in results if not result["ok"]]
    print(f"{len(results) - len(failed)} of {len(results)} runs as expected")
    return 1 if failed else 0


def _disk(directory: Path, host_blocks: int) -> dict[str, str]:
    return {
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(max(1, host_blocks // 3)),
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": str(8 * host_blocks),
        "DYN_KVBM_DISK_CACHE_DIR": str(directory),
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "1",
    }


def _cases(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    cases: list[tuple[str, dict[str, Any]]] = []
    for generation in args.generations.split(","):
        for overlap in (True, False):
            name = f"interface {generation}, {'overlapping' if overlap else 'plain'} steps"
            cases.append((name, {"generation": generation, "overlap": overlap}))
    cases.append(("whole prompts", {"chunked": False}))
    cases.append(("partial reuse", {"partial_reuse": True}))
    last = args.ranks - 1
    for name, faults in (
        ("failing loads", f"load:rank={last}:every=7"),
        ("failing stores", f"store:rank={last}:every=5"),
        ("late loads", "slow:every=3"),
        ("late stores", "slow-store:every=2"),
        ("as asked", args.faults),
    ):
        if faults:
            cases.append((name, {"env": {"KVBM_INJECT_FAULTS": faults}}))
    return cases


def _verdict(
    name: str, seed: int, expected: dict[str, Any], found: dict[str, Any], same: bool = True
) -> dict[str, Any]:
    different = differences(expected, found)
    leaked = found["blocks"] - found["free_blocks"]
    kvbm = found["kvbm"]
    if kvbm is not None:
        leaked += kvbm["pinned"] + kvbm["writing"] + kvbm["requests"] + kvbm["offers"] + kvbm["set_backs"]
    ok = (not different) == same and not leaked
    counts = None if kvbm is None else kvbm["counts"]
    line = {
        "run": name,
        "seed": seed,
        "ok": ok,
        "different": len(different),
        "leaked": leaked,
        "requests": len(found["outputs"]),
        "cancelled": len(found["cancelled"]),
        "iterations": found["iterations"],
        "graph_replays": found["replays"],
        "seconds": round(found["seconds"], 2),
        "loads": len(found["loaded_requests"]),
        "onboarded_blocks": 0 if counts is None else sum(counts.onboarded_blocks.values()),
        "offloaded_blocks": 0 if counts is None else counts.offloaded_blocks,
        "failed_load_blocks": 0 if counts is None else counts.failed_load_blocks,
    }
    print(("ok    " if ok else "WRONG ") + ", ".join(f"{key} {value}" for key, value in line.items() if key != "ok"))
    for difference in different[:5] if same else []:
        print("   ", difference)
    sys.stdout.flush()
    return line


if __name__ == "__main__":
    sys.exit(main())
