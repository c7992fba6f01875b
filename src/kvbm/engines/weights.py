"""The fingerprint of the weights that an engine has loaded. It is part of the name of a persistent cache.

Names, sizes and times of files do not identify weights: a copy may preserve all three, and the files may change after
the engine has read them. So every rank hashes the tensors that it computes with, and all ranks agree on one digest of
all shards (:func:`fingerprint`).

A tensor in host memory is hashed with XXH3. A tensor on a device is reduced there, at the speed of device memory: its
bytes are read as 32-bit lanes, and each row of ``LANES`` lanes is multiplied by odd 64-bit factors and summed. With an
odd factor, a change of a single lane always changes the sum. The factors differ by position. Two sums with independent
factors miss any other change, such as two swapped values, with a probability below 2**-64.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

logger = logging.getLogger("kvbm")

LANES = 1 << 16  # lanes of a row, which has one sum for each set of factors; part of the digest's definition
BATCH_ROWS = 32  # rows per call: 8 MiB of weights, 16 MiB of temporary memory, because the engine has filled the device
COPY_BYTES = 8 << 20  # maximum size of a copy of a tensor that is not contiguous
GATHER_SECONDS = 120.0  # how long a rank waits for the digests of all others

_SEED = b"kvbm weights 1"


class UnreadableError(RuntimeError):
    """The loaded weights cannot be fingerprinted; the message says why."""


class Named(NamedTuple):
    """A tensor with its name in the model, or the parts of a tensor that is read piece by piece."""

    name: str
    parts: Iterable[torch.Tensor]


# -- the digest -------------------------------------------------------------------------------------------------------


def digest_of(tensors: Iterable[Named]) -> str:
    """One digest of these tensors: names, types, shapes and every byte. Raises UnreadableError."""
    described: list[Any] = []
    sums: dict[torch.device, _Sums] = {}
    # A parameter's class may override torch's functions.
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for name, parts in sorted(tensors, key=lambda named: named.name):
            for part in parts:
                for label, tensor in _plain(name, part):
                    try:
                        described.append([label, *_describe(tensor, sums)])
                    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
                        raise UnreadableError(f"{label}: {type(error).__name__}: {error}") from error
        found = hashlib.sha256(json.dumps(described).encode())
        for device in sums.values():
            found.update(device.collect())
    return found.hexdigest()


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors inside a wrapper subclass, or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor.detach()
        return
    for inner in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from _plain(f"{name}.{inner}", getattr(tensor, inner))


def _describe(tensor: torch.Tensor, sums: dict[torch.device, _Sums]) -> list[Any]:
    """The digest's entry of a tensor. The sums of device tensors are collected later, in the same order."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    found: list[Any] = [str(tensor.dtype), list(tensor.shape), order]
    if tensor.is_meta or not tensor.numel():
        return found
    flat = _bytes_of(tensor.resolve_conj().resolve_neg().permute(order))
    if tensor.device.type == "cpu":
        hasher = xxhash.xxh3_128(_SEED)
        for piece in flat:
            hasher.update(piece.numpy())
        return [*found, hasher.hexdigest()]
    if tensor.device not in sums:
        sums[tensor.device] = _Sums(tensor.device)
    for piece in flat:
        sums[tensor.device].add(piece)
    return found


