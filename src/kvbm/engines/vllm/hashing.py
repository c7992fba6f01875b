"""A prompt's names, sooner.

vLLM names every block of a prompt by a hash before anybody hears of the prompt: for 32k tokens more than 2,000 times,
several milliseconds on the CPU of a server. A load cannot begin before that, and the requests that decode wait too,
because the interpreter is busy. Two fifths of it (``benchmarks/hashing.py``) go into asking every single block what
none of a plain prompt's blocks has, images, adapters, salt, and into passing tokens from function to function. Here the
same hash function is given the same things in the same order, without the questions.

What a block is called is for vLLM to say. So this is for releases that have been read, for prompts that have none of
what vLLM hashes beside tokens, and only after the two have been seen to agree; else vLLM's own function does it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import vllm.v1.core.kv_cache_utils as kv_cache_utils
import vllm.v1.engine.core as engine_core

from kvbm.engines.vllm import compat

logger = logging.getLogger(__name__)

Hasher = Callable[[Any], list[Any]]  # of a request: the names of its blocks that have none yet
HashFunction = Callable[[Any], bytes]


def quicken() -> None:
    """From now on engines made in this process hash plain prompts the short way."""
    make = engine_core.get_request_block_hasher
    if hasattr(make, "__wrapped__") or not compat.is_tested():
        return

    @functools.wraps(make)
    def make_quick(size: int, function: HashFunction) -> Hasher:
        return quick(make(size, function), size, function)

    engine_core.get_request_block_hasher = make_quick


def quick(own: Hasher, size: int, function: HashFunction) -> Hasher:
    """A hasher that gives the names which vLLM's ``own`` gives. That one itself, if they are seen to differ."""

    def names(request: Any) -> list[Any]:
        if request.block_hashes or not _is_plain(request):
            return own(request)
        parent = kv_cache_utils.NONE_HASH
        found = []
        for block in zip(*[iter(request.all_token_ids)] * size, strict=False):  # what is left over is no block
            parent = function((parent, block, None))
            found.append(parent)
        return found

    try:
        if all(names(sample) == own(sample) for sample in _samples(size)):
            return names
        logger.warning("prompts are hashed vLLM's own way: the short one gave other names")
    except Exception as error:
        logger.info("prompts are hashed vLLM's own way (%s: %s)", type(error).__name__, error)
    return own


def _is_plain(request: Any) -> bool:
    """Whether vLLM hashes nothing of it but tokens. These four are all there is in the releases that have been read."""
    return (
        request.lora_request is None
        and not request.cache_salt
        and not request.mm_features
        and request.prompt_embeds is None
    )


def _samples(size: int) -> list[SimpleNamespace]:
    """Prompts of no block, of one, and of several with some tokens left over."""
    prompts = [[7 + 65_521 * i for i in range(count)] for count in (size - 1, size, 5 * size + 3)]
    plain = {"block_hashes": [], "lora_request": None, "cache_salt": None, "mm_features": [], "prompt_embeds": None}
    return [SimpleNamespace(all_token_ids=prompt, num_tokens=len(prompt), **plain) for prompt in prompts]
