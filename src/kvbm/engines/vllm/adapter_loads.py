"""The LoRA adapters that a worker has loaded, by their weights.

An adapter's name, number and path do not identify its weights: files are replaced, a hub id gets a new commit, an
adapter is loaded again in place, or dropped from vLLM's CPU cache and read again. The worker sees every load. It takes
a digest of the tensors that vLLM keeps and numbers each change, so that the leader can name the weights that a block
depends on, and each rank can compare them with the weights that it has loaded last.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
from collections.abc import Iterable
from itertools import count
from typing import Any

import msgspec
import torch
from vllm.lora.request import LoRARequest

from kvbm.plans import AdapterUse, StepPlan

logger = logging.getLogger("kvbm")

NOT_LOADED = (0, "")

# Settings of vLLM that decide which of an adapter's weights are applied, and how.
_APPLIED = ("target_modules", "enable_tower_connector_lora", "enable_mixed_moe_lora_format", "enable_moe_shared_loras")

# By the LoRAConfig that vLLM's manager and our worker share: a process may hold several engines.
_observers: dict[int, AdapterLoads] = {}


class AdapterLoads:
    """Watches vLLM's LoRA manager of one worker, in that worker's thread."""

    def __init__(self, lora_config: Any, rank: int) -> None:
        self._config = lora_config
        self._rank = rank
        self._numbers = count(1)
        self._last: dict[int, tuple[int, str]] = {}  # adapter -> (number of its load, digest)
        self._news: dict[int, tuple[int, str]] = {}  # not yet reported to the leader
        self._failed = False
        self._manager: Any = None
        try:
            _watch_loads()
            self._manager = _find_manager(lora_config)
        except Exception as error:
            logger.warning(
                "KVBM cannot see which LoRA adapters vLLM loads: %s: %s. Requests with adapters are not cached.",
                type(error).__name__, error,
            )  # fmt: skip
        _observers[id(lora_config)] = self

    def close(self) -> None:
        if _observers.get(id(self._config)) is self:
            del _observers[id(self._config)]
        self._manager = None

    def loaded(self, manager: Any, model: Any) -> None:
        """vLLM has read an adapter's weights and is about to use them. Called for every load; never raises."""
        self._manager = manager
        try:
            _detach(model)
            digest = weights_digest(model, self._config)
        except Exception as error:
            digest = ""
            if not self._failed:
                self._failed = True
                logger.warning(
                    "KVBM cannot identify the weights of LoRA adapter %s: %s. Requests with such adapters are not "
                    "cached.",
                    model.id, error,
                )  # fmt: skip
        if not digest or self._last.get(model.id, NOT_LOADED)[1] != digest:
            self._last[model.id] = self._news[model.id] = next(self._numbers), digest

    def load_wanted(self, wanted: Iterable[bytes]) -> None:
        """Load adapters that the leader wants to know, through vLLM's own path, unless they are loaded.

        Only before vLLM has chosen the adapters of a step, or in a step that computes nothing: the load may take the
        slot of another adapter.
        """
        for encoded in wanted:
            request = msgspec.msgpack.decode(encoded, type=LoRARequest)
            request.load_inplace = False
            try:
                if self._manager is not None and request.lora_int_id not in self._manager.list_adapters():
                    self._manager.add_adapter(request)
            except Exception as error:  # vLLM meets the same error when it schedules the request
                logger.warning("LoRA adapter %s was not loaded: %s", request.lora_name, error)
            self._news[request.lora_int_id] = self._last.get(request.lora_int_id, NOT_LOADED)

    def changed(self, plan: StepPlan) -> list[AdapterUse]:
        """Parts of a step that depend on other weights than vLLM has loaded last. Once vLLM has chosen the adapters of
        a step, these are the weights that the step computes with."""
        last = self._last
        return [use for use in plan.adapters if last.get(use.adapter, NOT_LOADED)[0] != use.loads_by_rank[self._rank]]

    def take_news(self) -> dict[int, tuple[int, str]]:
        news, self._news = self._news, {}
        return news


def _detach(model: Any) -> None:
    """Copy weights that may still be a mapping of their file, so that they do not change with the file.

    On a GPU vLLM has copied them to pinned memory. On a CPU it has not, unless it had to convert them.
    """
    parts = [*model.loras.values(), *getattr(model, "modules_to_save", {}).values()]
    for part in parts:
        for name, value in vars(part).items():
            setattr(part, name, _copied(value))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone() if value.device.type == "cpu" and not value.is_pinned() else value
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return value


def weights_digest(model: Any, lora_config: Any) -> str:
    """SHA-256 over everything that a loaded adapter consists of but its number; the same in every process.

    Raises TypeError for an attribute of an unknown type: it may hold weights.
    """
    hasher = hashlib.sha256(b"kvbm adapter 1\0")
    parts = {name: value for name, value in vars(model).items() if name != "id"}
    _hash(hasher, [parts, {name: getattr(lora_config, name, None) for name in _APPLIED}])
    return hasher.hexdigest()


def _hash(hasher: Any, value: Any) -> None:
    """Every part is preceded by its type and size, so that no two values give the same bytes."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        hasher.update(f"tensor {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy())
    elif value is None or isinstance(value, bool | int | float | str | torch.dtype):
        text = repr(value).encode()
        hasher.update(f"{type(value).__name__} {len(text)}\0".encode() + text)
    elif isinstance(value, dict):
        hasher.update(f"dict {len(value)}\0".encode())
        for key in sorted(value, key=str):
            _hash(hasher, key)
            _hash(hasher, value[key])
    elif isinstance(value, list | tuple):
        hasher.update(f"list {len(value)}\0".encode())
        for item in value:
            _hash(hasher, item)
    elif type(value).__module__.startswith("vllm.lora.") and hasattr(value, "__dict__"):
        hasher.update(f"{type(value).__name__}\0".encode())
        _hash(hasher, vars(value))
    else:
        raise TypeError(f"unknown part of an adapter: {type(value).__name__}")


def _find_manager(lora_config: Any) -> Any:
    """vLLM's LoRA manager of this worker. vLLM does not hand it to connectors, so it is looked up once, at start."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    for found in gc.get_objects():
        if issubclass(type(found), WorkerLoRAManager) and getattr(found, "lora_config", None) is lora_config:
            return found
    return None  # until it loads an adapter


def _watch_loads() -> None:
    """Hear of every adapter that vLLM loads in this process from now on."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    load = WorkerLoRAManager._load_adapter
    if hasattr(load, "kvbm_watched"):
        return

    @functools.wraps(load)
    def _load_adapter(manager: Any, *args: Any, **kwargs: Any) -> Any:
        model = load(manager, *args, **kwargs)
        observer = _observers.get(id(manager.lora_config))
        if observer is not None:
            observer.loaded(manager, model)
        return model

    _load_adapter.kvbm_watched = True  # type: ignore[attr-defined]
    WorkerLoRAManager._load_adapter = _load_adapter
