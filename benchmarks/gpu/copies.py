"""How fast blocks move between host memory and a GPU, and what that costs the CPU: every way there is, side by side.

    python benchmarks/gpu/copies.py --json results/copies.json

2,048 scattered blocks of 36 layers, as in 32k tokens of an 8B model: 4.8 GB, from anywhere to anywhere.

    plain      one copy of 1 GiB of pinned memory: what the bus carries
    copier     KVBM's own copier as engines use it: whole, and layer by layer
    kernel     KVBM's copy kernel alone, by programs, warps and KiB moved at a time
    batch      cudaMemcpyBatchAsync, a call a layer, on the same pieces
    beside     eight copies of 16 KiB one after the other, as an engine makes them in every step: milliseconds until the
               last is there, alone and while the copier moves all blocks the same way

`issue` is the time until the calling thread is free again. The copier's rates are by the clock on the wall, from the
call to the end; the others' by the GPU's own. The rows hold every repeat, the table the median. With `layers` every
layer has a tensor of its own and a piece is one layer of one block; with `blocks` all layers of a block lie together,
as in vLLM's cross-layer layout.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from records import SOURCE, Record, Row, arguments, leave_without_device, median

LAYERS = 36
PLAIN_BYTES = 1 << 30
STAGING_BYTES = 2048 << 20  # KVBM_STAGING_MB's default
LITTLE_COPIES, LITTLE_BYTES = 8, 16 << 10
UNDER_WAY_SECONDS = 2e-3  # after which a long copy is: it takes tens of milliseconds
ALL = slice(None)

# Waits for the end of a copy; returns the seconds it took by the GPU's own clock, where that is the one that counts.
Ended = Callable[[], float | None]


class Variant(NamedTuple):
    """A shape of the copy kernel."""

    programs: int
    warps: int
    tile_kib: int

    def __str__(self) -> str:
        return f"kernel, {self.programs} programs of {self.warps} warps, {self.tile_kib} KiB at a time"


def variants(programs: list[int], warps: list[int], tiles: list[int], piece_kib: int) -> Iterator[Variant]:
    """All shapes; a tile that is larger than a piece is the piece."""
    seen = set()
    for shape in product(programs, warps, tiles):
        variant = Variant(shape[0], shape[1], min(shape[2], piece_kib))
        if variant not in seen:
            seen.add(variant)
            yield variant


@contextlib.contextmanager
def shaped(module: Any, variant: Variant) -> Iterator[None]:
    """Within it the module's kernels have another shape than the one they were given for good."""
    wanted = {"_PROGRAMS": variant.programs, "_WARPS": variant.warps, "_TILE_BYTES": variant.tile_kib << 10}
    missing = [name for name in wanted if not hasattr(module, name)]
    if missing:
        raise SystemExit(
            f"copies.py cannot shape the copy kernel: {module.__name__} has no {', '.join(missing)} any more"
        )
    before = {name: getattr(module, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


# -- with a GPU -------------------------------------------------------------------------------------------------------


def plain_copies(repeats: int = 5) -> dict[str, float]:
    """GB/s of one plain pinned copy: to the device, to the host, and both at once, summed."""
    import torch

    host, device = (
        [torch.empty(PLAIN_BYTES, dtype=torch.uint8, **where) for _ in range(2)]
        for where in ({"pin_memory": True}, {"device": "cuda"})
    )
    streams = [torch.cuda.Stream() for _ in range(2)]

    def to_device() -> None:
        with torch.cuda.stream(streams[0]):
            device[0].copy_(host[0], non_blocking=True)

    def to_host() -> None:
        with torch.cuda.stream(streams[1]):
            host[1].copy_(device[1], non_blocking=True)

    def rate(*copies: Callable[[], None]) -> float:
        times = []
        for _ in range(repeats + 1):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for copy in copies:
                copy()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return len(copies) * PLAIN_BYTES / median(times[1:]) / 1e9

    return {
        "to_device_gbps": rate(to_device),
        "to_host_gbps": rate(to_host),
        "both_gbps": rate(to_device, to_host),
    }


class Bench:
    """A cache on the device, a slab in host memory, and blocks to move between them."""

    def __init__(self, layout: str, piece: int, blocks: int, device: str = "cuda:0") -> None:
        import torch

        from kvbm.tiers.host.slab import HostSlab
        from kvbm.transfer import open_copier
        from kvbm.transfer.layout import TensorSpec, describe

        self.blocks, self.device = blocks, torch.device(device)
        places = blocks * 3 // 2  # so that those in use are scattered
        if layout == "layers":
            self.tensors = [torch.empty(places, piece, dtype=torch.uint8, device=device) for _ in range(LAYERS)]
        else:
            self.tensors = list(torch.empty(places, LAYERS, piece, dtype=torch.uint8, device=device).unbind(1))
        specs = [
            TensorSpec(f"layer.{i}", t.data_ptr(), tuple(t.shape), tuple(t.stride()), 1, "uint8")
            for i, t in enumerate(self.tensors)
        ]
        self.layout = describe(specs, places)
        self.slab = HostSlab(places * self.layout.slot_bytes).carve(places, self.layout.slot_bytes)
        self.copier = open_copier(device, self.layout, self.slab, 0, staging=STAGING_BYTES)
        source = random.Random(5)
        self.slots = source.sample(range(places), blocks)
        self.places = source.sample(range(places), blocks)
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if self.device.type == "cuda" else []
        self._kernels: dict[Variant, Any] = {}
        synchronize(self.device)

    @property
    def bytes(self) -> int:
        return self.blocks * self.layout.block_bytes

    def close(self) -> None:
        self.copier.close()

    # Each of these issues a copy and returns a function that waits for its end.

    def copier_load(self, by_layer: bool, part: slice = ALL) -> Ended:
        from kvbm.transfer.base import When

        self.copier.begin_step([])
        when = When.BY_LAYER if by_layer else When.LATER
        ticket = self.copier.load(self.slots[part], self.places[part], [], when)
        if by_layer:
            for layer in self.layout.layers:
                self.copier.wait_layer(layer)
            self.copier.end_load(ticket)
        return ticket.wait

    def copier_store(self, part: slice = ALL) -> Ended:
        return self.copier.store(self.places[part], self.slots[part]).wait

    def kernel(self, variant: Variant, to_device: bool) -> Ended:
        from kvbm.transfer import kernel_copies

        with shaped(kernel_copies, variant):
            if variant not in self._kernels:
                self._kernels[variant] = kernel_copies.KernelCopies(self.layout, self.slab, self.device)
            kernels = self._kernels[variant]
            copy = kernels.to_device if to_device else kernels.to_host
            return self._timed(self._stream(to_device), lambda: copy(self.slots, self.places))

    def batch(self, call: Any, to_device: bool) -> Ended:
        import numpy as np

        stream = self._stream(to_device)
        slots, places = np.asarray(self.slots, np.int64), np.asarray(self.places, np.int64)

        def issue() -> None:
            hosts = self.slab.address + slots * self.slab.slot_bytes
            for segment in self.layout.merged():
                device, host = segment.address + places * segment.stride, hosts + segment.offset
                call(device, host, segment.size, stream) if to_device else call(host, device, segment.size, stream)

        return self._timed(stream, issue)

    def _stream(self, to_device: bool) -> Any:
        return self._streams[0 if to_device else 1]

    def _timed(self, stream: Any, issue: Callable[[], object]) -> Ended:
        import torch

        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            began.record()
            issue()
            ended.record()
        return lambda: (ended.synchronize(), began.elapsed_time(ended) / 1e3)[1]

    def round_trip(self) -> bool:
        """Whether every byte of every block comes back after a store and a load."""
        import torch

        at = torch.tensor(self.places, device=self.device)
        for tensor in self.tensors:
            tensor.random_(0, 256)
        before = [tensor[at] for tensor in self.tensors]
        synchronize(self.device)
        self.copier.begin_step([])
        self.copier.store(self.places, self.slots).wait()
        for tensor in self.tensors:
            tensor.zero_()
        synchronize(self.device)
        self.copier_load(by_layer=True)()
        synchronize(self.device)
        return all(torch.equal(tensor[at], kept) for tensor, kept in zip(self.tensors, before, strict=True))


class Little:
    """What an engine copies in every step, beside anything else: little, and several times."""

    def __init__(self, device: Any) -> None:
        import torch

        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._here = torch.zeros(LITTLE_BYTES, dtype=torch.uint8, pin_memory=self._stream is not None)
        self._there = torch.zeros(LITTLE_BYTES, dtype=torch.uint8, device=device)

    def copy(self, to_device: bool) -> float:
        """Milliseconds until the last of them has arrived."""
        import torch

        target, source = (self._there, self._here) if to_device else (self._here, self._there)
        began = time.perf_counter()
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            for _ in range(LITTLE_COPIES):
                target.copy_(source, non_blocking=True)
                self._there.add_(1)  # as an engine does something with each
        if self._stream is not None:
            self._stream.synchronize()
        return (time.perf_counter() - began) * 1e3


def measure_beside(record: Record, what: Row, bench: Bench, repeats: int, way: Callable[[], Ended]) -> None:
    """What little copies notice of a long one."""
    little, to_device = Little(bench.device), what["direction"] == "to device"
    alone, beside = [], []
    for _ in range(repeats + 1):
        synchronize(bench.device)
        alone.append(little.copy(to_device))
        ended = way()
        time.sleep(UNDER_WAY_SECONDS)
        beside.append(little.copy(to_device))
        ended()
    times = {"alone_ms": alone[1:], "beside_ms": beside[1:]}
    row = {**what, **{name: [round(ms, 3) for ms in some] for name, some in times.items()}}
    record.add(row)
    took = f"{median(row['alone_ms']):>8.2f} ms, {median(row['beside_ms']):.2f} beside {row['way']}"
    print(place(row) + took, flush=True)


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(record: Record, what: Row, bench: Bench, repeats: int, *ways: Callable[[], Ended]) -> None:
    """Time ways that together move all blocks, at once, ``repeats`` times after one to warm up."""
    rates, issues = [], []
    for _ in range(repeats + 1):
        synchronize(bench.device)
        began = time.perf_counter()
        ended = [way() for way in ways]
        issues.append((time.perf_counter() - began) * 1e3)
        seconds = [end() for end in ended]
        wall = time.perf_counter() - began
        rates.append(bench.bytes / (seconds[0] or wall) / 1e9)
    row = {**what, "gbps": [round(rate, 2) for rate in rates[1:]], "issue_ms": [round(ms, 3) for ms in issues[1:]]}
    record.add(row)
    print(show(row), flush=True)


def place(row: Row) -> str:
    return f"{row['layout']:<7}{row['piece_kib']:>6} KiB  {row['direction']:<10}"


def show(row: Row) -> str:
    return f"{place(row)}{median(row['gbps']):>8.1f} GB/s{median(row['issue_ms']):>9.2f} ms  {row['way']}"


def run(options: Any, record: Record) -> bool:
    """False when a byte was lost."""
    from kvbm.transfer.cuda_calls import batch_function

    plain = {name: round(rate, 2) for name, rate in plain_copies(options.repeats).items()}
    record.add({"way": "plain", **plain})
    print("one plain copy, GB/s:", ", ".join(f"{name} {rate}" for name, rate in plain.items()), flush=True)
    good = True
    for layout, piece_kib in product(options.layouts, options.pieces):
        bench = Bench(layout, piece_kib << 10, options.blocks)
        where = {"layout": layout, "piece_kib": piece_kib}
        try:
            same = bench.round_trip()
            record.add({**where, "way": "round trip", "blocks": options.blocks, "equal": same})
            print(f"{layout}, {piece_kib} KiB: {options.blocks} blocks come back the same: {same}", flush=True)
            good = good and same
            shapes = variants(options.programs, options.warps, options.tiles, piece_kib)
            for way, direction, *copies in ways(bench, batch_function(), list(shapes)):
                measure(record, {**where, "way": way, "direction": direction}, bench, options.repeats, *copies)
            for way, direction, *copies in ways(bench, None, []):
                if direction != "both":
                    what = {**where, "way": way, "direction": direction}
                    measure_beside(record, what, bench, options.repeats, *copies)
        finally:
            bench.close()
    return good


def ways(bench: Bench, batch: Any, shapes: list[Variant]) -> Iterator[tuple[Any, ...]]:
    """(name, direction, what to do) of everything to measure."""
    yield "copier", "to device", partial(bench.copier_load, False)
    yield "copier, by layer", "to device", partial(bench.copier_load, True)
    yield "copier", "to host", bench.copier_store
    half = bench.blocks // 2
    first, second = slice(0, half), slice(half, None)
    yield "copier", "both", partial(bench.copier_load, False, first), partial(bench.copier_store, second)
    for to_device, direction in ((True, "to device"), (False, "to host")):
        if batch is not None:
            yield "batch", direction, partial(bench.batch, batch, to_device)
        for shape in shapes:
            yield str(shape), direction, partial(bench.kernel, shape, to_device)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--blocks", type=int, default=2048, metavar="N", help="blocks to move (2048)")
    parser.add_argument("--layouts", nargs="+", choices=("layers", "blocks"), default=["layers"], help="see above")
    parser.add_argument(
        "--pieces", nargs="+", type=int, default=[64], metavar="KIB", help="KiB of a layer's block (64)"
    )
    parser.add_argument("--programs", nargs="+", type=int, default=[2, 4, 8, 16], metavar="N", help="of the kernel")
    parser.add_argument("--warps", nargs="+", type=int, default=[8, 16], metavar="N", help="of a program")
    parser.add_argument("--tiles", nargs="+", type=int, default=[16, 64], metavar="KIB", help="moved at a time")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="after one to warm up (5)")
    options = parser.parse_args()
    if (
        options.blocks < 2
        or min(options.repeats, *options.pieces, *options.programs, *options.warps, *options.tiles) < 1
    ):
        parser.error("--blocks takes at least 2, all others at least 1")
    if any(number & number - 1 for number in (*options.warps, *options.tiles)):
        parser.error("--warps and --tiles take powers of two")
    leave_without_device()
    sys.path.insert(0, str(SOURCE))
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    record = Record("copies", settings, options.json)
    import torch

    # As in an engine: not on the default stream, which some calls refuse.
    with torch.cuda.stream(torch.cuda.Stream()):
        return 0 if run(options, record) else 1


if __name__ == "__main__":
    sys.exit(main())
