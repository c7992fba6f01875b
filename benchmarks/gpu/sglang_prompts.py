"""Time to first token of prompts that come back to a serving SGLang from its storage backend, side by side.

    python benchmarks/gpu/sglang_prompts.py --directory /dev/shm/pages --at-once 4 --check --json results/sglang.json
    make test-gpu-sglang PYTHON=python3

Four engines, each with SGLang's hierarchical cache (HiCache):

    hicache  host memory for all prompts, no storage: what tokens are to be expected
    file     SGLang's own file backend
    kvbm     KVBM as the storage backend
    slow     the same with a disk that reads no faster than --slow-gbps, which is slower than computing

Each prompt is computed (`cold`) and asked once more with its prefix on the GPU (`on_gpu`). The first eight tokens of
both are references: in bf16 they may differ, because the shapes of the computation do. Other prompts then push it out
of the GPU's cache and, where there is a storage, out of host memory, and it comes back (`returned`), twice. It is
`same` if its tokens are those of the computation, where it was computed, and those with the prefix on the GPU
otherwise. The engine with KVBM is then killed with SIGKILL. The next one has to find the pages (`restarted`), and a bit
is flipped in every page on disk before the last prompt is asked (`flipped`), which has to be computed again.

KVBM measures the disk and SGLang's prefill, and loads what comes back sooner than it is computed. Whether a disk does
depends on the model. This one has a few layers of the width of a model of 70 billion parameters, whose KV is small for
what it costs to compute. --directory in memory (/dev/shm) stands for a fast disk, and `slow` for a slow one.

A kind that fails is reported and does not end the others. Nothing is waited for longer than --minutes altogether.

--check fails unless: no returned prompt of `slow` is later than 1.02 times computing it (medians), those of `kvbm` take
half of the time of `file` at most, tokens are the same as often as with `hicache`, KVBM expects computing to take half
to twice as long as it takes, the restarted engine has found its pages, and no flipped page was loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import vllm_kinds
from child import Child, ChildError, Emit, orders, run_child, wait_for_memory
from records import Record, Row, arguments, leave_without_device, median

KINDS = ("hicache", "file", "kvbm", "slow")
STORED = KINDS[1:]
REFERENCE_TOKENS = 8
MAX_RATIO, MIN_TIMES = 1.02, 2.0
MAX_ERROR = 2.0  # of the expected time of a prompt
METRICS = (
    "kvbm_prefill_tokens_per_second", "kvbm_refused_load_blocks_total", "kvbm_onboard_blocks_d2d",
    "kvbm_transfer_failed_blocks_total",
)  # fmt: skip
QUIET_SECONDS = 1.5  # without a byte that was written: nothing is on its way to the storage any more
# Heads as in Qwen3-8B, for which SGLang has its kernels ready; 12 GB of weights, and 24,576 bytes of KV a token.
SHAPE = vllm_kinds.QWEN3_8B._replace(
    name="qwen3-wide-6-layers-random", layers=6, hidden=8192, heads=64, mlp=28672, vocab=32768
)
TINY = vllm_kinds.TINY._replace(
    name="qwen3-tiny-bf16-random", dtype="bfloat16", vocab=4096, hidden=128, heads=4, kv_heads=2
)
DRY = "KVBM_SGLANG_ON_A_CPU"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONHASHSEED": "0", "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1", "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
}  # fmt: skip

if os.environ.get(DRY):  # in every process of an engine
    import sglang_cpu

    sglang_cpu.install()


def shape_of(dry: bool) -> vllm_kinds.Dense:
    return TINY if dry else SHAPE


def child(task: Row, emit: Emit) -> None:
    if task["kind"] == "prepare":
        folder = vllm_kinds.model_folder(shape_of(task["dry"]), Path(task["models"]))
        emit({"what": "model", "folder": folder.name})
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        task["metrics_port"] = probe.getsockname()[1]
    began = time.monotonic()
    engine = open_engine(task)
    emit({"what": "start", "s": round(time.monotonic() - began, 1)})
    server = Server(engine, task, emit)
    for order in orders():
        getattr(server, order["do"])(order)
        emit({"what": "over"})
    engine.shutdown()


def open_engine(task: Row) -> Any:
    kind, dry, length = task["kind"], task["dry"], task["length"]
    directory = Path(task["directory"]) / kind
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(directory)
    os.environ["DYN_KVBM_DISK_CACHE_DIR"] = str(directory)
    os.environ["DYN_KVBM_DISK_CACHE_GB"] = f"{task['gigabytes']:.6f}"
    os.environ["SLOW_DISK_GBPS"] = str(task["slow_gbps"])
    os.environ["DYN_KVBM_METRICS"], os.environ["DYN_KVBM_METRICS_PORT"] = "1", str(task["metrics_port"])
    if dry:
        os.environ["KVBM_DISK_BOUNCE_MB"] = "1"  # more would hold all of the tiny model's pages
        os.environ[DRY] = "1"
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(i % os.cpu_count()) for i in range(task["ranks"]))
        import sglang_cpu

        sglang_cpu.install()
    import sglang

    from kvbm.engines.sglang.__main__ import extra_config

    options: dict[str, Any] = {
        "model_path": str(vllm_kinds.model_folder(shape_of(dry), Path(task["models"]))), "skip_tokenizer_init": True,
        "dtype": "bfloat16", "page_size": task["page"], "max_total_tokens": task["cache_tokens"],
        "context_length": length + 256, "max_running_requests": 8, "chunked_prefill_size": min(8192, length),
        "mem_fraction_static": 0.1 if dry else 0.85, "random_seed": 0, "log_level": "info",
        "attention_backend": "torch_native" if dry else task["attention"], "sampling_backend": "pytorch",
        "grammar_backend": "none", "disable_cuda_graph": True, "tp_size": task["ranks"],
        "device": "cpu" if dry else "cuda", "enable_hierarchical_cache": True, "hicache_mem_layout": "page_first",
        "hicache_io_backend": "kernel", "hicache_write_policy": "write_through",
        "port": 30000 + 2000 * KINDS.index(kind),
    }  # fmt: skip
    # Host memory: for all prompts without a storage, with one for a few more than the GPU has. With less than the GPU
    # nothing comes back from any storage.
    held = task["cache_tokens"] // length
    prompts = held + 2 if kind in STORED else task["count"] + held + 4
    options["hicache_ratio"] = prompts * length / task["cache_tokens"]
    if kind in STORED:
        options["hicache_storage_prefetch_policy"] = "timeout"
    if kind == "file":
        options["hicache_storage_backend"] = "file"
    if kind in ("kvbm", "slow"):
        backend = json.loads(extra_config())
        if kind == "slow":
            backend |= {"module_path": "slow_disk", "class_name": "SlowStorage"}
        options["hicache_storage_backend"] = "dynamic"
        options["hicache_storage_backend_extra_config"] = json.dumps(backend)
    return sglang.Engine(**options)


class Server:
    """What is asked of one engine."""

    def __init__(self, engine: Any, task: Row, emit: Emit) -> None:
        self._engine, self._task, self._emit = engine, task, emit
        self._vocabulary = shape_of(task["dry"]).vocab
        for _ in range(2):  # compiles what has to be compiled
            self._ask(self._prompt("warm"))

    def measure(self, order: Row) -> None:
        count, task = self._task["count"], self._task
        prompts = [self._prompt(f"prompt {i}") for i in range(count)]
        references = []
        for i, prompt in enumerate(prompts):
            cold, near = self._ask(prompt), self._ask(prompt)
            references.append((cold["tokens"], near["tokens"]))
            self._emit({"what": "cold", "prompt": i, **cold})
            self._emit({"what": "on_gpu", "prompt": i, **near})
        self._settle()
        for number in (1, 2):
            for i in range(task["cache_tokens"] // task["length"]):
                self._ask(self._prompt(f"other {i}"), 1)
                self._settle(0.3)
            self._settle()
            for i, prompt in enumerate(prompts):
                row = self._compare(prompt, references[i])
                self._emit({"what": "returned", "pass": number, "prompt": i, **row})
        if task["kind"] in ("kvbm", "slow"):
            length, span = task["length"], 4 * shape_of(task["dry"]).hidden
            self._emit({"what": "metrics", "work": length * (1 + length / 2 / span), **self._metrics()})

    def ask(self, order: Row) -> None:
        """Some of the prompts, whose tokens are known."""
        for i, *references in order["prompts"]:
            row = self._compare(self._prompt(f"prompt {i}"), references)
            self._emit({"what": order["what"], "prompt": i, **row})
        self._emit({"what": f"{order['what']} metrics", **self._metrics()})

    def _compare(self, prompt: list[int], references: Sequence[list[int]]) -> Row:
        """``references``: the tokens of a computation, and those with the prefix on the GPU."""
        row = self._ask(prompt)
        return {"same": row["tokens"] == references[row["cached"] > len(prompt) // 2], **row}

    def _prompt(self, name: str) -> list[int]:
        source = random.Random(name)
        return [source.randrange(10, self._vocabulary - 10) for _ in range(self._task["length"])]

    def _ask(self, tokens: list[int], count: int = REFERENCE_TOKENS) -> Row:
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        began, first, got, about = time.perf_counter(), 0.0, [], {}
        for piece in self._engine.generate(input_ids=tokens, sampling_params=sampling, stream=True):
            first = first or time.perf_counter() - began
            ids = list(piece["output_ids"])
            got = ids if len(ids) >= len(got) else got + ids
            about = piece["meta_info"]
        where = about.get("cached_tokens_details") or {}
        return {
            "ms": round(first * 1e3, 3), "tokens": got[:count], "cached": about.get("cached_tokens") or 0,
            "from_storage": where.get("storage") or 0, "from_host": where.get("host") or 0,
        }  # fmt: skip

    def _metrics(self) -> Row:
        """What KVBM has measured and refused."""
        url = f"http://127.0.0.1:{self._task['metrics_port']}/metrics"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=20) as response:
                text = response.read().decode()
        except OSError as error:  # costs the figures, and not what has been measured
            return {"why": str(error)}
        found = re.findall(rf"^({'|'.join(METRICS)})(?:{{[^\n]*}})? (\S+)$", text, re.MULTILINE)
        return {name: sum(float(value) for each, value in found if each == name) for name in METRICS}

    def _settle(self, quiet: float = QUIET_SECONDS, most: float = 60) -> None:
        """Wait until nothing is on its way to the storage."""
        began = since = time.monotonic()
        last = written()
        while time.monotonic() - began < most and time.monotonic() - since < quiet:
            time.sleep(0.05)
            now = written()
            if now - last > 200_000:
                since = time.monotonic()
            last = now


def written() -> int:
    """Bytes that the processes of this session have written."""
    total, session = 0, os.getsid(0)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if os.getsid(int(process.name)) == session:
                fields = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
                total += max(int(fields["write_bytes"]), int(fields["wchar"]))
    return total


def flip(directory: Path, page_bytes: int) -> int:
    """Flip a bit in the middle of every page of KVBM's slabs; how many there are."""
    flipped = 0
    for slab in directory.glob("*/rank-*.slab"):
        with open(slab, "r+b") as file:
            for at in range(page_bytes // 2, slab.stat().st_size, page_bytes):
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1]))
                flipped += 1
    return flipped


