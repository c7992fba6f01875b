"""Faster replacements for vLLM's loops over a long prompt, behind one switch (KVBM_FAST_PROMPTS).

Each gives the results of vLLM's own loop, is compared with it at start, and is used with the releases of vLLM that it
was written for. Nothing here imports vLLM before an engine installs them: ``kvbm doctor`` lists them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from kvbm.engines.supported import RELEASES

logger = logging.getLogger("kvbm")

Function = Callable[..., Any]


class Shortcut(NamedTuple):
    name: str
    replaces: str  # of vLLM
    gain: str  # CPU time for a prompt of 32,768 tokens: benchmarks/results/{hashing,shortcuts}.json


HASHING = Shortcut("prompt hashing", "get_request_block_hasher", "4.5 to 3.5 ms, 0.7 ms when the prompt returns")
BLOCKS = Shortcut(
    "block allocation",
    "BlockPool.get_new_blocks and cache_full_blocks, KVCacheManager.estimate_cached_tokens",
    "3.3 to 0.9 ms",
)
TOKENS = Shortcut("token upload", "async_tensor_h2d", "1.8 to 0.8 ms")

_active: list[Shortcut] = []  # in this process: a shortcut replaces functions for all of its engines


def describe(vllm_version: str) -> tuple[Shortcut, ...]:
    """The shortcuts for a release of vLLM; none for a release that they were not written for."""
    release = ".".join(vllm_version.split(".")[:2])
    return (HASHING, BLOCKS, TOKENS) if release in RELEASES["vllm"] else ()


def install(scheduler: bool, several_groups: bool) -> None:
    """Install the shortcuts of vLLM's scheduler, or of a worker, in this process."""
    from kvbm.engines.vllm.shortcuts import blocks, hashing, tokens

    if not scheduler:
        _note(TOKENS, tokens.install())
        return
    _note(HASHING, hashing.install())
    if not several_groups:
        _note(BLOCKS, blocks.install())
    names = ", ".join(shortcut.name for shortcut in _active)
    logger.info("vLLM shortcuts active (KVBM_FAST_PROMPTS): %s", names or "none")


def _note(shortcut: Shortcut, installed: bool) -> None:
    if installed and shortcut not in _active:
        _active.append(shortcut)


def is_vllms(function: Function, module: str) -> bool:
    """Whether a function is vLLM's own: not replaced by another engine in this process, or by a third party."""
    return function.__module__ == module and not hasattr(function, "__wrapped__")
