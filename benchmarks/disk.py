"""The disk tier beside the plainest loop that could do its work.

    python benchmarks/disk.py [--directory DIR] [--gb 4] [--check] [--json FILE]     the slab file
    python benchmarks/disk.py --threads-sweep                                        how many threads it needs
    python benchmarks/disk.py --index                                                SQLite beside LMDB as the index

A match of consecutive blocks is written and read through `kvbm.tiers.disk.file.DiskFile`, which hashes every block and
keeps its checksum, and by threads that do nothing but O_DIRECT calls on the same file, in turns. The limits compare the
best round of each: what the disk can do is not seen in a round that something else on the machine has disturbed. The
file is written once before anything counts, because the first write to a preallocated place costs the filesystem more
than later ones.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import mmap
import os
import platform
import random
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from kvbm.tiers.disk.file import DiskFile
from kvbm.tiers.disk.index import Index
from kvbm.tiers.host.slab import available_memory

LIMITS = {"read": 0.90, "write": 0.85}  # of the plain loop
CALL = 4 << 20  # bytes of one call of the plain loop: more gains nothing


class Figure(NamedTuple):
    """One round: bytes a second, and seconds of CPU for a gigabyte."""

    rate: float
    cpu: float


class Slab:
    """Memory for all blocks, faulted in, with different bytes in every page."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        noise = random.Random(0).randbytes(1 << 20)
        for at in range(0, size, len(noise)):
            self._map[at : at + len(noise)] = noise[: size - at]
            self._map[at : at + 8] = at.to_bytes(8, "little")
        self.view = memoryview(self._map)
        self._first = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._first)


def busy_elsewhere(since: tuple[float, float] | None = None) -> tuple[float, float]:
    """(CPU seconds that others have used, seconds of the clock), since the beginning or since an earlier answer.

    Hashing needs the cores that somebody else may have; the plain loop does not. A ratio measured beside them says
    less about the disk tier than about them.
    """
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    own = resource.getrusage(resource.RUSAGE_SELF)
    used = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") - own.ru_utime - own.ru_stime
    now = time.monotonic()
    return (used, now) if since is None else (used - since[0], now - since[1])


def measured(size: int, work: Callable[[], None]) -> Figure:
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.monotonic()
    work()
    seconds = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Figure(size / seconds, cpu * 1e9 / size)


