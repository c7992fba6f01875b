"""``DynamoConnector``: the class vLLM is pointed at. It only forwards, guards and translates."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvbm import config as settings
from kvbm import tracing as nvtx
from kvbm.engines.guard import Faults, guarded
from kvbm.engines.vllm import compat, early_check, resets, shortcuts
from kvbm.engines.vllm.groups import Groups, SeveralGroups
from kvbm.engines.vllm.scheduler import SchedulerAdapter
from kvbm.engines.vllm.sockets import remove_directory_at_exit
from kvbm.engines.vllm.start_signals import end_start_on_signals
from kvbm.engines.vllm.stats import Figures, KvbmPromMetrics, KvbmStats, figures, since
from kvbm.engines.vllm.worker import WorkerAdapter
from kvbm.plans import Report, StepPlan, decode_hello, decode_reports, decode_step, encode
from kvbm.runtime.worker import Outcome
from kvbm.tracing import annotate

logger = logging.getLogger("kvbm")

STAYS_OUT = "KVBM stays out of the way: %s. vLLM runs as if it were not configured."
REPORT_SECONDS = 0.25  # between two reports of figures to vLLM, while requests run


@dataclass
class DynamoConnectorMetadata(KVConnectorMetadata):
    """One step's plan on its way to the workers."""

    metadata: bytes


@dataclass
class WorkerReports(KVConnectorWorkerMetadata):
    """The workers' reports on their way to the scheduler, one entry for each rank."""

    reports: list[bytes] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReports)
        return WorkerReports(self.reports + other.reports)


@dataclass
class WorkerHello(KVConnectorHandshakeMetadata):
    """A worker's description of itself at start."""

    hello: bytes


