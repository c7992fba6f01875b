"""Decoding on an engine while a peer reads its host memory over a socket as fast as it can, and while no peer reads.

    python benchmarks/peers_decode.py [--seconds 20] [--pin] [--check] [--gpu DIR] [--json FILE]

Starts a real vLLM in this process, on the CPU with a tiny model or on a GPU with Qwen3-8B's shape, vLLM's dummy weights
and graphs of decode steps (``--gpu``), and a reader in another process. Windows of three kinds take turns: no reads;
reads; and, for comparison, a process that copies memory in a bare loop. ``--pin`` gives the engine a core of its own,
as it has in production; without it the engine, its server and the reader share all cores. Ratios have an interval of
95 %, by a bootstrap over windows. Before that nothing runs for a while: the CPU time of this process and of the server
is that of an idle peer tier.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from cores import keep_to

ROOT = Path(__file__).parents[1]
for folder in ("src", "tests/tiers/peers", "tests/engines/vllm", "tests"):
    sys.path.insert(0, str(ROOT / folder))

SECRET = "a secret of the benchmark"
MAX_RISE, MAX_IDLE = 1.03, 0.01
WINDOW_SECONDS, IDLE_SECONDS = 1.0, 5.0
READY = "all blocks have come"
QUIET, READS, LOOP = "no reads", "reads", "memory copied in a bare loop"
DRAWS = 500


def read_on(address: str, fingerprint: str, slot_bytes: int, keys: str) -> None:
    """The reader's process: reads while its standard input says 1."""
    from peer_member import Reader

    from kvbm.tiers.peers.finder import Source

    os.nice(19)  # it stands for another machine
    wanted = [bytes.fromhex(key) for key in keys.split(",")]
    reader = Reader([Source(address)], len(wanted), slot_bytes, SECRET, json.loads(fingerprint))
    sources = [0] * len(wanted)
    addresses = [ctypes.addressof(reader.memory) + i * slot_bytes for i in range(len(wanted))]
    first = reader.store.read(sources, addresses, wanted)
    first.wait()
    print(first.reason or READY, flush=True)
    on, read = False, 0
    while True:
        if select.select([0], [], [], 0 if on else None)[0]:
            said = os.read(0, 1)
            if not said:
                break
            on = said == b"1"
        if on:
            operation = reader.store.read(sources, addresses, wanted)
            operation.wait()
            read += (len(wanted) - len(operation.bad)) * slot_bytes
    print(read)
    reader.close()


def copy_on() -> None:
    """The process of the bare loop: copies while its standard input says 1."""
    os.nice(19)
    source, target = (ctypes.create_string_buffer(64 << 20) for _ in range(2))
    on = False
    while True:
        if select.select([0], [], [], 0 if on else None)[0]:
            said = os.read(0, 1)
            if not said:
                return
            on = said == b"1"
        if on:
            ctypes.memmove(target, source, len(source))


def quantile(windows: list[list[float]], part: float) -> float:
    return float(np.quantile(np.concatenate(windows), part))


