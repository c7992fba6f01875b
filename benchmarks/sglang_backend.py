"""The SGLang backend beside SGLang's own file backend: same pool, same pages, same disk, in turns.

    make bench-sglang
    .venvs/sglang/bin/python benchmarks/sglang_backend.py [--directory DIR] [--pages 1024] [--check] [--json FILE]

Both are called as SGLang's controller calls them: ours with pages where they lie (`batch_set_v1`, `batch_get_v1`), the
file backend with a tensor a page (`batch_set`, `batch_get`), 128 pages a call. What counts is the disk: pages written
until they are there, and read back when no memory has them any more. The file backend leaves what it writes to the page
cache, so writing ends with a sync, and the kernel is asked to drop it before it is read; ours goes past the page cache.
Beside that, reading from memory: from the page cache, and from a host tier of ours. The host tier is measured twice:
as it is set by default, where the first read of a page starts its write to the disk, and with every page on the disk
before it is read (`DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER`), so that nothing is written beside the reads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHABufferInfo, MHATokenToKVPoolHost

from kvbm.engines.sglang.backend import KvbmStorage

PAGE, HEADS, DIM = 64, 8, 64  # 128 KiB a layer and page
BATCH = 128
LEAST = 5.0  # times the file backend


def host_pool(layout: str, pages: int, layers: int) -> Any:
    parts = [[torch.zeros((PAGE, HEADS, DIM), dtype=torch.bfloat16) for _ in range(layers)] for _ in range(2)]
    pointers = [torch.tensor([tensor.data_ptr() for tensor in part], dtype=torch.uint64) for part in parts]
    buffers = KVBuffers(
        k=tuple(parts[0]), v=tuple(parts[1]), k_data_ptrs=pointers[0], v_data_ptrs=pointers[1],
        layout=KVBufferLayout.NHD,
    )  # fmt: skip
    info = MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=HEADS, head_dim=DIM, v_head_dim=DIM, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    pool = MHATokenToKVPoolHost(
        info, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=PAGE, start_layer=0, end_layer=layers,
        host_token_capacity=pages * PAGE,
    )  # fmt: skip
    pool.kv_buffer.view(torch.int16).random_(-30000, 30000)
    return pool


def storage_config(**extra: object) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name=__file__, extra_config=dict(extra),
    )  # fmt: skip


# Stands for the arguments of a server, which the backend asks for LoRA adapters.
runtime_context.get_server_args = lambda: SimpleNamespace(enable_lora=None, lora_paths=None)

# Stands for the model of a server, which is part of a cache's name.
MODEL = torch.nn.Linear(2, 2)


class Ours:
    def __init__(self, pool: Any, directory: Path, pages: int, host: int = 0, filtered: bool = True) -> None:
        extra = {
            "disk_cache_override_num_blocks": pages, "disk_cache_dir": str(directory), "disk_bounce_mb": 64,
            "cpu_cache_override_num_blocks": host, "disable_disk_offload_filter": not filtered,
        }  # fmt: skip
        self._backend = KvbmStorage(storage_config(**extra), {})
        self._backend.register_mem_pool_host(pool)
        self._backend.on_host_pools_registered()

    def put(self, keys: list[str], indices: torch.Tensor) -> None:
        assert all(self._backend.batch_set_v1(keys, indices))

    def get(self, keys: list[str], indices: torch.Tensor) -> None:
        assert all(self._backend.batch_get_v1(keys, indices))

    def sync(self) -> None:
        """A put returns when its pages are on disk. With a host tier those that are on their way are waited for."""
        while self._backend._store("kv").leader.moves_under_way:
            time.sleep(0.001)

    def forget(self) -> None:
        """Past the page cache there is nothing to drop but what the last batches left in our own memory: 64 MB."""

    def clear(self) -> None:
        self._backend.clear()

    def close(self) -> None:
        self._backend.close()


class File:
    """As SGLang's controller drives it (`_generic_page_set`, `_generic_page_get`)."""

    def __init__(self, pool: Any, directory: Path) -> None:
        self._pool, self._directory = pool, directory
        self._backend = HiCacheFile(storage_config(), str(directory))
        self._backend.register_mem_pool_host(pool)

    def put(self, keys: list[str], indices: torch.Tensor) -> None:
        pages = [self._pool.get_data_page(indices[i * PAGE]) for i in range(len(keys))]
        assert self._backend.batch_set(keys, pages)

    def get(self, keys: list[str], indices: torch.Tensor) -> None:
        targets = [self._pool.get_dummy_flat_data_page() for _ in keys]
        for i, page in enumerate(self._backend.batch_get(keys, targets)):
            self._pool.set_from_flat_data_page(indices[i * PAGE], page)

    def sync(self) -> None:
        os.sync()

    def forget(self) -> None:
        for file in self._directory.iterdir():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def clear(self) -> None:
        self._backend.clear()

    def close(self) -> None:
        return