class Engine:
    """One kind in a process of its own. A failure is a row."""

    def __init__(self, kind: str, task: Row, options: Any, record: Record, running: contextlib.ExitStack) -> None:
        self.kind, self._options, self._record = kind, options, record
        self.has_failed = False
        self._process = running.enter_context(Child(__file__, {**task, "kind": kind}, f"sglang-{kind}"))
        running.callback(self._process.kill)

    def start(self) -> None:
        with self._noted():
            row = self._receive()
            if row is None:
                raise ChildError(f"{self.kind} ended before it was ready")
            self._record.add({"kind": self.kind, **row})
            print(f"{self.kind} started in {row['s']:.1f} s", flush=True)

    def order(self, **order: Any) -> None:
        if self.has_failed:
            return
        with self._noted():
            self._process.send(order)
            while (row := self._receive()) != {"what": "over"}:
                if row is None:
                    raise ChildError(f"{self.kind} has ended")
                self._record.add({"kind": self.kind, **row})
            print(show(self.kind, summarise(self._record.rows)[self.kind]), flush=True)

    def _receive(self) -> Row | None:
        left = self._options.ends_at - time.monotonic()
        return self._process.receive(max(1.0, min(self._options.limit, left)))

    def end(self) -> None:
        """Let go of its memory."""
        self._process.end()

    def kill(self) -> None:
        """SIGKILL, to it and to all that it has started."""
        self._process.kill()

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except ChildError as error:
            self.has_failed = True
            self._record.add({"kind": self.kind, "what": "failed", "why": str(error)})
            print(f"{self.kind}: {error}", file=sys.stderr, flush=True)


