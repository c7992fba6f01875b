"""Two ranks of one engine without the engine: processes with a cache each, joined by torch.distributed over gloo.

A test hands both of them a function of this module's :class:`Party` by name and gets what each of them returned.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import random
import time
import traceback
from pathlib import Path
from typing import Any

BLOCKS = 32
LAYERS = 3


class Party:
    """One rank, in its own process."""

    def __init__(self, rank: int, ranks: int, folder: str, device: str) -> None:
        # NCCL refuses two ranks on one GPU, unless it takes them for ranks of two machines.
        os.environ["NCCL_HOSTID"] = f"machine {rank}"
        import torch
        import torch.distributed as dist

        self.device = device
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
        torch.set_num_threads(1)
        self.place = rank
        self.ranks = ranks
        self.lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())
        logging.getLogger("kvbm").addHandler(handler)
        logging.getLogger("kvbm").setLevel(logging.INFO)

    def start(self, settings: dict[str, Any], patch: dict[str, Any] | None = None, same: bool = True) -> dict[str, Any]:
        """``patch``: what to break on this rank; ``same``: whether the ranks' caches hold the same bytes."""
        import torch
        import torch.distributed as dist

        from kvbm import config
        from kvbm.runtime.rank import Rank
        from kvbm.runtime.replicas import Replicas
        from kvbm.tiers.host import shared
        from kvbm.transfer import wire

        self.lines.clear()
        patch = patch or {}
        machine, make, patience = shared.machine, wire.Wire.__init__, wire.PATIENCE_SECONDS
        if "machine" in patch:
            shared.machine = lambda: patch["machine"][self.place]
        wire.PATIENCE_SECONDS = patch.get("patience", patience)
        if patch.get("no group on") == self.place:
            wire.Wire.__init__ = _refuse
        torch.manual_seed(0 if same else self.place)
        self.cache = [torch.randint(0, 255, (BLOCKS, 16, 36), dtype=torch.uint8).to(self.device) for _ in range(LAYERS)]
        self.rank = Rank(
            config.load(extra=settings, environ={}, files=[]), self.place, self.ranks, Replicas(dist.group.WORLD)
        )
        try:
            self.rank.register({f"layer {i}": layer for i, layer in enumerate(self.cache)}, BLOCKS)
            hello = self.rank.open()
        finally:
            shared.machine, wire.Wire.__init__, wire.PATIENCE_SECONDS = machine, make, patience
        slab = self.rank._slab
        return {
            "slots": next(iter(hello.slots.values())),
            "shared_by": hello.shared_by,
            "slab": slab.size // slab.slot_bytes,
            "block_bytes": hello.block_bytes,
            "said": list(self.lines),
            "mapped": _mapped(),
        }

    def step(self, plan: bytes, skip_loads: bool = False) -> dict[str, Any]:
        """What a rank does in a step, and further polls until nothing is under way."""
        from kvbm.plans import decode_step

        worker, step = self.rank.worker, decode_step(plan)
        began = time.monotonic()
        worker.begin(step)
        if not skip_loads:
            worker.start_loads(step)
        for layer in range(LAYERS):
            worker.wait_layer(f"layer {layer}")
        worker.start_stores(step)
        loads, stores, faults = {}, {}, []
        waits = [] if skip_loads else [load.id for load in step.loads]
        waits += [store.id for store in step.stores]
        while set(waits) - set(loads) - set(stores):
            report = worker.poll().report
            loads |= {result.id: result.bad for result in report.loads}
            stores |= {result.id: result.ok for result in report.stores}
            faults += list(report.faults)
            time.sleep(0.001)
        return {"loads": loads, "stores": stores, "faults": faults, "seconds": time.monotonic() - began}

    def blocks(self) -> list[str]:
        """A digest of every block of the cache."""
        return [
            hashlib.sha256(b"".join(layer[i].cpu().numpy().tobytes() for layer in self.cache)).hexdigest()
            for i in range(BLOCKS)
        ]

    def fill(self, seed: int) -> None:
        """Other bytes everywhere, the same ones on every rank with the same seed."""
        import torch

        torch.manual_seed(seed)
        for layer in self.cache:
            layer.copy_(torch.randint(0, 255, layer.shape, dtype=torch.uint8))

    def break_next(self, what: str, times: int = 1) -> None:
        """The next calls of a part of the copier fail on this rank: ``scatter``, ``gather`` or ``begin_step``."""
        copier = self.rank.worker._copier
        part = copier._inner if what == "begin_step" else copier._rows
        real, left = getattr(part, what), [times]

        def broken(*arguments: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise OSError(f"{what} broke")
            return real(*arguments)

        setattr(part, what, broken)

    def close(self) -> list[str]:
        self.rank.close()
        return _mapped()


def _refuse(self: Any, *arguments: Any) -> None:
    raise RuntimeError("no network card")


def _mapped() -> list[str]:
    """Inodes of memory of ours that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[4] for line in lines if "kvbm-host-tier" in line})


def _live(rank: int, ranks: int, folder: str, device: str, pipe: Any) -> None:
    party = Party(rank, ranks, folder, device)
    while True:
        order = pipe.recv()
        if order is None:
            return
        name, arguments = order
        try:
            pipe.send((True, getattr(party, name)(**arguments)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class Ranks:
    """Both processes, as a test sees them."""

    def __init__(self, folder: Path, device: str = "cpu", count: int = 2) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_live, args=(rank, count, str(folder), device, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def tell(self, rank: int, name: str, **arguments: Any) -> None:
        self.pipes[rank].send((name, arguments))

    def hear(self, rank: int, seconds: float = 60) -> Any:
        assert self.pipes[rank].poll(seconds), f"rank {rank} hangs"
        good, value = self.pipes[rank].recv()
        if not good:
            raise RankFailedError(value)
        return value

    def all(self, name: str, **arguments: Any) -> list[Any]:
        """Both ranks do the same thing; what each of them returned."""
        for rank in range(len(self.pipes)):
            self.tell(rank, name, **arguments)
        return [self.hear(rank) for rank in range(len(self.pipes))]

    def one(self, rank: int, name: str, **arguments: Any) -> Any:
        self.tell(rank, name, **arguments)
        return self.hear(rank)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
        self.kill()


class RankFailedError(AssertionError):
    """A rank raised; the message is its traceback."""


def places(seed: int, count: int, slots: int) -> tuple[list[int], list[int]]:
    """Slots and blocks for a transfer, in runs and alone."""
    source = random.Random(seed)
    blocks = source.sample(range(BLOCKS), count)
    if seed % 2:
        blocks = sorted(blocks)
    return source.sample(range(slots), count), blocks
