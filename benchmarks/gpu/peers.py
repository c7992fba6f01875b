"""Time to first token of a long prompt that another engine on the same GPU has computed: its blocks are in the host
memory of that engine.

    python benchmarks/gpu/peers.py --json results/peers.json
    python benchmarks/gpu/peers.py --kinds kvbm p2p kvcr --packages ~/nixl --json results/peers.json
    python benchmarks/gpu/peers.py --cpu --check     # two engines on the CPU: exits with 1 where the promise is missed

For each kind there are two engines, each in a process of its own. All start side by side, and two kinds fit into the
memory of an H200; then one kind after the other is measured, while the engines of the other kind rest.
Engine A answers each prompt, and once more with the prefix still on its GPU: the reference, eight tokens that every
later answer has to reproduce. Then engine B, which has seen none of the prompts:

    peer       answers each prompt from A's host memory
    own        answers it again from its own host memory, after its GPU has forgotten it
    on_gpu     answers it again with the prefix on its GPU: the least that a prompt can take
    computed   answers a prompt that neither engine has seen

`first` is the first read from A, with everything that happens once: connecting, mapping, measuring.

Kinds: KVBM with its peer tier (kvbm); vLLM's OffloadingConnector with its p2p tier (p2p) and with KVCR (kvcr). The last
two need NIXL, and KVCR itself: ``--packages`` names a folder that has them. Their source is named with every request,
as a router would; KVBM finds its neighbour by itself. KVCR gets longer deadlines than its default of one second, within
which 4.8 GB do not arrive. A kind that cannot run is noted in the file with the reason, and the next one goes on.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import interference
import ttft
import vllm_kinds
from child import Child, ChildError, Emit, orders, run_child, wait_for_memory
from records import SOURCE, Record, Row, arguments, median
from suite import answers

KINDS = ("kvbm", "p2p", "kvcr")
SMALL = vllm_kinds.Dense("qwen3-small-random-bench", 12, 512, 8, 8, 64, 1024, 151936, "float32", 32)
TIMES = ("peer", "own", "on_gpu", "computed")
REFERENCE_TOKENS = 8
OWN_SHARE = 0.9
MEMORY_SHARE = 0.2  # of the GPU that an engine must find free
KVCR_SECONDS = 10
B_PROMPTS = 3  # that engine B's host memory holds: it answers one prompt after the other, three times each


# -- an engine --------------------------------------------------------------------------------------------------------


def child(task: Row, emit: Emit) -> None:
    if task["cpu"]:
        vllm_kinds.TINY = SMALL
    shape = vllm_kinds.shape_of(task["dry"])
    length, blocks = task["length"], int(1.5 * task["length"] / shape.block_size)
    os.environ.update(task["environment"])
    more: Row = {"gpu_memory_utilization": MEMORY_SHARE, "kv_transfer_config": connector(task)}
    if not task["dry"]:
        # No measurement of what is left of the GPU: the other engine allocates at the same time.
        more["kv_cache_memory_bytes"] = (blocks + 1) * shape.block_size * shape.token_bytes
    began = time.perf_counter()
    llm = vllm_kinds.open_engine(
        "base",
        model=vllm_kinds.model_folder(shape, Path(task["models"])),
        dry=task["dry"],
        mode="eager",
        gigabytes=task["gigabytes"],
        length=length + 256,
        blocks=blocks,
        **more,
    )
    emit({"what": "start", "s": round(time.perf_counter() - began, 2)})
    emit({"what": "over"})
    source = random.Random(task["name"])
    for order in orders():
        if order["forget"]:
            interference.forget(llm, source)
        prompt = vllm_kinds.draw(random.Random(order["prompt"]), order["length"])
        emit(answer(llm, prompt, order["tokens"], task, order["from_peer"]))
        emit({"what": "over"})


def connector(task: Row) -> dict[str, Any]:
    """``kv_transfer_config`` of one engine."""
    if task["kind"] == "kvbm":
        transfer = vllm_kinds.connector("kvbm", task["gigabytes"])
        assert transfer is not None
        return transfer
    tier: Row = {"type": "p2p", "host": "127.0.0.1", "port": task["port"]}
    if task["kind"] == "kvcr":
        tier = {
            "type": "kvcr", "router_capabilities": ["router_hint"], "control_host": "127.0.0.1",
            "control_ports": [task["port"]], "control_advertise_host": "127.0.0.1",
            "operation_timeout_ms": KVCR_SECONDS * 1000, "abandon_timeout_ms": 2 * KVCR_SECONDS * 1000,
        }  # fmt: skip
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": int(task["gigabytes"] * 1e9),
        "secondary_tiers": [tier],
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def answer(llm: Any, prompt: vllm_kinds.Tokens, tokens: int, task: Row, from_peer: bool) -> Row:
    """``from_peer``: name the other engine as the source, where the kind does not find it by itself."""
    params, more = vllm_kinds.greedy(tokens), {}
    name = f"request-{time.monotonic_ns()}"
    if from_peer and task["kind"] == "p2p":
        place = {"kv_request_id": name, "remote_host": "127.0.0.1", "remote_port": task["other_port"]}
        params.extra_args = {"kv_transfer_params": {"remote_kv_source": place}}
    elif from_peer and task["kind"] == "kvcr":
        more["kv_hints"] = hint(prompt, f"tcp://127.0.0.1:{task['other_port']}")
    engine, first, output = llm.llm_engine, None, None
    began = time.perf_counter()
    engine.add_request(name, vllm_kinds.as_prompt(prompt), params, **more)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if first is None and output.outputs and output.outputs[0].token_ids:
                first = time.perf_counter() - began
    assert first is not None
    assert output is not None
    found = list(output.outputs[0].token_ids)
    return {"ms": round(first * 1e3, 3), "cached": output.num_cached_tokens, "tokens": found, "what": "answer"}


def hint(prompt: vllm_kinds.Tokens, endpoint: str) -> Any:
    """As Dynamo's router makes it: the hash of every full block, as in vLLM's events."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    function = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(function)
    size = vllm_kinds.QWEN3_8B.block_size
    parent, hashes = None, []
    for at in range(0, len(prompt) - size + 1, size):
        parent = kv_cache_utils.hash_block_tokens(function, parent, prompt[at : at + size])
        hashes.append(kv_cache_utils.maybe_convert_block_hash(parent))
    payload = {"source_control_endpoint": endpoint, "block_hashes": hashes}
    return KvHintsEnvelope("0.1", "", [KvHintAction("a1", "kv.fetch", "1.0", payload)])


