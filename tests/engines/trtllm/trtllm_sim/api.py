"""Stands for the modules of ``tensorrt_llm`` that a connector imports: names, fields and abstract methods, no engine.

Two generations of the interface: ``1.2`` has the older module path and the plain request data; ``1.3`` the newer path,
with block hashes, priorities, salts and layer groups, and a call to wait for the start. ``1.0`` is as 1.2, and does not
build metadata for an iteration in which all requests are waiting for loads.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType
from typing import Any

GENERATIONS = ("1.0", "1.2", "1.3")


class LlmRequestState(IntEnum):
    UNKNOWN = 0
    CONTEXT_INIT = 2
    GENERATION_IN_PROGRESS = 4
    GENERATION_COMPLETE = 6
    DISAGG_GENERATION_TRANS_IN_PROGRESS = 8
    DISAGG_CONTEXT_TRANS_IN_PROGRESS = 20


@dataclass
class OldRequestData:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class NewRequestData(OldRequestData):
    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)
    something_of_tomorrow: object = None


@dataclass
class SchedulerOutput:
    new_requests: list[Any] = field(default_factory=list)
    cached_requests: list[Any] = field(default_factory=list)
    attention_dp_rank: int | None = None


class KvCacheConnectorWorker(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def register_forward_pass_callable(self) -> Any:
        return None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Any) -> None: ...

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abstractmethod
    def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> Any: ...


class KvCacheConnectorScheduler(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]: ...

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...

    def wait_for_initialization(self) -> None:
        return

    def request_reset(self, request: Any) -> None:
        return

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        return


def request_data(generation: str) -> type:
    return NewRequestData if generation == "1.3" else OldRequestData


def install(generation: str, allgather: Callable[[Any], Any] | None = None) -> None:
    """Make ``import tensorrt_llm`` find this module's classes, where this generation of the engine has them, and what
    stands for MPI."""
    path = "tensorrt_llm._torch.pyexecutor"
    path += ".connectors.kv_cache_connector" if generation == "1.3" else ".kv_cache_connector"
    names = path.split(".")
    for end in range(1, len(names) + 1):
        module = ModuleType(".".join(names[:end]))
        module.__path__ = []  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
    sys.modules["tensorrt_llm"].__version__ = f"{generation}.0 (simulated)"  # type: ignore[attr-defined]
    module.KvCacheConnectorWorker = KvCacheConnectorWorker  # type: ignore[attr-defined]
    module.KvCacheConnectorScheduler = KvCacheConnectorScheduler  # type: ignore[attr-defined]
    module.RequestData = request_data(generation)  # type: ignore[attr-defined]
    module.SchedulerOutput = SchedulerOutput  # type: ignore[attr-defined]
    utils = sys.modules["tensorrt_llm._utils"] = ModuleType("tensorrt_llm._utils")
    utils.mpi_allgather = allgather  # type: ignore[attr-defined]
