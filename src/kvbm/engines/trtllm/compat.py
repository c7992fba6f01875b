"""What differs between TensorRT-LLM releases, in one place.

The connector interface has moved once and grown several times: the module path, block hashes, priorities, salts, layer
groups. KVBM reads fields that a release does not have as absent and ignores fields that it does not know. A missing
field that it needs is an error that names the release.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvbm.core.keys import SCHEME
from kvbm.engines.model_files import digest_of_files, folder_of, hidden_size_of
from kvbm.engines.weights import digest, gather_in_world
from kvbm.tiers.base import Fingerprint

_PATHS = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",  # 1.3
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",  # 1.0 to 1.2
    "tensorrt_llm._torch.pyexecutor.connector",  # before 1.0
)

# The engine's priority for blocks of a request without a KvCacheRetentionConfig.
DEFAULT_PRIORITY = 35


class UnsupportedReleaseError(ImportError):
    """The installed TensorRT-LLM lacks something that KVBM cannot do without."""


def release() -> str:
    """The installed release, as the engine spells it."""
    return str(getattr(sys.modules.get("tensorrt_llm"), "__version__", "of unknown version"))


def _interface() -> Any:
    for path in _PATHS:
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise  # the module is there, and something that it needs is not
    try:
        importlib.import_module("tensorrt_llm")
    except ModuleNotFoundError as error:
        raise UnsupportedReleaseError(
            "kvbm.trtllm_integration.connector is for TensorRT-LLM, which is not installed here; install tensorrt_llm, "
            "or configure the connector of your engine (vLLM: kvbm.vllm_integration.connector)"
        ) from error
    raise UnsupportedReleaseError(
        f"TensorRT-LLM {release()} has no KV cache connector interface ({', '.join(_PATHS)}); it came with 1.0"
    )


_module = _interface()
SchedulerBase: Any = _module.KvCacheConnectorScheduler
WorkerBase: Any = _module.KvCacheConnectorWorker
# Whether a request can carry a salt. If it can, a request whose salt KVBM cannot read must not share blocks.
HAS_SALTS = "cache_salt" in getattr(_module.RequestData, "__dataclass_fields__", {})


def needed(thing: Any, field: str) -> Any:
    """A field that KVBM requires. Raises AttributeError when the release does not have it."""
    try:
        return getattr(thing, field)
    except AttributeError:
        raise AttributeError(
            f"TensorRT-LLM {release()}: {type(thing).__name__} has no {field}, which KVBM needs; it was written for "
            "1.0 to 1.3"
        ) from None


class Setup(NamedTuple):
    """The engine's start arguments that KVBM uses."""

    model: str
    tokens_per_block: int
    rank: int
    ranks: int
    partial_reuse: bool
    step_tokens: int | None  # the most a step computes; None: it does not say
    hidden_size: int | None  # of the model; None: unknown
    overlap: bool  # a step is scheduled before the results of the one before are looked at
    cache: Fingerprint  # identifies its KV, without the weights and the layout of a block
    unsupported: str | None  # why this set-up cannot be served; None when it can


def read_setup(llm_args: Any) -> Setup:
    mapping = needed(llm_args, "parallel_config").to_mapping()
    cache = needed(llm_args, "kv_cache_config")
    return Setup(
        model=str(needed(llm_args, "model")),
        tokens_per_block=int(needed(cache, "tokens_per_block")),
        rank=int(needed(mapping, "rank")),
        ranks=int(needed(mapping, "world_size")),
        # On unless it is switched off, as in the engine.
        partial_reuse=bool(getattr(cache, "enable_partial_reuse", True)),
        step_tokens=getattr(llm_args, "max_num_tokens", None) or None,
        hidden_size=hidden_size_of(str(llm_args.model), getattr(llm_args, "revision", None)),
        overlap=not getattr(llm_args, "disable_overlap_scheduler", False),
        cache=_describe(llm_args, cache, mapping),
        unsupported=_unsupported(llm_args, mapping, cache),
    )


def _describe(llm_args: Any, cache: Any, mapping: Any) -> Fingerprint:
    """A missing entry would serve KV of a different engine configuration; a superfluous entry costs a warm start."""
    return {
        "engine": "tensorrt_llm " + ".".join(release().split(".")[:2]),
        "model": str(llm_args.model),
        "config": digest(repr([str(getattr(llm_args, name, None)) for name in ("quant_config", "speculative_config")])),
        # A block's heads may be outside of its tokens or inside, and its pool does not show which.
        "attention": str(getattr(llm_args, "attn_backend", "")),
        "dtype": f"{getattr(llm_args, 'dtype', 'auto')}/{getattr(cache, 'dtype', 'auto')}",
        "block_size": int(cache.tokens_per_block),
        "tensor_parallel": int(mapping.world_size),
        "keys": SCHEME,
        "processing": _processing(llm_args),
    }