def _bytes_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's memory as bytes. A tensor with gaps is copied in pieces of at most ``COPY_BYTES``."""
    if tensor.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # torch cannot copy every packed dtype
    if tensor.is_contiguous() or tensor.nbytes <= COPY_BYTES:
        yield tensor.contiguous().reshape(-1).view(torch.uint8)
        return
    row = tensor.nbytes // tensor.shape[0]
    for part in tensor.unbind() if row > COPY_BYTES else tensor.split(COPY_BYTES // row):
        yield from _bytes_of(part)


class _Sums:
    """Weighted sums of one device's tensors. Only :meth:`collect` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._factors = _factors().to(device)
        self._product = torch.empty((BATCH_ROWS, LANES), dtype=torch.int64, device=device)
        self._found: list[torch.Tensor] = []

    def add(self, flat: torch.Tensor) -> None:
        whole = flat.numel() // (4 * LANES) * (4 * LANES)
        for start in range(0, whole, 4 * LANES * BATCH_ROWS):
            self._reduce(_lanes(flat[start : min(start + 4 * LANES * BATCH_ROWS, whole)]).view(-1, LANES))
        if whole < flat.numel():
            rest = torch.nn.functional.pad(flat[whole:], (0, -flat.numel() % 4))
            self._reduce(_lanes(rest).view(1, -1))

    def _reduce(self, rows: torch.Tensor) -> None:
        product = self._product[: rows.shape[0], : rows.shape[1]]
        for factors in self._factors:
            torch.mul(rows, factors[: rows.shape[1]], out=product)
            self._found.append(product.sum(1))

    def collect(self) -> bytes:
        return torch.cat(self._found).cpu().numpy().tobytes() if self._found else b""


def _lanes(flat: torch.Tensor) -> torch.Tensor:
    return (flat.clone() if flat.storage_offset() % 4 else flat).view(torch.int32)


@functools.cache
def _factors() -> torch.Tensor:
    """Two sets of odd factors, the same in every process and release."""
    drawn = np.frombuffer(hashlib.shake_256(_SEED).digest(2 * 8 * LANES), np.dtype("<i8")) | 1
    return torch.from_numpy(drawn.reshape(2, LANES))


# -- modules ----------------------------------------------------------------------------------------------------------


def tensors_of(modules: Sequence[torch.nn.Module]) -> list[Named]:
    """All parameters and buffers, each once, with their names without the wrappers of LoRA adapters.

    Running maxima (``amax``), from which an engine calibrates scales, are left out: they depend on past requests.
    """
    found = []
    for number, module in enumerate(modules):
        buffers = ((name, tensor) for name, tensor in module.named_buffers() if "amax" not in name.rpartition(".")[2])
        for name, tensor in itertools.chain(module.named_parameters(), buffers):
            found.append(Named(f"{number}.{name.replace('.base_layer.', '.')}", [tensor]))
    return found


def roots(of: Sequence[torch.nn.Module] | None = None) -> list[torch.nn.Module]:
    """The outermost modules in this process, or those that contain the modules ``of``, in the order of ``of``."""
    parents: dict[int, list[torch.nn.Module]] = {}
    live = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
    for module in live:
        for child in module.__dict__.get("_modules", {}).values():
            if child is not None:
                parents.setdefault(id(child), []).append(module)
    found: dict[int, torch.nn.Module] = {}
    visited: set[int] = set()
    queue = list(reversed(live if of is None else of))
    while queue:
        module = queue.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        if id(module) in parents:
            queue += parents[id(module)]
        else:
            found[id(module)] = module
    return list(found.values())


def digest_of_process() -> str:
    """The digest of all models in this process, for engines that load one model, or one and its draft, per process."""
    gc.collect()  # frees models that nothing references any more
    models = [root for root in roots() if next(root.parameters(), None) is not None]
    if not models:
        raise UnreadableError("no loaded model was found in this process")
    return digest(json.dumps(sorted([configuration_of(model), digest_of(tensors_of([model]))] for model in models)))


def configuration_of(model: torch.nn.Module) -> str:
    """A model's class and configuration: they hold numbers that are in no tensor, such as the epsilon of its norms."""
    config = getattr(model, "config", None)
    told = config.to_dict() if hasattr(config, "to_dict") else str(config)
    text = json.dumps([type(model).__qualname__, told], sort_keys=True, default=str)
    return re.sub(r" at 0x[0-9a-f]+", "", text)  # memory addresses of objects differ between processes


# -- agreement --------------------------------------------------------------------------------------------------------


def fingerprint_or_warn(read: Callable[[], str], gather: Callable[[str], Sequence[str]]) -> str:
    """As :func:`fingerprint`; empty, with the reason in the log, when there is none: no tier outlives this engine."""
    try:
        return fingerprint(read, gather)
    except UnreadableError as error:
        logger.warning("Cannot fingerprint the weights; persistence is off: %s", error)
        return ""


def fingerprint(read: Callable[[], str], gather: Callable[[str], Sequence[str]]) -> str:
    """The digest that all ranks agree on. Every rank calls this; a rank that cannot ``read`` its own weights sends an
    empty digest. Raises UnreadableError."""
    began = time.monotonic()
    own = reason = ""
    try:
        own = read()
    except Exception as error:
        reason = str(error) if isinstance(error, UnreadableError) else f"{type(error).__name__}: {error}"
    logger.debug("hashed the weights of this rank in %.2f s: %s", time.monotonic() - began, own)
    try:
        shards = gather(own)
    except Exception as error:
        raise UnreadableError(reason or f"exchange of digests failed: {type(error).__name__}: {error}") from error
    if not all(shards):
        without = ", ".join(str(rank) for rank, shard in enumerate(shards) if not shard)
        raise UnreadableError(reason or f"rank {without} cannot read its weights")
    return digest(json.dumps(list(shards)))


_meetings: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # by topic


def gather_in_world(own: str, seconds: float = GATHER_SECONDS, topic: str = "weights") -> list[str]:
    """Every rank's text on a topic, by rank, exchanged through the key-value store of torch.distributed.

    This is no collective: an absent rank costs ``seconds`` and does not disturb the engine's process groups. All ranks
    succeed or all raise: the first rank that has every text, or stops waiting, decides for all of them.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    store = dist.distributed_c10d._get_default_store()
    meeting = next(_meetings[topic])
    keys = [f"kvbm/{topic}/{meeting}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], f"={own}")
    verdict = f"kvbm/{topic}/{meeting}/verdict"
    try:
        store.wait(keys, timedelta(seconds=seconds))
        complete = True
    except Exception:
        complete = False
    # The store compares and sets atomically, so the first verdict wins; it returns that verdict.
    if store.compare_set(verdict, "", "complete" if complete else "gave up") != b"complete":
        reason = "another rank stopped waiting" if complete else f"not all ranks have answered within {seconds:g} s"
        raise UnreadableError(reason)
    return [store.get(key).decode().removeprefix("=") for key in keys]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
