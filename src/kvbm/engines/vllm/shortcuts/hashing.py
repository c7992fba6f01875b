"""Faster block hashes of a prompt.

vLLM hashes every block of a prompt before its scheduler sees the prompt: for 32k tokens more than 2,000 hashes,
several milliseconds on the CPU of a server (``benchmarks/hashing.py``). No load can begin before that, and the requests
that decode wait too, because the interpreter is busy. But much of a prompt that finds its blocks in a cache has been
hashed before, by the prompt that put them there. So KVBM remembers stretches of tokens with their hashes, by the hash
before them. For a new stretch it calls the same hash function with the same arguments in the same order, and skips the
checks for inputs that no block of a plain prompt has: images, adapters, salt.

The hashes must equal vLLM's. So this runs only on reviewed releases, only for prompts without other inputs than tokens,
and only after a self-test in which both agreed. In all other cases vLLM's own function runs.
"""

from __future__ import annotations

import functools
import logging
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import vllm.v1.core.kv_cache_utils as kv_cache_utils

from kvbm.engines.vllm import compat
from kvbm.gil import decoding

logger = logging.getLogger(__name__)

Hasher = Callable[[Any], list[bytes]]  # of a request: the names of its blocks that have none yet
HashFunction = Callable[[Any], bytes]

_STRETCH = 1024  # tokens that are remembered together: few enough to share, enough to cost next to nothing
_STRETCHES = 4096  # that are remembered, some 10 kB each
_LONG_PROMPT = 4096  # tokens; hashing a longer prompt delays requests that decode


def install() -> bool:
    """From now on engines made in this process name plain prompts the short way; False if they do not."""
    if not compat.is_tested():
        return False
    import vllm.v1.engine.core as engine_core  # only the scheduler's process needs it, and only releases we have read

    make = engine_core.get_request_block_hasher
    if hasattr(make, "__wrapped__"):
        return False

    @functools.wraps(make)
    def make_quick(hash_block_size: int, caching_hash_fn: HashFunction) -> Hasher:
        return quick(make(hash_block_size, caching_hash_fn), hash_block_size, caching_hash_fn)

    engine_core.get_request_block_hasher = make_quick
    return True


def quick(own: Hasher, size: int, function: HashFunction) -> Hasher:
    """A hasher that gives the names which vLLM's ``own`` gives. That one itself, if they are seen to differ."""
    names = Names(size, function)

    def hasher(request: Any) -> list[bytes]:
        try:
            if not request.block_hashes and _is_plain(request):
                tokens = request.all_token_ids[:]
                if len(tokens) >= _LONG_PROMPT:
                    decoding.wait()
                return names.of(tokens)
        except Exception as error:
            logger.debug("a prompt is hashed vLLM's own way (%s: %s)", type(error).__name__, error)
        return own(request)

    try:
        if all(hasher(sample) == own(sample) for sample in _samples(size)):
            return hasher
        logger.warning("The fast path for prompt hashing failed its self-test; using vLLM's own")
    except Exception as error:
        logger.info("The fast path for prompt hashing is off (%s); using vLLM's own", repr(error))
    return own


class Names:
    """The names of all blocks of a prompt. May be asked by several threads."""

    def __init__(self, size: int, function: HashFunction) -> None:
        self._size = size
        self._function = function
        self._stretch = max(1, _STRETCH // size) * size
        # Names of a stretch's blocks by the name of the block before it and its tokens, the latest last.
        self._known: OrderedDict[tuple[bytes, bytes], list[bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, tokens: list[int]) -> list[bytes]:
        parent = kv_cache_utils.NONE_HASH
        names: list[bytes] = []
        whole = len(tokens) // self._stretch * self._stretch
        try:
            numbers = array("I", tokens[:whole])
        except (OverflowError, TypeError):  # no tokens that we know: nothing is remembered
            numbers, whole = array("I"), 0
        for start in range(0, whole, self._stretch):
            end = start + self._stretch
            key = parent, numbers[start:end].tobytes()
            found = self._recall(key)
            if found is None:
                stretch = tokens[start:end]
                found = self._hash(parent, stretch)
                if type(sum(stretch)) is int:  # with a number of numpy's among them, which has another name, it is not
                    self._remember(key, found)
            names += found
            parent = found[-1]
        return names + self._hash(parent, tokens[whole:])

    def _hash(self, parent: bytes, tokens: Sequence[int]) -> list[bytes]:
        function, names = self._function, []
        for block in zip(*[iter(tokens)] * self._size, strict=False):  # without the incomplete block at the end
            parent = function((parent, block, None))
            names.append(parent)
        return names

    def _recall(self, key: tuple[bytes, bytes]) -> list[bytes] | None:
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
            return found

    def _remember(self, key: tuple[bytes, bytes], names: list[bytes]) -> None:
        with self._lock:
            self._known[key] = names
            if len(self._known) > _STRETCHES:
                self._known.popitem(last=False)


def _is_plain(request: Any) -> bool:
    """Whether vLLM hashes nothing of it but tokens. These four are all there is in the releases that have been read."""
    return (
        request.lora_request is None
        and not request.cache_salt
        and not request.mm_features
        and request.prompt_embeds is None
    )


def _samples(size: int) -> list[SimpleNamespace]:
    """Prompts of no block, of one, of several with some tokens left over, and a long one that comes twice."""
    lengths = size - 1, size, 5 * size + 3, _STRETCH + 2 * size + 3, _STRETCH + 2 * size + 3
    prompts = [[7 + 65_521 * i for i in range(length)] for length in lengths]
    plain = {"block_hashes": [], "lora_request": None, "cache_salt": None, "mm_features": [], "prompt_embeds": None}
    return [SimpleNamespace(all_token_ids=prompt, num_tokens=len(prompt), **plain) for prompt in prompts]