def _processing(llm_args: Any) -> str:
    """The settings of the model's processor, and its code: the engine's hashes of images cover neither."""
    folder = folder_of(str(llm_args.model), getattr(llm_args, "revision", None))
    code = bool(getattr(llm_args, "trust_remote_code", False))
    try:
        return "" if folder is None else digest_of_files(folder, processor=True, code=code)
    except OSError:
        return ""  # the engine cannot read them either


def _unsupported(llm_args: Any, mapping: Any, cache: Any) -> str | None:
    if getattr(mapping, "pp_size", 1) > 1:
        return f"pipeline_parallel_size is {mapping.pp_size}, and the engine's connectors know one stage only"
    if getattr(mapping, "cp_size", 1) > 1:
        return f"context_parallel_size is {mapping.cp_size}, and context parallelism is not supported"
    if getattr(mapping, "enable_attention_dp", False) or getattr(llm_args, "enable_attention_dp", False):
        return "attention data parallelism is on, and its ranks share no requests"
    if (getattr(llm_args, "max_beam_width", None) or 1) > 1:
        return f"max_beam_width is {llm_args.max_beam_width}, and blocks of beams are not kept"
    windows = set(getattr(cache, "max_attention_window", None) or ())
    if len(windows) > 1:
        return f"the model has attention windows of several sizes ({sorted(windows)})"
    if getattr(cache, "host_cache_size", None):
        return (
            "kv_cache_config.host_cache_size is set: the engine then moves blocks between memories by itself. Set it "
            "to 0; host memory is what KVBM is for"
        )
    return None


def gather_over_ranks(own: str, ranks: int, topic: str = "weights") -> Sequence[str]:
    """The strings of all ranks, by rank, over MPI as the engine's own connectors do, or over torch's process groups if
    the engine runs without MPI. All ranks call this in the same order during their start."""
    if ranks == 1:
        return [own]
    if (shards := gather_in_world(own, topic=topic)) and len(shards) == ranks:
        return shards
    return list(importlib.import_module("tensorrt_llm._utils").mpi_allgather(own))


# -- requests ---------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One request in a step's output."""

    request: int
    tokens: Sequence[int]  # new since the last output that had the request
    blocks: Sequence[int]  # likewise
    computed: int  # tokens whose KV is there before the step
    scheduled: int  # tokens the step computes
    priorities: Sequence[int] | None  # of the new blocks; None: the engine's default for all of them


def read_step(data: Any) -> Step:
    blocks = needed(data, "new_block_ids")
    if not blocks:
        # One list for each group of layers; with a single group, the same as the flat one.
        groups = getattr(data, "new_block_ids_by_layer_group", None) or ()
        blocks = groups[0] if len(groups) == 1 else blocks
    return Step(
        request=needed(data, "request_id"),
        tokens=needed(data, "new_tokens"),
        blocks=blocks,
        computed=needed(data, "computed_position"),
        scheduled=needed(data, "num_scheduled_tokens"),
        priorities=getattr(data, "priorities", None),
    )


def tokens_of(request: Any) -> list[int]:
    """All tokens of a request so far."""
    return list(needed(request, "get_tokens")(0))


def needs_every_token(request: Any) -> bool:
    """Whether a request returns something for every token of its prompt: context logits, which prompt log-probabilities
    are made of, or other outputs of the model. The engine returns none for tokens that come from a cache."""
    outputs = getattr(request, "py_additional_outputs", None) or ()
    gathers = any(getattr(output, "gather_context", True) for output in outputs)
    return gathers or bool(getattr(request, "py_return_context_logits", False))


# -- setting a request back -------------------------------------------------------------------------------------------


_LISTS = ("new_async_requests", "pending_async_requests", "local_finished_async_requests")


def waiting_requests() -> Mapping[int, Any] | None:
    """The engine's own request objects that wait for a load on this rank, by id; None when they cannot be found.

    The engine does not pass them to a worker. Its connector manager owns them, and a method of that manager is a few
    frames up the stack when the engine calls a worker. KVBM calls this only after a load has failed.
    """
    frame: Any = sys._getframe()
    for _ in range(12):
        frame = frame.f_back
        if frame is None:
            break
        manager = frame.f_locals.get("self")
        lists = [getattr(getattr(manager, name, None), "loading", None) for name in _LISTS]
        if all(isinstance(requests, dict) for requests in lists):
            return {number: request for requests in lists for number, request in requests.items()}
    return None


def set_back(request: Any, position: int) -> None:
    """Let the engine compute a waiting request from ``position`` on.

    The engine computes ``context_chunk_size`` tokens from ``context_current_position`` on. It accepts a new chunk size
    only while the request's state is its context phase.
    """
    waiting = request.state
    request.context_current_position = position
    try:
        request.state = type(waiting).CONTEXT_INIT
        request.context_chunk_size = needed(request, "prompt_len") - position
    finally:
        request.state = waiting