def compare(windows: list[list[float]], quiet: list[list[float]], part: float) -> tuple[float, float, float]:
    """Ratio of a quantile of the steps, and its interval of 95 %. Neighbours in time are drawn together."""
    draw, count = np.random.default_rng(7), min(len(windows), len(quiet))
    ratios = []
    for picks in draw.integers(count, size=(DRAWS, count)):
        ratios.append(quantile([windows[i] for i in picks], part) / quantile([quiet[i] for i in picks], part))
    low, high = np.quantile(ratios, (0.025, 0.975)).tolist()
    return quantile(windows, part) / quantile(quiet, part), low, high


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def engine_arguments(gpu: Path | None) -> tuple[dict, int]:
    """Arguments of vLLM, and the tokens of a prompt whose blocks are read."""
    if gpu is None:
        model = subprocess.check_output([sys.executable, ROOT / "scripts/models.py", "tiny"], text=True).strip()
        return {"model": model, "max_model_len": 8192, "num_gpu_blocks_override": 1024}, 4000
    sys.path.insert(0, str(ROOT / "benchmarks/gpu"))
    import vllm_kinds

    shape = vllm_kinds.QWEN3_8B
    model = str(vllm_kinds.config_folder(shape, gpu))
    arguments = {"model": model, "load_format": "dummy", "dtype": shape.dtype, "block_size": shape.block_size}
    arguments |= {"enforce_eager": False, "compilation_config": vllm_kinds.DECODE_GRAPHS}
    return arguments | {"max_model_len": 10240, "num_gpu_blocks_override": 4096, "gpu_memory_utilization": 0.5}, 8192


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--gpu", type=Path, metavar="DIR", help="run on a GPU; the model's configuration is put here")
    options = parser.parse_args()
    if options.gpu is not None:
        os.environ["KVBM_TEST_DEVICE"] = "cuda"
    import driver
    from engines import prompt

    os.environ.update({name: os.environ.get(name, value) for name, value in driver.DEFAULTS.items()})
    engine, tokens = engine_arguments(options.gpu)
    with tempfile.TemporaryDirectory(prefix="peers-") as run_dir:
        kvbm = {
            "cpu_cache_override_num_blocks": 4096 if options.gpu else 1024, "load": "always", "peers_enabled": True,
            "peer_dir": run_dir,
            "peer_listen": "127.0.0.1:0", "peer_secret": SECRET,
        }  # fmt: skip
        if options.pin:
            os.sched_setaffinity(0, {0})
        scenario = driver.Scenario(engine, kvbm)
        scenario.generate([prompt(i, tokens) for i in range(4)], 2)
        scenario.drain()
        catalog = scenario.adapter.leader.manager.catalogs["peer"]
        server = catalog._server
        assert server.is_ready.wait(60)
        others = {1} if options.pin and os.cpu_count() > 1 else os.sched_getaffinity(0)
        keep_to(others, server.pid)
        time.sleep(1.0)
        used = -cpu_seconds(os.getpid()) - cpu_seconds(server.pid)
        time.sleep(IDLE_SECONDS)
        idle = (used + cpu_seconds(os.getpid()) + cpu_seconds(server.pid)) / IDLE_SECONDS
        keys = ",".join(key.hex() for key in list(scenario.adapter.leader.manager.near.findable)[:256])
        setup = server._setup
        reader = subprocess.Popen(
            [sys.executable, __file__, "read", server.address, json.dumps(setup.fingerprint),
             str(setup.slot_bytes[0]), keys],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        loop = subprocess.Popen([sys.executable, __file__, "copy"], stdin=subprocess.PIPE)
        keep_to(others, reader.pid, loop.pid)
        said = reader.stdout.readline().decode().strip()
        assert said == READY, said
        steps: dict[str, list[list[float]]] = {QUIET: [], READS: [], LOOP: []}
        kinds = list(steps)
        processes = {READS: reader, LOOP: loop}
        names: list[str] = []

        def decode() -> None:
            """Requests for the next windows, if those before them have ended."""
            if scenario.engine.has_unfinished_requests():
                return
            first = len(names)
            names.extend(f"r{first + i}" for i in range(4))
            scenario.add(names[first:], [prompt(100 + first + i, 64) for i in range(4)], 8000)
            for _ in range(20):
                scenario.step()

        end, turn = time.monotonic() + options.seconds, 0
        while time.monotonic() < end or turn % len(kinds):
            decode()
            kind, turn = kinds[(turn + turn // len(kinds)) % len(kinds)], turn + 1  # another order in each round
            for other, process in processes.items():
                process.stdin.write(b"1" if other == kind else b"0")
                process.stdin.flush()
            time.sleep(0.1)
            took: list[float] = []
            window = time.monotonic() + WINDOW_SECONDS
            while time.monotonic() < window and scenario.engine.has_unfinished_requests():
                began = time.perf_counter()
                scenario.engine.step()
                took.append(time.perf_counter() - began)
            steps[kind].append(took)
        loop.communicate()
        read = int(reader.communicate()[0].split()[-1])
        scenario.abort(names[-4:])
        scenario.close()
    assert read, "the reader has got nothing in its windows: is the machine too busy?"
    counts = ", ".join(f"{sum(map(len, windows))} with {kind}" for kind, windows in steps.items())
    print(f"steps: {counts}; {read / 1e9:.1f} GB read, {os.cpu_count()} cores, the engine has its own: {options.pin}")
    found: dict[str, dict] = {}
    for kind, windows in steps.items():
        entry = found[kind] = {"p50_ms": quantile(windows, 0.5) * 1e3, "p99_ms": quantile(windows, 0.99) * 1e3}
        entry["steps"] = sum(map(len, windows))
        line = f"{kind:29} step p50 {entry['p50_ms']:.2f} ms, p99 {entry['p99_ms']:.2f} ms"
        if kind != QUIET:
            for name, part in ("p50", 0.5), ("p99", 0.99):
                ratio = entry[f"{name}_ratio"] = compare(windows, steps[QUIET], part)
                line += "; {} {:.3f} times ({:.3f} to {:.3f})".format(name, *ratio)
        print(line)
    rise = found[READS]["p99_ratio"][0]
    print(f"p99 {rise:.3f} times that without reads (promise: {MAX_RISE})")
    print(f"an idle peer tier takes {idle:.2%} of a core (promise: {MAX_IDLE:.0%})")
    if options.json:
        about = {"cores": os.cpu_count(), "pinned": options.pin, "read_gb": read / 1e9, "idle_share": idle}
        options.json.write_text(json.dumps({**about, **found}, indent=1) + "\n")
    return int(options.check and (rise > MAX_RISE or idle > MAX_IDLE))


if __name__ == "__main__":
    if sys.argv[1:2] == ["read"]:
        read_on(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    elif sys.argv[1:2] == ["copy"]:
        copy_on()
    else:
        raise SystemExit(main())