# -- two engines ------------------------------------------------------------------------------------------------------


class Pair:
    """Two engines of a kind, and the orders that they get."""

    def __init__(self, engines: Sequence[Child], length: int, limit: float) -> None:
        self._engines, self._length, self._limit = engines, length, limit

    def _ask(self, engine: int, prompt: str, *, from_peer: bool = False, forget: bool = False, **order: int) -> Row:
        order = {"length": self._length, "tokens": REFERENCE_TOKENS, **order}
        request = {"prompt": prompt, "from_peer": from_peer, "forget": forget, **order}
        (row,) = answers(self._engines[engine], request, self._limit)
        return row

    def measure(self, record: Record, what: Row, count: int) -> None:
        def note(name: str, row: Row, **more: Any) -> None:
            row = {key: value for key, value in row.items() if key not in ("what", "tokens")}
            record.add({**what, "what": name, **row, **more})

        def settle() -> None:
            """A's stores are over: a few steps see to their end, and nothing else runs."""
            for n in range(3):
                self._ask(0, f"small-{n}", length=min(512, self._length))
                time.sleep(0.5)

        for engine in (0, 1):
            self._ask(engine, f"warm-{engine}")
            self._ask(engine, f"warm-{engine}")
            self._ask(engine, f"warm-short-{engine}", length=min(512, self._length))
        settle()
        note("first", self._ask(1, "warm-0", from_peer=True))
        references = []
        for n in range(count):
            note("source", self._ask(0, f"prompt-{n}"), prompt=n)
            references.append(self._ask(0, f"prompt-{n}")["tokens"])
        settle()
        for n in range(count):
            for name, order in (
                ("peer", {"from_peer": True, "forget": True}),
                ("own", {"forget": True}),
                ("on_gpu", {}),
            ):
                row = self._ask(1, f"prompt-{n}", **order)
                note(name, row, prompt=n, same=row["tokens"] == references[n])
            note("computed", self._ask(1, f"other-{n}"), prompt=n)
        note("references", {}, distinct=len({tuple(tokens) for tokens in references}))


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def start(kind: str, options: Any, stack: contextlib.ExitStack) -> list[Child]:
    """Engines A and B of a kind; they have not answered yet."""
    shape = vllm_kinds.shape_of(options.dry)
    ports = free_ports(2)
    path = [SOURCE] if kind == "kvbm" or options.packages is None else [options.packages.expanduser(), SOURCE]
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-"))
    engines = []
    for n, name in enumerate("ab"):
        prompts = options.count + 1 if n == 0 else B_PROMPTS
        environment = {"KVBM_PEERS_ENABLED": "1", "KVBM_PEER_DIR": directory, "KVBM_PEER_NAME": name}
        environment |= {"KVBM_LOAD": "always"} if options.dry else {}  # a tiny model computes faster than it loads
        task = {
            "kind": kind, "name": name, "dry": options.dry, "cpu": options.cpu, "models": str(options.models),
            "length": options.length, "gigabytes": 1.1 * prompts * options.length * shape.token_bytes / 1e9,
            "port": ports[n], "other_port": ports[1 - n], "environment": environment,
        }  # fmt: skip
        engines.append(stack.enter_context(Child(__file__, task, f"{kind}-{name}", path)))
    return engines