def run(options: Any, task: Row, record: Record) -> bool:
    """Whether all went well."""
    good = True
    for at in range(0, len(options.kinds), options.at_once):
        wait_for_memory()
        with contextlib.ExitStack() as running:
            engines = [
                Engine(kind, task, options, record, running) for kind in options.kinds[at : at + options.at_once]
            ]
            for engine in engines:
                engine.start()
            for engine in engines:
                engine.order(do="measure")
                engine.kill() if engine.kind == "kvbm" or engine.has_failed else engine.end()
                good = good and not engine.has_failed
    if "kvbm" in options.kinds:
        good = restart(options, task, record) and good
    return good


def restart(options: Any, task: Row, record: Record) -> bool:
    """The engine after the one that was killed."""
    cold, near = (
        {row["prompt"]: row["tokens"] for row in record.rows if row["what"] == what and row["kind"] == "kvbm"}
        for what in ("cold", "on_gpu")
    )
    references = [(prompt, cold[prompt], tokens) for prompt, tokens in near.items()]
    if len(references) < 2:
        return False
    wait_for_memory()
    with contextlib.ExitStack() as running:
        engine = Engine("kvbm", task, options, record, running)
        engine.start()
        engine.order(do="ask", what="restarted", prompts=references[:-1])
        page_bytes = options.page * shape_of(options.dry).token_bytes // options.ranks
        record.add({"kind": "kvbm", "what": "flip", "pages": flip(options.directory / "kvbm", page_bytes)})
        engine.order(do="ask", what="flipped", prompts=references[-1:])
        return not engine.has_failed


