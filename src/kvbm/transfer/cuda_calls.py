"""CUDA functions that torch does not expose, called through ctypes. A failed call raises and clears CUDA's last error.

The CUDA runtime keeps its last error until a caller reads it. The engine would read it with its next launch, take the
error for its own, and die.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_HOST_TO_DEVICE = 1
_PORTABLE = 1  # pinned memory that is usable from every context

# (targets, sources, bytes of each, or of all of them, stream)
BatchCopy = Callable[[np.ndarray, np.ndarray, "np.ndarray | int", torch.cuda.Stream], None]


@functools.cache
def _runtime() -> tuple[Any, int]:
    """The CUDA runtime that torch was built with, and its major version."""
    major = int((torch.version.cuda or "0").split(".")[0])
    return ctypes.CDLL(f"libcudart.so.{major}"), major


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _failure(call: str, error: int) -> RuntimeError:
    _runtime()[0].cudaGetLastError()
    return RuntimeError(f"{call} failed with error {error}")


def pin(address: int, size: int) -> None:
    """Register host memory with CUDA, so that the GPU can access it."""
    error = _runtime()[0].cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE))
    if error:
        raise RuntimeError(
            f"CUDA refused to pin {size / 1e9:.1f} GB of host memory ({_failure('cudaHostRegister', error)}); "
            "lower DYN_KVBM_CPU_CACHE_GB"
        )


def unpin(address: int) -> None:
    """Undo :func:`pin`, at shutdown. A failure is ignored, and its error is cleared before the engine can see it."""
    if _runtime()[0].cudaHostUnregister(ctypes.c_void_p(address)):
        _runtime()[0].cudaGetLastError()


def wait_until(stream: torch.cuda.Stream, address: int, count: int) -> None:
    """Make a stream wait until the 32-bit counter at ``address`` has reached ``count``, which may wrap around."""
    error = _driver().cuStreamWaitValue32_v2(
        ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), ctypes.c_uint32(count & 0xFFFFFFFF),
        ctypes.c_uint(0),
    )  # fmt: skip
    if error:
        raise RuntimeError(f"cuStreamWaitValue32 failed with error {error}")


def copy_rows(
    target: int, target_pitch: int, source: int, source_pitch: int, size: int, rows: int, stream: torch.cuda.Stream
) -> None:
    """Copy rows of ``size`` bytes from pinned memory to the device with one call. Each row begins one pitch later."""
    error = _runtime()[0].cudaMemcpy2DAsync(
        ctypes.c_void_p(target), ctypes.c_size_t(target_pitch), ctypes.c_void_p(source), ctypes.c_size_t(source_pitch),
        ctypes.c_size_t(size), ctypes.c_size_t(rows), ctypes.c_int(_HOST_TO_DEVICE),
        ctypes.c_void_p(stream.cuda_stream),
    )  # fmt: skip
    if error:
        raise _failure("cudaMemcpy2DAsync", error)


class _Attributes(ctypes.Structure):
    """``cudaMemcpyAttributes``: order of access to the source, two location hints of two numbers, flags."""

    _fields_ = [(name, ctypes.c_int32) for name in ("order", "from_kind", "from_id", "to_kind", "to_id", "flags")]


def batch_function() -> BatchCopy | None:
    """``cudaMemcpyBatchAsync`` as a function; None if this CUDA runtime does not have it."""
    try:
        runtime, major = _runtime()
        call = runtime.cudaMemcpyBatchAsync
    except (OSError, AttributeError):
        return None
    in_stream_order = _Attributes(order=1)
    first = ctypes.c_size_t(0)

    def batch(targets: np.ndarray, sources: np.ndarray, size: np.ndarray | int, stream: torch.cuda.Stream) -> None:
        count = len(targets)
        sizes = np.full(count, size, np.uint64)
        arguments = [
            targets.ctypes.data_as(ctypes.c_void_p), sources.ctypes.data_as(ctypes.c_void_p),
            sizes.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(count), ctypes.byref(in_stream_order),
            ctypes.byref(first), ctypes.c_size_t(1),
        ]  # fmt: skip
        if major < 13:
            arguments.append(ctypes.byref(ctypes.c_size_t(0)))  # index of the failed copy; CUDA 13 has no such argument
        error = call(*arguments, ctypes.c_void_p(stream.cuda_stream))
        if error:
            raise _failure("cudaMemcpyBatchAsync", error)

    return batch