class DynamoConnector(KVConnectorBase_V1):
    """KVBM under vLLM. Configure it with ``kv_connector_module_path="kvbm.vllm_integration.connector"``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        compat.speak_like_vllm()
        self._faults = Faults()
        self._adapter: SchedulerAdapter | WorkerAdapter | None = None
        self._loses_requests = False
        self._received: KVConnectorMetadata | None = None
        self._plan = StepPlan()
        self._outcome: Outcome | None = None
        self._reported: Figures = {}
        self._reported_at: tuple[int, ...] = ()
        self._report_due = 0.0
        transfer = vllm_config.kv_transfer_config
        config = settings.load(extra=transfer.kv_connector_extra_config)
        settings.require_tier(config)
        nvtx.switch(config.nvtx)
        is_scheduler = role == KVConnectorRole.SCHEDULER
        groups = _groups(vllm_config, kv_cache_config)
        if isinstance(groups, str):
            if is_scheduler:
                logger.warning(STAYS_OUT, groups)
            else:
                logger.info("This worker takes no part in KVBM: %s", groups)
            return
        self._loses_requests = groups.apart  # and no single blocks
        if config.fast_prompts:
            shortcuts.install(is_scheduler, groups.apart)
        if is_scheduler:
            _advise(config, transfer, groups)
            self._adapter = SchedulerAdapter(config, vllm_config, kv_cache_config, groups, self._faults)
            resets.install()
        else:
            self._adapter = WorkerAdapter(config, vllm_config, kv_cache_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No. vLLM asks before it loads weights, unless CUDA graphs are off: an early look at the settings."""
        early_check.check(extra_config)
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """No consumer depends on KVBM's stores, so vLLM need not recompute a preempted request for them."""
        return False

    # -- scheduler ----------------------------------------------------------------------------------------------------

    @guarded(None)
    def on_new_request(self, request: Any) -> None:
        self._adapter.new_request(request)

    @guarded(None)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._adapter.block_pool = gpu_block_pool

    @guarded((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._adapter.match(request, num_computed_tokens)

    @guarded(None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._adapter.allocated(request, blocks, num_external_tokens)

    @guarded(False)
    def before_reset(self, scheduler: Any) -> bool:
        """vLLM's scheduler resets its cache (:mod:`~kvbm.engines.vllm.resets`). False: as if KVBM were not here."""
        return self._adapter.resets.begin(scheduler, self._adapter.leader)

    @guarded(None)
    def others_write(self, blocks: Sequence[int]) -> None:
        """Another connector fills these blocks of the engine, beginning with the next step."""
        self._adapter.others_write(blocks)

    @guarded(lambda: DynamoConnectorMetadata(b""))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        plan = self._adapter.plan_step(scheduler_output)
        return DynamoConnectorMetadata(encode(plan) if plan else b"")

    @guarded(None)
    def update_connector_output(self, connector_output: Any) -> None:
        for request in connector_output.finished_recving or ():
            self._adapter.unheard.pop(request, None)
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, WorkerReports):
            reports: list[Report] = []
            try:
                reports = [report for part in meta.reports for report in decode_reports(part)]
            except Exception as error:  # both ends are one installation: a fault of the program
                self._adapter.switch_off(error)
            self._adapter.apply(reports)
        if connector_output.invalid_block_ids:
            self._adapter.lost(connector_output.invalid_block_ids)

    @guarded((False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Never holds blocks back: the next owner's step waits for the copies that read them (``Leader.fences``)."""
        self._adapter.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])  # type: ignore[no-any-return]

    @guarded(False)
    def has_pending_push_work(self) -> bool:
        return self._adapter.busy

    @guarded(True, failed=False)
    def reset_cache(self) -> bool:
        """False when blocks may be left: after new weights they would be wrong, so vLLM reports the failed reset."""
        return self._adapter.reset()

    @annotate("set_xfer_handshake_metadata")
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        if self._adapter is None:
            return
        if not metadata:
            # vLLM changes some settings in the processes of its workers only, batch invariance for one.
            logger.warning(STAYS_OUT, "no worker takes part, and the workers' log says why")
            self._adapter = None
            return
        self._adapter.meet([decode_hello(part.hello) for part in metadata.values()])

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): part for rank, part in metadata.items()})

    # -- worker -------------------------------------------------------------------------------------------------------

    @annotate("register_kv_caches")
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._adapter is not None:
            self._adapter.register(kv_caches)

    @annotate("get_handshake_metadata")
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        hello = None if self._adapter is None else self._adapter.meet(compat.is_alone(self))
        return None if hello is None else WorkerHello(encode(hello))

    @annotate("bind_connector_metadata")
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._receive(connector_metadata)

    def _receive(self, metadata: KVConnectorMetadata) -> None:
        """Take in a step's plan. vLLM hands it over twice, before the step and at its beginning. With a plan that
        cannot be read the step waits for all announced loads."""
        if metadata is self._received:
            return
        self._received, self._plan = metadata, StepPlan()
        try:
            assert isinstance(metadata, DynamoConnectorMetadata)
            if metadata.metadata:
                self._plan = decode_step(metadata.metadata)
        except Exception as error:  # both ends are one installation: a fault of the program
            self._faults.record("reading a plan", error)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._received = None
        self._plan = StepPlan()

    @guarded(None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._receive(kv_connector_metadata)
        self._adapter.begin(self._plan)

    @guarded(None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._adapter.start_loads(self._plan)

    @guarded(None)
    def wait_for_layer_load(self, layer_name: str) -> None:
        self._adapter.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are copied out once, when the step is done, not in pieces behind every layer."""

    @guarded(None)
    def wait_for_save(self) -> None:
        self._adapter.start_stores(self._plan)

    @guarded((None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._outcome = self._adapter.poll()
        return None, (self._outcome.arrived or None) if self._outcome else None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As :meth:`get_finished`, since vLLM 0.30. With several groups a failed load is told of here."""
        results = super().get_transfer_results(finished_req_ids)
        if self._loses_requests and self._outcome:
            results.failed_recving = self._outcome.failed
        return results

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._outcome.bad_blocks if self._outcome and not self._loses_requests else set()

    @guarded(None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        outcome, self._outcome = self._outcome, None
        more = Report(self._adapter.rank, faults=self._faults.take(), adapters=self._adapter.take_adapter_news())
        reports = [report for report in (outcome and outcome.report, more) if report]
        return WorkerReports([encode(reports)]) if reports else None

    # -- both ---------------------------------------------------------------------------------------------------------

    @guarded(None)
    def get_kv_connector_stats(self) -> KvbmStats | None:
        if not isinstance(self._adapter, SchedulerAdapter):
            return None
        # Every step asks. Telling takes 50 µs, so while requests run it is done a few times a second; the step that
        # ends the last of them tells in any case, because no other may follow it.
        now = time.monotonic()
        if self._adapter.serving and now < self._report_due:
            return None
        source, at = self._adapter.observer.source, self._adapter.changes
        if source is None or at == self._reported_at:
            return None
        known = figures(source.snapshot())
        stats = KvbmStats(data=since(known, self._reported))
        self._reported, self._reported_at, self._report_due = known, at, now + REPORT_SECONDS
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvbmStats:
        return KvbmStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> KvbmPromMetrics:
        return KvbmPromMetrics(*args, **kwargs)

    @guarded(())
    def take_events(self) -> Iterable[Any]:
        """Called last, once for every step that vLLM has taken in the results of."""
        if not isinstance(self._adapter, SchedulerAdapter):
            return ()
        self._adapter.step_ended()
        return self._adapter.take_events()

    @guarded(None)
    def shutdown(self) -> None:
        if self._adapter is not None:
            self._adapter.close()


early_check.check_command_line(sys.argv)
end_start_on_signals(sys.argv)
remove_directory_at_exit(sys.argv)
if compat.fails_whole_requests():
    SupportsHMA.register(DynamoConnector)  # or vLLM gives windowed layers blocks for all tokens


def _groups(vllm_config: Any, kv_cache_config: Any) -> Groups | str:
    """How the model's blocks are spread over groups of layers; why KVBM cannot serve this model or set-up if so."""
    if kv_cache_config is None:
        return "vLLM did not say how its KV cache is made up"
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} is {getattr(parallel, name)}, and context parallelism is not supported so far"
    whole_prompts = compat.needs_whole_prompts(vllm_config)
    if whole_prompts is not None:
        return whole_prompts
    groups = kv_cache_config.kv_cache_groups
    attention = compat.unsupported_attention(groups[0]) if len(groups) == 1 else ""
    if attention is None:
        return Groups()
    windows = compat.windows(vllm_config, kv_cache_config)
    if windows is not None:
        return SeveralGroups(windows, vllm_config.cache_config.block_size)
    if (mode := compat.unsaved_states(kv_cache_config)) is not None:
        return (
            f"layers of the model keep a state, and vLLM saves none at block boundaries: mamba_cache_mode is {mode!r}. "
            "With --enable-prefix-caching and --mamba-cache-mode align it does"
        )
    if attention:
        return f"the model cannot be served from a cache of blocks: {attention}"
    kinds = ", ".join(dict.fromkeys(type(group.kv_cache_spec).__name__ for group in groups))
    return (
        f"the model has {len(groups)} KV cache groups ({kinds}), and not all of them can be kept so far. With "
        "--disable-hybrid-kv-cache-manager vLLM makes one of them, if it can, for more GPU memory"
    )


def _advise(config: settings.Config, transfer: Any, groups: Groups) -> None:
    """Log once, at start, the warnings for the user."""
    compat.warn_if_untested()
    for warning in config.warnings:
        logger.warning("%s", warning)
    for name, reason in config.unused_because.items():
        logger.info("%s is set but not used: %s", name, reason)
    if groups.apart and config.onboard == "sync":
        logger.warning(
            "KVBM_ONBOARD=sync has no effect: layers of this model see different parts of a prompt, which are always "
            "loaded outside of the step"
        )
    policy = getattr(transfer, "kv_load_failure_policy", "recompute")
    if policy != "recompute":
        logger.warning(
            "kv_load_failure_policy is %r: a block that cannot be brought back will fail its request. "
            'Add "kv_load_failure_policy": "recompute" to --kv-transfer-config and it is computed again instead.',
            policy,
        )