def summarise(rows: list[Row]) -> dict[str, Row]:
    """By kind: medians in milliseconds, tokens from storage, and how many answers had the reference's tokens."""
    kinds: dict[str, Row] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows if "kind" in row):
        line: Row = {}
        for what in ("cold", "on_gpu", "returned", "restarted", "flipped"):
            found = [row for row in rows if row.get("kind") == kind and row["what"] == what]
            if found:
                line[what] = median(row["ms"] for row in found)
                line[f"{what}_all"] = [row["ms"] for row in found]
                line[f"{what}_stored"] = [row["from_storage"] for row in found]
                line[f"{what}_same"] = sum(row.get("same", True) for row in found), len(found)
        for row in rows:
            if row.get("kind") == kind and row["what"] == "metrics" and row.get(METRICS[0]):
                line["expected"] = round(1e3 * row["work"] / row[METRICS[0]], 1)
            elif row.get("kind") == kind and row["what"] == "flipped metrics":
                line["bad_pages"] = row.get(METRICS[-1], 0)
        kinds[kind] = line
    return kinds


def show(kind: str, line: Row) -> str:
    cells = [f"{kind:<8}"]
    for what in ("cold", "on_gpu", "returned", "restarted", "flipped"):
        if what in line:
            same, of = line[f"{what}_same"]
            cells.append(f"{what} {line[what]:.1f} ms")
            if what not in ("cold", "on_gpu"):
                cells[-1] += f" ({same} of {of} as before, from storage {line[f'{what}_stored']})"
    if "expected" in line:
        cells.append(f"expected {line['expected']:.1f} ms")
    return "  ".join(cells)


def verdict(rows: list[Row], length: int, dry: bool) -> list[str]:
    """What is not as it has to be. In a dry run times mean nothing, and pages of the slow disk are still refused."""
    kinds, wrong = summarise(rows), []
    slow, kvbm, file, hicache = (kinds.get(kind, {}) for kind in ("slow", "kvbm", "file", "hicache"))
    if dry:
        if any(slow.get("returned_stored", ())):
            wrong.append("slow: pages were loaded that are computed sooner")
    else:
        if {"cold", "returned"} <= slow.keys() and (ratio := slow["returned"] / slow["cold"]) > MAX_RATIO:
            wrong.append(f"slow: returned prompts take {ratio:.3f} of the time of computing them, at most {MAX_RATIO}")
        if "returned" in kvbm and "returned" in file and (times := file["returned"] / kvbm["returned"]) < MIN_TIMES:
            wrong.append(f"kvbm: {times:.2f} times as fast as SGLang's file backend, at least {MIN_TIMES:g}")
    for kind, line in (("kvbm", kvbm), ("slow", slow)):
        if "expected" in line and "cold" in line:
            error, most = line["expected"] / line["cold"], MAX_ERROR * (10 if dry else 1)
            if not 1 / most <= error <= most:
                wrong.append(f"{kind}: KVBM expects {error:.2f} times the time that computing a prompt takes")
        for what in ("returned", "restarted", "flipped"):
            if what not in line:
                continue
            same, of = line[f"{what}_same"]
            expected, out_of = hicache.get("returned_same", (of, of))
            if same * out_of < expected * of:
                wrong.append(
                    f"{kind}: {same} of {of} answers that were {what} are as before, hicache: {expected} of {out_of}"
                )
    if "returned" in kvbm and max(kvbm["returned_stored"]) < length // 2:
        wrong.append("kvbm: hardly anything has come from the storage")
    if "restarted" in kvbm and min(kvbm["restarted_stored"]) < length // 2:
        wrong.append(f"kvbm: after the restart only {kvbm['restarted_stored']} tokens came from the storage")
    if "flipped" in kvbm and max(kvbm["flipped_stored"]) > 0:
        wrong.append("kvbm: pages with a flipped bit were loaded")
    if not kvbm.get("bad_pages", 1):
        wrong.append("kvbm: pages with a flipped bit were not even read")
    return wrong