def round_of(backend: Any, pool: Any, indices: torch.Tensor, number: int) -> SimpleNamespace:
    """Bytes a second of writing, of reading, and of reading after the page cache was dropped."""
    pages = len(indices) // PAGE
    keys = [hashlib.sha256(f"{number}/{page}".encode()).hexdigest() for page in range(pages)]
    size = pool.kv_buffer.nbytes
    before = pool.kv_buffer.clone()
    rates = {}
    for what in ("put", "get", "cold"):
        if what != "put":
            pool.kv_buffer.zero_()
        if what == "cold":
            backend.forget()
        move = backend.put if what == "put" else backend.get
        began = time.perf_counter()
        for at in range(0, pages, BATCH):
            move(keys[at : at + BATCH], indices[at * PAGE : (at + BATCH) * PAGE])
        if what == "put":
            backend.sync()
        rates[what] = size / (time.perf_counter() - began)
        if not torch.equal(pool.kv_buffer.view(torch.int16), before.view(torch.int16)):
            raise SystemExit(f"{type(backend).__name__}: {what} brought other bytes")
    backend.clear()
    return SimpleNamespace(**rates)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: the temporary directory")
    parser.add_argument("--layers", type=int, default=8, help="of a page: 128 KiB each")
    parser.add_argument("--mb", type=int, default=1024, help="of all pages")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--check", action="store_true", help=f"fail below {LEAST:g} times the file backend, there and back"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pages = (args.mb << 20) // (args.layers * (128 << 10)) // BATCH * BATCH
    found: dict[str, Any] = {"machine": platform.platform(), "cpus": os.cpu_count(), "pages": pages, "layouts": {}}
    worst = float("inf")
    for layout in ("page_first", "layer_first"):
        root = Path(tempfile.mkdtemp(prefix="kvbm-sglang-", dir=args.directory))
        try:
            pool = host_pool(layout, pages, args.layers)
            indices = pool.alloc(pages * PAGE)
            backends: dict[str, Ours | File] = {
                "kvbm": Ours(pool, root / "kvbm", pages),
                "kvbm host": Ours(pool, root / "kvbm-host", pages, pages),
                "kvbm host, on disk": Ours(pool, root / "kvbm-host-on-disk", pages, pages, filtered=False),
                "file": File(pool, root / "file"),
            }
            rounds: dict[str, list[SimpleNamespace]] = {name: [] for name in backends}
            for number in range(args.rounds):
                for name, backend in backends.items():
                    rounds[name].append(round_of(backend, pool, indices, number))
            for backend in backends.values():
                backend.close()
        finally:
            shutil.rmtree(root)
        figures = {
            name: {what: median(getattr(each, what) for each in each_round) for what in ("put", "get", "cold")}
            for name, each_round in rounds.items()
        }
        beside = {"put": "kvbm", "cold": "kvbm", "get": "kvbm host"}
        ratios = {what: figures[ours][what] / figures["file"][what] for what, ours in beside.items()}
        there_and_back = {name: 1 / (1 / figures[name]["put"] + 1 / figures[name]["cold"]) for name in ("kvbm", "file")}
        ratios["there and back"] = there_and_back["kvbm"] / there_and_back["file"]
        worst = min(worst, ratios["there and back"])
        found["layouts"][layout] = {**figures, "there and back": there_and_back, "ratio": ratios}
        print(f"{layout}, {pages} pages of {args.layers * 128} KiB, GB/s (median of {args.rounds})")
        for what, text in (("put", "to the disk"), ("cold", "from the disk"), ("get", "from memory")):
            ours, file = figures[beside[what]][what] / 1e9, figures["file"][what] / 1e9
            print(f"  {text:14} {beside[what]:10} {ours:6.2f}   file {file:6.2f}   {ratios[what]:5.1f} times")
        print(f"  from memory, all on disk {figures['kvbm host, on disk']['get'] / 1e9:6.2f}")
        print(
            f"  there and back {'kvbm':10} {there_and_back['kvbm'] / 1e9:6.2f}   "
            f"file {there_and_back['file'] / 1e9:6.2f}   {ratios['there and back']:5.1f} times"
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.check and worst < LEAST:
        print(f"less than {LEAST:g} times the file backend: {worst:.1f}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