def measure(kind: str, engines: Sequence[Child], options: Any, record: Record) -> None:
    """Raises ChildError."""
    shape = vllm_kinds.shape_of(options.dry)
    for name, engine in zip("ab", engines, strict=True):
        while (row := engine.receive(options.limit)) is not None and row["what"] != "over":
            record.add({"kind": kind, "engine": name, **row})
    what = {"kind": kind, "length": options.length, "bytes": shape.loaded_bytes(options.length)}
    Pair(engines, options.length, options.limit).measure(record, what, options.count)


def summarise(rows: list[Row], kind: str) -> Row:
    group = [row for row in rows if row.get("kind") == kind]
    line: Row = {"kind": kind}
    for what in ("first", *TIMES):
        times = [row["ms"] for row in group if row["what"] == what]
        line[what] = median(times) if times else None
    peer = [row for row in group if row["what"] == "peer"]
    line["hits"] = median([row["cached"] / row["length"] * 100 for row in peer]) if peer else None
    compared = [row for row in group if row["what"] in ("peer", "own", "on_gpu")]
    line["same"] = f"{sum(row['same'] for row in compared)} of {len(compared)}"
    line["failed"] = next((row["why"] for row in group if row["what"] == "failed"), None)
    return line


HEADER = f"{'kind':<8}" + "".join(f"{name:>10}" for name in ("first", *TIMES, "hits %")) + "  same tokens"


def show(line: Row) -> str:
    cells = (f"{line[name]:.1f}" if line[name] is not None else "-" for name in ("first", *TIMES, "hits"))
    text = f"{line['kind']:<8}" + "".join(f"{cell:>10}" for cell in cells) + f"  {line['same']}"
    return text if not line["failed"] else f"{text}\n{line['kind']} failed: {line['failed'].splitlines()[0]}"


def main() -> int:
    if run_child(child):
        return 0
    parser = arguments(__doc__)
    vllm_kinds.add_arguments(parser)
    parser.set_defaults(kinds=["kvbm"])
    kinds = next(action for action in parser._actions if action.dest == "kinds")
    kinds.choices = KINDS
    parser.add_argument("--packages", type=Path, metavar="DIR", help="a folder with nixl and kvcr, for those kinds")
    parser.add_argument("--length", type=int, default=32768, metavar="N", help="tokens of a prompt (32768)")
    parser.add_argument("--count", type=int, default=3, metavar="N", help="prompts (3)")
    parser.add_argument("--cpu", action="store_true", help="on the CPU with a small model, 49 kB of KV a token")
    parser.add_argument("--check", action="store_true", help=f"`own` takes {OWN_SHARE:.0%} of `peer` or more")
    options = parser.parse_args()
    if options.cpu:
        options.dry, vllm_kinds.TINY = True, SMALL
        vllm_kinds.model_folder(SMALL, options.models)
    if options.dry:
        options.kinds = ["kvbm"]  # vLLM's own offloading needs a GPU
    vllm_kinds.check(options)
    shape = vllm_kinds.shape_of(options.dry)
    names = ("kinds", "length", "count", "dry", "cpu")
    settings = {name: getattr(options, name) for name in names}
    record = Record("peers", {**settings, "model": shape.name}, options.json)
    task = {"kind": "prepare", "models": str(options.models), "dry": options.dry}
    with Child(ttft.__file__, task, "prepare") as running:
        for row in running.rows(options.limit):
            record.add(row)
    failures = 0
    if not options.dry:
        wait_for_memory()
    with contextlib.ExitStack() as stack:
        # Each kind ends as soon as it is measured; where one fails, the others go on.
        ends = {kind: stack.enter_context(contextlib.ExitStack()) for kind in options.kinds}
        pairs = {kind: start(kind, options, ends[kind]) for kind in options.kinds}
        for kind, engines in pairs.items():
            try:
                measure(kind, engines, options, record)
            except ChildError as error:
                failures += 1
                record.add({"kind": kind, "what": "failed", "why": str(error)})
                print(error, file=sys.stderr)
            print(HEADER, show(summarise(record.rows, kind)), sep="\n", flush=True)
            ends[kind].close()
    line = summarise(record.rows, "kvbm")
    share = line["own"] / line["peer"] if line["peer"] else 0.0
    print(f"from the peer at {share:.0%} of the speed of own hits (promise: {OWN_SHARE:.0%})")
    return 1 if failures or (options.check and share < OWN_SHARE) else 0


if __name__ == "__main__":
    sys.exit(main())