def with_room(directory: Path, gigabytes: float) -> Path:
    """The directory, or another where it has no room for so much."""
    directory.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(directory).free / 1e9) > gigabytes:
        return directory
    other = Path(tempfile.gettempdir()) / "kvbm-sglang-pages"
    print(f"{directory} has {free:.1f} GB left, of {gigabytes:.1f}: pages go to {other}", flush=True)
    other.mkdir(exist_ok=True)
    return other


def main() -> int:
    if run_child(child):
        return 0
    parser = arguments(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="engines, in this order")
    parser.add_argument(
        "--models", type=Path, default=Path("~"), metavar="DIR", help="where the model is or is put (12 GB)"
    )
    parser.add_argument(
        "--directory", type=Path, required=True, metavar="DIR", help="for the pages of every kind; emptied"
    )
    parser.add_argument("--length", type=int, default=32768, metavar="N", help="tokens of a prompt (32768)")
    parser.add_argument("--count", type=int, default=3, metavar="N", help="prompts (3), at least 2")
    parser.add_argument("--page", type=int, default=64, metavar="N", help="tokens of a page (64)")
    parser.add_argument("--slow-gbps", type=float, default=0.4, metavar="GB/S", help="of the slow disk (0.4)")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="tensor parallel (1)")
    parser.add_argument("--attention", default="fa3", metavar="NAME", help="SGLang's attention backend (fa3)")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="engines to start at the same time (1)")
    parser.add_argument(
        "--limit", type=float, default=200, metavar="S", help="seconds to wait for an engine's next word (200)"
    )
    parser.add_argument(
        "--minutes", type=float, default=8.5, metavar="N", help="to wait for all of it altogether (8.5)"
    )
    parser.add_argument("--check", action="store_true", help="status 1 where something is not as it has to be")
    parser.add_argument("--dry", action="store_true", help="a tiny model on the CPU; the times mean nothing")
    options = parser.parse_args()
    if options.count < 2 or options.at_once < 1 or options.length < 8 * options.page or options.slow_gbps <= 0:
        parser.error("--count takes at least 2, --at-once at least 1, --length 8 pages, --slow-gbps more than 0")
    if options.dry:
        options.length, options.slow_gbps = 4096, min(options.slow_gbps, 0.001)
    else:
        leave_without_device()
    began = time.monotonic()
    options.ends_at = began + 60 * options.minutes
    shape = shape_of(options.dry)
    held = options.count + 1  # prompts that the GPU's cache has room for
    gigabytes = 1.1 * (options.count + held + 1) * options.length * shape.token_bytes / 1e9
    options.directory = with_room(options.directory.expanduser(), gigabytes * len(STORED))
    settings = {
        name: getattr(options, name)
        for name in ("kinds", "length", "count", "page", "slow_gbps", "at_once", "dry", "attention", "ranks")
    }
    record = Record("sglang", {**settings, "model": shape.name}, options.json)
    task = {
        **settings, "models": str(options.models.expanduser()), "directory": str(options.directory),
        "cache_tokens": held * options.length, "gigabytes": gigabytes,
    }  # fmt: skip
    with Child(__file__, {**task, "kind": "prepare"}, "prepare") as running:
        for row in running.rows(options.limit):
            record.add(row)
    for kind in STORED:
        shutil.rmtree(Path(task["directory"]) / kind, ignore_errors=True)
    good = run(options, task, record)
    wrong = verdict(record.rows, options.length, options.dry)
    for kind, line in summarise(record.rows).items():
        print(show(kind, line), "         all returned: " + ", ".join(map(str, line.get("returned_all", ()))), sep="\n")
    for text in wrong:
        print(f"WRONG  {text}")
    print(f"{'all well' if good and not wrong else 'not all is well'}; took {time.monotonic() - began:.0f} s")
    return 1 if not good or (options.check and wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
