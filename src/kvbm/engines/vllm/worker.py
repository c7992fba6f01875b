"""The worker's adapter: registers this rank's KV tensors and carries out the leader's plans on them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvbm.config import Config
from kvbm.engines import weights
from kvbm.engines.vllm import compat, fingerprint
from kvbm.engines.vllm.adapter_loads import AdapterLoads
from kvbm.engines.vllm.model import digest_of_models, models_of, watch_sleep, watch_weights
from kvbm.gil import decoding
from kvbm.plans import Hello, LoadPlan, Report, StepPlan
from kvbm.runtime.rank import Rank
from kvbm.runtime.replicas import Replicas
from kvbm.runtime.worker import Outcome, Worker
from kvbm.tiers import registry
from kvbm.tiers.base import Fingerprint
from kvbm.transfer.layout import LayoutError

logger = logging.getLogger("kvbm")

# Worker adapters of this process by (engine, rank). Where vLLM runs scheduler and worker in one process and thread, as
# with one GPU, the leader reaches its only worker here, several milliseconds before the step's metadata does.
_local: dict[tuple[str, int], WorkerAdapter] = {}


def find_local(engine_id: str, rank: int) -> WorkerAdapter | None:
    return _local.get((engine_id, rank))


class WorkerAdapter:
    """Called by the connector from vLLM's worker thread, in the order of :mod:`kvbm.transfer.base`."""

    def __init__(self, config: Config, vllm_config: Any, kv_cache_config: Any) -> None:
        parallel = vllm_config.parallel_config
        replicas = None
        groups = kv_cache_config.kv_cache_groups
        if parallel.tensor_parallel_size > 1 and all(map(compat.same_on_all_ranks, groups)):
            replicas = Replicas(compat.tensor_parallel_group())
        rank, ranks = parallel.rank % parallel.world_size, parallel.world_size
        self._rank = Rank(
            config, rank, ranks, replicas, keeps_host=True, model=str(vllm_config.model_config.model),
            gather=lambda own: weights.gather_in_world(own, topic="packing"),
        )  # fmt: skip
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._engine_blocks = kv_cache_config.num_blocks
        self._groups = len(groups)
        lora = getattr(vllm_config, "lora_config", None)
        self._adapters = None if lora is None else AdapterLoads(lora, rank)
        self._name = (vllm_config.kv_transfer_config.engine_id, self.rank)
        # vLLM shuts workers down before the scheduler, so the leader flushes from here, while workers can still copy.
        self.before_close: Callable[[], None] | None = None

    @property
    def rank(self) -> int:
        return self._rank.rank

    @property
    def _worker(self) -> Worker | None:
        return self._rank.worker

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        models: list[Any] = []
        try:
            models = models_of(self._vllm_config)
            watch_weights(models, self._weights_changed)
            watch_sleep(self._drain)
        except Exception as error:
            logger.warning(
                "KVBM will not notice new weights in memory, or a sleeping engine: %s: %s", type(error).__name__, error
            )
        if registry.outlives_engine(self._config):
            # First of all, so that no rank waits for one that has failed at something else.
            self._rank.cache = self._describe(models)
            if self._rank.cache is None and not registry.NEAR.is_wanted(self._config):
                logger.warning(
                    "KVBM is off: the disk tier needs a fingerprint of the weights (see above), and there is no host "
                    "tier. Set DYN_KVBM_CPU_CACHE_GB to cache in host memory."
                )
                return
        try:
            self._rank.register(kv_caches, self._engine_blocks)
        except LayoutError as error:
            if self._groups == 1:
                raise
            raise LayoutError(
                f"{error}. KVBM cannot tell their blocks apart: unset VLLM_KV_CACHE_LAYOUT if it is set, "
                "or add --disable-hybrid-kv-cache-manager"
            ) from error

    def _weights_changed(self) -> None:
        if self._worker is not None:
            self._worker.weights_changed()

    def _drain(self) -> None:
        """vLLM is about to give the memory of its KV cache back."""
        if self._worker is not None:
            self._worker.drain()

    @property
    def weight_changes(self) -> int:
        return 0 if self._worker is None else self._worker.weight_changes

    def _describe(self, models: list[Any]) -> Fingerprint | None:
        """What names a cache that outlives this engine; None, with a sentence, when there can be none."""
        cache = fingerprint.describe(self._vllm_config, self._kv_cache_config)
        if cache is None:
            return None
        found = weights.fingerprint_or_warn(lambda: digest_of_models(models), weights.gather_in_world)
        return {**cache, "weights": found} if found else None

    def meet(self, alone: bool) -> Hello | None:
        """Finish the start. Returns what the leader must know; None when there is no cache to serve. ``alone``: no
        other connector writes to the engine's blocks."""
        hello = self._rank.open()
        if self._worker is not None and alone:
            ahead = compat.steps_ahead(self._vllm_config, self._kv_cache_config)
            self._worker.announcements.steps_ahead = ahead
        if hello is not None and self._name not in _local:
            self._thread = threading.get_ident()
            _local[self._name] = self
        return hello

    def shares_thread(self) -> bool:
        """True in the thread that submits this worker's steps. Kernels of the last step may still run; a load is
        ordered behind them."""
        return threading.get_ident() == self._thread

    def take_adapter_news(self) -> dict[int, tuple[int, str]]:
        """For the next report."""
        return {} if self._adapters is None else self._adapters.take_news()

    def load_adapters(self, wanted: Iterable[bytes]) -> None:
        """Between steps, or in a step as :class:`AdapterLoads` has it."""
        if self._adapters is not None:
            self._adapters.load_wanted(wanted)

    def _check_adapters(self, plan: StepPlan, stores: bool) -> None:
        """Refuse the loads, or the stores, of a step that depend on weights which vLLM does not compute it with."""
        changed = [] if self._adapters is None else self._adapters.changed(plan)
        for use in changed if self._worker is not None else ():
            if stores:
                self._worker.refuse(use.stores)
            else:
                self._worker.refuse(use.loads, use.blocks)

    def begin(self, plan: StepPlan) -> None:
        if self._worker is not None:
            self._worker.begin(plan)  # first: whatever becomes of the adapters, the step waits for what it must
        if plan.wanted:
            self.load_adapters(plan.wanted)

    def prefetch(self, slots: list[int], tokens: int) -> bool:
        if self._worker is None or not self.shares_thread():
            return False
        return self._worker.prefetch(slots, tokens)

    def end_prefetch(self) -> None:
        if self._worker is not None:
            self._worker.end_prefetch()

    def start_early(self, plan: LoadPlan) -> bool:
        """Begin a load before its step. False when that cannot be done from this thread; nothing has happened then."""
        if self._worker is None or not self.shares_thread():
            return False
        self._worker.start_early(plan)
        return True

    def start_loads(self, plan: StepPlan) -> None:
        if plan.adapters:
            self._check_adapters(plan, stores=False)
        if self._worker is not None:
            self._worker.start_loads(plan)

    def wait_layer(self, layer: str) -> None:
        if self._worker is not None:
            self._worker.wait_layer(layer)

    def start_stores(self, plan: StepPlan) -> None:
        if plan.adapters:
            self._check_adapters(plan, stores=True)
        if self._worker is not None:
            self._worker.start_stores(plan)

    def poll(self) -> Outcome | None:
        """Ended transfers. The engine's thread has submitted all of its step by now."""
        try:
            return None if self._worker is None else self._worker.poll()
        finally:
            decoding.end()

    # -- the end ------------------------------------------------------------------------------------------------------

    @property
    def keeping(self) -> bool:
        return self._worker is not None and self._worker.keeping

    def take_step(self, plan: StepPlan) -> Report | None:
        return None if self._worker is None else self._worker.take_step(plan)

    def hurry_stores(self) -> None:
        if self._worker is not None:
            self._worker.hurry_stores()

    def close(self) -> None:
        _local.pop(self._name, None)
        try:
            if self.before_close is not None:
                self.before_close()
        finally:
            if self._adapters is not None:
                self._adapters.close()
            self._rank.close()