def plain(fd: int, memory: memoryview, threads: int, call: Callable[..., int]) -> None:
    """Threads that take the next piece and move it, until there is none."""
    numbers = itertools.count()
    pieces = -(-len(memory) // CALL)

    def loop() -> None:
        while (number := next(numbers)) < pieces:
            at = number * CALL
            piece = memory[at : at + CALL]
            if call(fd, [piece], at) != len(piece):
                raise OSError("short")

    workers = [threading.Thread(target=loop) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


class Bench:
    def __init__(self, path: Path, size: int, slot_bytes: int, threads: int) -> None:
        self.slots = size // slot_bytes
        self.size = self.slots * slot_bytes
        self.memory = Slab(self.size)
        self.file = DiskFile(path, self.slots, slot_bytes, threads=threads)
        self.fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        self.tags = [slot.to_bytes(32, "little") for slot in range(self.slots)]
        self.addresses = [self.memory.address + slot * slot_bytes for slot in range(self.slots)]

    def close(self) -> None:
        os.close(self.fd)
        self.file.close()

    def ours(self, what: str, slots: list[int]) -> Figure:
        def work() -> None:
            addresses = [self.addresses[slot] for slot in slots]
            tags = [self.tags[slot] for slot in slots]
            operation = getattr(self.file, what)(slots, addresses, tags)
            operation.wait()
            if operation.bad:
                raise OSError(operation.reason)

        return measured(self.size, work)

    def plain(self, what: str, threads: int) -> Figure:
        call = os.preadv if what == "read" else os.pwritev
        return measured(self.size, lambda: plain(self.fd, self.memory.view, threads, call))

    def compare(self, what: str, rounds: int) -> dict[str, object]:
        order = list(range(self.slots))
        mixed = random.Random(1).sample(order, self.slots)
        best = max((2, 4, 8), key=lambda threads: self.plain(what, threads).rate)
        ours, loop, scattered = [], [], []
        for _ in range(rounds):
            loop.append(self.plain(what, best))
            ours.append(self.ours(what, order))
            scattered.append(self.ours(what, mixed))
        top = [max(figure.rate for figure in figures) / 1e9 for figures in (ours, loop, scattered)]
        return {
            "what": what,
            "gb_s": top[0],
            "plain_gb_s": top[1],
            "plain_threads": best,
            "scattered_gb_s": top[2],
            "ratio": top[0] / top[1],
            "median_ratio": median(figure.rate for figure in ours) / median(figure.rate for figure in loop),
            "limit": LIMITS[what],
            "cpu_s_gb": median(figure.cpu for figure in ours),
            "plain_cpu_s_gb": median(figure.cpu for figure in loop),
        }


# ---------------------------------------------------------------------------------------------------------------------
# The index


@contextmanager
def timed(rows: dict[str, float], name: str, per: int) -> Iterator[None]:
    began = time.monotonic()
    yield
    rows[name] = (time.monotonic() - began) / per * 1e6


def index_sqlite(place: Path, blocks: int, batches: list[list[tuple[bytes, int]]]) -> dict[str, float]:
    rows: dict[str, float] = {}
    index = Index.open(place / "sqlite", {"model": "bench"}, blocks)
    with timed(rows, "put", blocks):
        for batch in batches:
            index.put(batch)
            index.flush()
    with timed(rows, "touch", blocks):
        for batch in batches:
            index.touch([key for key, _ in batch])
            index.flush()
    with timed(rows, "replace", blocks):
        for batch in batches:
            index.remove([key for key, _ in batch])
            index.put([(key[::-1], slot) for key, slot in batch])
            index.flush()
    index.close()
    began = time.monotonic()
    index = Index.open(place / "sqlite", {"model": "bench"}, blocks)
    assert sum(1 for _ in index.entries()) == blocks
    rows["start"] = (time.monotonic() - began) * 1e3
    index.close()
    rows["mb"] = sum(file.stat().st_size for file in (place / "sqlite").iterdir()) / 1e6
    return rows


def index_lmdb(place: Path, blocks: int, batches: list[list[tuple[bytes, int]]]) -> dict[str, float]:
    """The same three tables it takes to hold what the one of SQLite holds: by key, by slot and the order of use."""
    import lmdb  # not a dependency: pip install lmdb

    rows: dict[str, float] = {}

    def connect() -> lmdb.Environment:
        # Like SQLite's NORMAL: a crash of the process loses nothing, a power failure maybe the last transactions.
        return lmdb.open(str(place / "lmdb"), map_size=1 << 33, max_dbs=2, metasync=False, sync=False)

    env = connect()
    keys, slots = env.open_db(b"keys"), env.open_db(b"slots")
    used = itertools.count()
    with timed(rows, "put", blocks):
        for batch in batches:
            with env.begin(write=True) as txn:
                for key, slot in batch:
                    txn.put(key, slot.to_bytes(4, "big") + next(used).to_bytes(8, "big"), db=keys)
                    txn.put(slot.to_bytes(4, "big"), key, db=slots)
    with timed(rows, "touch", blocks):
        for batch in batches:
            with env.begin(write=True) as txn:
                for key, slot in batch:
                    txn.put(key, slot.to_bytes(4, "big") + next(used).to_bytes(8, "big"), db=keys)
    with timed(rows, "replace", blocks):
        for batch in batches:
            with env.begin(write=True) as txn:
                for key, slot in batch:
                    txn.delete(key, db=keys)
                    txn.put(key[::-1], slot.to_bytes(4, "big") + next(used).to_bytes(8, "big"), db=keys)
                    txn.put(slot.to_bytes(4, "big"), key[::-1], db=slots)
    env.close()
    began = time.monotonic()
    env = connect()
    keys = env.open_db(b"keys")
    with env.begin() as txn:
        entries = sorted((value[4:], key, value[:4]) for key, value in txn.cursor(db=keys))
    assert len(entries) == blocks
    rows["start"] = (time.monotonic() - began) * 1e3
    env.close()
    rows["mb"] = (place / "lmdb" / "data.mdb").stat().st_blocks * 512 / 1e6
    return rows


def compare_indexes(place: Path, blocks: int, batch: int) -> dict[str, dict[str, float]]:
    chance = random.Random(3)
    # A request's blocks lie side by side, and which request comes next is anybody's guess.
    pairs = [(chance.randbytes(32), slot) for slot in range(blocks)]
    batches = [pairs[at : at + batch] for at in range(0, blocks, batch)]
    chance.shuffle(batches)
    found = {"sqlite": index_sqlite(place, blocks, batches)}
    try:
        found["lmdb"] = index_lmdb(place, blocks, batches)
    except ImportError:
        print("lmdb is not installed: SQLite alone")
    print(f"{blocks:,} blocks, transactions of {batch}")
    print(f"{'':10}{'put':>9}{'touch':>9}{'replace':>9}  µs a block{'start':>9} ms{'size':>9} MB")
    for name, row in found.items():
        print(
            f"{name:10}{row['put']:9.2f}{row['touch']:9.2f}{row['replace']:9.2f}{'':12}{row['start']:9.0f}{row['mb']:12.1f}"
        )
    return found


# ---------------------------------------------------------------------------------------------------------------------


def compare_slab(options: argparse.Namespace, place: Path) -> list[dict[str, object]]:
    slot = options.slot_kb << 10
    room = min(int(shutil.disk_usage(place).free * 0.8), int(available_memory() * 0.5))
    size = min(int(options.gb * 1e9), room) // slot * slot
    if size < options.gb * 1e9 * 0.99:
        print(f"only {size / 1e9:.1f} GB: there is no more room for it here")
    rows = []
    start = busy_elsewhere()
    sweep = (1, 2, 4, 8, 16) if options.threads_sweep else (options.threads,)
    for threads in sweep:
        bench = Bench(place / "bench.slab", size, slot, threads)
        try:
            bench.ours("write", list(range(bench.slots)))
            rows += [bench.compare(what, options.rounds) | {"threads": threads} for what in ("write", "read")]
        finally:
            bench.close()
    print(f"{size / 1e9:.2f} GB in slots of {options.slot_kb} KiB at {place}, best of {options.rounds} rounds")
    heads = ("threads", "GB/s", "plain", "ratio", "limit", "of medians", "scattered", "CPU s/GB", "plain")
    print(" " * 6 + "".join(f"{head:>{max(8, len(head) + 2)}}" for head in heads))
    cpu, clock = busy_elsewhere(start)
    for row in rows:
        row["others_busy_cores"] = cpu / clock
        print(
            f"{row['what']:6}{row['threads']:8}{row['gb_s']:8.2f}{row['plain_gb_s']:8.2f}{row['ratio']:8.2f}"
            f"{row['limit']:8.2f}{row['median_ratio']:12.2f}{row['scattered_gb_s']:11.2f}{row['cpu_s_gb']:10.3f}{row['plain_cpu_s_gb']:8.3f}"
        )
    print(f"other programs kept {cpu / clock:.1f} of {os.cpu_count()} cores busy meanwhile")
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--directory", type=Path, help="where to put the file; a temporary one unless given")
    parser.add_argument("--gb", type=float, default=4.0, help="size of the match")
    parser.add_argument("--slot-kb", type=int, default=2048, help="bytes of a block on one rank, in KiB")
    parser.add_argument("--threads", type=int, default=8, help="KVBM_DISK_THREADS")
    parser.add_argument("--threads-sweep", action="store_true", help="measure 1 to 16 threads")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--index", action="store_true", help="compare SQLite and LMDB instead")
    parser.add_argument("--blocks", type=int, default=200_000, help="blocks in the index")
    parser.add_argument("--batch", type=int, default=256, help="blocks of one transaction of the index")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is missed")
    options = parser.parse_args(arguments)

    found: object
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-", dir=options.directory) as place:
        if options.index:
            found = compare_indexes(Path(place), options.blocks, options.batch)
            missed = []
        else:
            found = rows = compare_slab(options, Path(place))
            missed = [row for row in rows if row["ratio"] < row["limit"]]
    if options.json:
        about = {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()}
        with open(options.json, "w") as file:
            json.dump({"machine": about, "rows": found}, file, indent=2)
    for row in missed:
        print(f"\nlimit missed: {row['what']} at {row['ratio']:.2f} of the plain loop", file=sys.stderr)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
