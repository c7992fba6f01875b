"""The LoRA adapters of an engine as the leader knows them: by the weights that every rank has loaded."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from kvbm.engines.vllm import compat
from kvbm.engines.vllm.worker import WorkerAdapter
from kvbm.plans import AdapterUse, Report

# Seconds that a request is deferred (`None` to vLLM) while the ranks load its adapter and report the digest. They
# answer with the next step. vLLM would have loaded the adapter in that step as well.
ASK_SECONDS = 5.0


class Weights(NamedTuple):
    """An adapter's weights on all ranks. Another object whenever they change."""

    adapter: int
    digest: str  # the same in every engine with these weights
    loads_by_rank: tuple[int, ...]
    are_first: bool  # this engine has had no others for the adapter

    def used_by(self, loads: Iterable[int] = (), stores: Iterable[int] = (), blocks: Iterable[int] = ()) -> AdapterUse:
        return AdapterUse(self.adapter, list(self.loads_by_rank), list(loads), list(stores), list(blocks))


class Adapters:
    """Called from vLLM's scheduler thread.

    ``loads_in_any_step``: whether ranks can load an adapter for the leader in a step that computes something.
    ``local``: the only rank, where it is in this process. ``max_loras``: adapters that they load in one step, in front
    of the requests that run.
    """

    def __init__(
        self, ranks: int, loads_in_any_step: bool, local: WorkerAdapter | None = None, max_loras: int = 1
    ) -> None:
        self._ranks = ranks
        self._loads_in_any_step = loads_in_any_step
        self._local = local
        self._max_loras = max_loras
        self._loads: dict[int, list[tuple[int, str]]] = {}  # adapter -> the last load of each rank
        self._known: dict[int, Weights] = {}
        self._ever_loaded: set[int] = set()
        self._asked: dict[int, float] = {}  # adapter -> until when its requests wait for an answer
        self._wanted: dict[int, bytes] = {}  # not asked yet
        # What vLLM's prefix cache calls an adapter -> (the generation of that cache, the weights of its blocks there:
        # an adapter's number while they are not known, None where they may be different ones)
        self._on_device: dict[tuple[str, ...], tuple[Any, Weights | int | None]] = {}

    def apply(self, reports: Iterable[Report]) -> None:
        changed: set[int] = set()
        for report in reports:
            for adapter, load in report.adapters.items():
                self._loads.setdefault(adapter, [(0, "")] * self._ranks)[report.rank] = load
                changed.add(adapter)
        for adapter in changed:
            self._update(adapter, self._loads[adapter])

    def _update(self, adapter: int, loads: list[tuple[int, str]]) -> None:
        numbers = tuple(number for number, _ in loads)
        known = self._known.get(adapter)
        if known is not None and known.loads_by_rank == numbers:
            return
        if all(digest for _, digest in loads):
            digest = hashlib.sha256("\n".join(digest for _, digest in loads).encode()).hexdigest()
            self._known[adapter] = Weights(adapter, digest, numbers, adapter not in self._ever_loaded)
            self._asked.pop(adapter, None)
        else:
            # A rank does not have it, or cannot identify it. Its requests are computed until that changes.
            self._known.pop(adapter, None)
            self._asked[adapter] = 0.0
        if any(numbers):
            self._ever_loaded.add(adapter)

    def weights(self, lora: Any) -> Weights | None:
        """The weights that vLLM computes with for this adapter, as far as every rank has reported them."""
        return self._known.get(lora.lora_int_id)

    def refresh(self) -> None:
        """Take in what has been loaded since the last step, where the only rank can be called."""
        if self._local is not None and self._local.shares_thread() and (news := self._local.take_adapter_news()):
            self.apply([Report(0, adapters=news)])

    def ask(self, lora: Any, others_run: bool) -> bool:
        """Have the ranks load an adapter that is not known. True while their answer is worth waiting for."""
        adapter = lora.lora_int_id
        until = self._asked.get(adapter)
        if until is not None:
            return time.monotonic() < until
        encoded = msgspec.msgpack.encode(lora)
        if self._local is not None and self._local.shares_thread():
            self._asked[adapter] = 0.0
            self._local.load_adapters([encoded])
            self.refresh()
            return False
        if others_run and not self._loads_in_any_step:
            return False
        if len(self._wanted) >= self._max_loras:
            return True  # in the next step
        self._asked[adapter] = time.monotonic() + ASK_SECONDS
        self._wanted[adapter] = encoded
        return True

    def take_wanted(self, computes: bool) -> list[bytes]:
        """For :attr:`kvbm.plans.StepPlan.wanted`. ``computes``: whether the step has tokens to compute."""
        if not self._wanted:
            return []
        wanted, self._wanted = self._wanted, {}
        if computes and not self._loads_in_any_step:
            self._asked.update(dict.fromkeys(wanted, 0.0))
            return []
        return list(wanted.values())

    def admit(self, lora: Any, weights: Weights | None, block_pool: Any) -> bool:
        """vLLM schedules a request of this adapter. Returns whether all blocks of the adapter in vLLM's own prefix
        cache were computed with these weights.

        Until it is reset, that cache identifies an adapter by name and path and ignores its weights.
        """
        name, generation = compat.adapter_name(lora), compat.prefix_cache_generation(block_pool)
        now: Weights | int | None = lora.lora_int_id if weights is None else weights
        before = self._on_device.get(name)
        if before is not None and before[0] is generation and before[1] != now:
            was_unknown = weights is not None and weights.are_first and before[1] == weights.adapter
            now = now if was_unknown else None
        self._on_device[name] = generation, now
        return isinstance(now, Weights)
