"""Copying the tokens of a long prompt to the GPU: torch takes a list of numbers apart one by one, and an array as it
is. Used once both have been seen to send the same."""

from __future__ import annotations

import functools
import logging
import sys
from array import array
from typing import Any

import numpy as np
import torch

from kvbm.engines.vllm import compat
from kvbm.engines.vllm.shortcuts import Function, is_vllms

logger = logging.getLogger(__name__)

_MANY_NUMBERS = 1024


def install() -> bool:
    """From now on this process copies many tokens to the GPU the short way; False if it does not."""
    # An engine with the other model runner has not loaded it and has no use for it.
    buffers = sys.modules.get("vllm.v1.worker.gpu.buffer_utils")
    if not compat.is_tested() or buffers is None:
        return False
    try:
        own = buffers.async_tensor_h2d
        if not is_vllms(own, "vllm.utils.torch_utils"):
            return False
        short = sending(own, 1)
        if any(_sent(short, sample) != _sent(own, sample) for sample in _samples()):
            logger.warning("The fast path for a prompt's tokens failed its self-test; using vLLM's own")
            return False
        buffers.async_tensor_h2d = sending(own)
        return True
    except Exception as error:
        logger.info(
            "The fast path for a prompt's tokens is off (%s: %s); using vLLM's own", type(error).__name__, error
        )
        return False


def sending(own: Function, least: int = _MANY_NUMBERS) -> Function:
    """``async_tensor_h2d``: a list of numbers is made an array first, which torch need not take apart."""

    @functools.wraps(own)
    def async_tensor_h2d(data: Any, *args: Any, **options: Any) -> torch.Tensor:
        if type(data) is list and len(data) >= least and options.get("dtype") is torch.int32:
            try:
                if type(sum(data)) is int:  # with numbers of another kind among them, which array may take, it is not
                    data = np.frombuffer(array("i", data), np.int32)
            except Exception as error:
                logger.debug("numbers go to the GPU vLLM's own way (%s: %s)", type(error).__name__, error)
        return own(data, *args, **options)

    return async_tensor_h2d


def _sent(send: Function, numbers: list[Any]) -> Any:
    """What arrives, or what is raised."""
    try:
        found = send(numbers, device="cpu", dtype=torch.int32)
    except Exception as error:
        return type(error), str(error)
    return found.dtype, found.tolist()


def _samples() -> list[list[Any]]:
    plain = [7 + 65_521 * i for i in range(100)]
    return [plain, [-1, 2**31 - 1, -(2**31)], [True, 2], [1, 2.9], [2**31], [1, None], [[1], [2]]]
