"""vLLM on a CPU starts in a second, for driver.py: engines share the part of a start that is the same for all."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import traceback

# What the engine imports anyway when it starts; a release that has moved one of them only starts a little slower.
WARM_UP = [
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "kvbm.vllm_integration.connector",
]


def prepare() -> None:
    """Does once, before any fork, what every engine would do for itself when it starts."""
    for module in WARM_UP:
        try:
            importlib.import_module(module)
        except ImportError:
            traceback.print_exc()
    with contextlib.suppress(ImportError):  # releases without them configure logging when they are imported
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging_if_needed

        configure_logging_if_needed(LoggingConfig())
    from vllm.platforms import current_platform

    # vLLM looks through every module for kernels to replace.
    platform = type(current_platform)
    if hasattr(platform, "register_triton_kernel_overrides"):
        platform.register_triton_kernel_overrides()
        platform.register_triton_kernel_overrides = classmethod(lambda cls: None)
    # An engine collects garbage several times. It need not look at the objects of this process.
    gc.collect()
    gc.freeze()


def ease_processes() -> None:
    """For several ranks on few cores that may be busy. vLLM spawns its processes on a CPU, and each takes 15 seconds of
    CPU time to import vLLM. Its ranks spin on shared memory while they wait for each other."""
    for name in ("vllm.v1.executor.multiproc_executor", "vllm.v1.engine.utils"):
        importlib.import_module(name).get_mp_context = lambda: multiprocessing.get_context("fork")
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    # Ranks then talk over gloo's sockets. Releases that do not ask this keep to shared memory.
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
