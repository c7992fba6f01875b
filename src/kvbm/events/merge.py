"""Merges several streams of block events into one.

``dedup``: a block is stored when the first place holds it and removed when the last place drops it, so subscribers need
no notion of tiers. ``passthrough``: every event as it comes, with the tier's name as routers know it.

A block is identified by its tokens and by those before it, and not by its name, because an engine and KVBM may name the
same block differently. The first name is the one that is published. This module uses no socket and no clock.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import xxhash

logger = logging.getLogger("kvbm")

GPU = "GPU"
# Routers' names of the two tiers.
_MEDIA = {"CPU": "CPU_TIER1", "STORAGE": "CPU_TIER2"}
# Fields of a stored event that distinguish its blocks or help a router.
_PASSED_ON = ("lora_id", "lora_name", "extra_keys", "cache_salt", "block_mm_infos", "group_idx", "kv_cache_spec_kind")
_SCOPE = ("lora_name", "cache_salt", "extra_keys", "block_mm_infos")

Event = Mapping[str, Any]
_Place = tuple[str, str]  # stream, medium


class _Block(msgspec.Struct, eq=False):
    name: int
    places: set[tuple[_Place, int]] = set()  # with its name there: a block may have two names


class Merge:
    """The blocks of one data-parallel rank. ``apply`` returns what to publish, in order."""

    def __init__(self, mode: str) -> None:
        self._dedup = mode == "dedup"
        self._blocks: dict[bytes, _Block] = {}
        # place -> name -> [content of the block, number of stores]. An engine may hold a block twice.
        self._known: dict[_Place, dict[int, list[Any]]] = {}

    def apply(self, stream: str, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Apply the decoded events of a stream. Invalid events are skipped."""
        found: list[dict[str, Any]] = []
        for event in events:
            try:
                kind = event["type"]
                if kind == "AllBlocksCleared":
                    found += self.clear(stream)
                elif kind == "BlockStored":
                    found += self._stored(stream, event)
                elif kind == "BlockRemoved":
                    found += self._removed(stream, event)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                logger.warning("skipped an invalid event of %s: %s: %s", stream, type(error).__name__, error)
        return found

    def clear(self, stream: str) -> list[dict[str, Any]]:
        """The stream has restarted or lost messages: drop all its blocks."""
        gone: list[dict[str, Any]] = []
        for place in [place for place in self._known if place[0] == stream]:
            names = self._known[place]
            if self._dedup:
                for name in list(names):
                    gone += self._forget(place, name)
            elif names:
                gone.append({"type": "BlockRemoved", "block_hashes": list(names), "medium": _outside(place[1])})
            del self._known[place]
        return gone if any(self._known.values()) else [{"type": "AllBlocksCleared"}]

    # -- stored -------------------------------------------------------------------------------------------------------

    def _stored(self, stream: str, event: Event) -> list[dict[str, Any]]:
        names = [_number(name) for name in event["block_hashes"]]
        parent = event.get("parent_block_hash")
        parent = None if parent is None else _number(parent)
        place = (stream, event.get("medium") or GPU)
        known = self._known.setdefault(place, {})
        if not self._dedup:
            known.update((name, [b"", 1]) for name in names)
            return [{**event, "block_hashes": names, "parent_block_hash": parent, "medium": _outside(place[1])}]
        size, tokens = int(event["block_size"]), event["token_ids"]
        if size < 1 or len(tokens) != size * len(names):
            return []  # a placeholder without tokens, of no use to a router
        content = self._content_of(place, parent)
        fresh: list[dict[str, Any]] = []
        for i, name in enumerate(names):
            part = tokens[i * size : (i + 1) * size]
            each = {key: _one(key, event[key], i) for key in _PASSED_ON if event.get(key) is not None}
            before, content = content, _digest(content, part, each)
            if (entry := known.get(name)) is not None:
                entry[1] += 1
                continue
            known[name] = [content, 1]
            block = self._blocks.get(content)
            if block is None:
                block = self._blocks[content] = _Block(name)
                logger.debug("Block %d is new in %s, will publish STORE event", name, place)
                above = self._blocks.get(before)
                fresh.append({
                    "type": "BlockStored", "block_hashes": [name], "token_ids": list(part), "block_size": size,
                    "parent_block_hash": above.name if above is not None else parent if i == 0 else names[i - 1],
                    "medium": GPU, **each,
                })  # fmt: skip
            else:
                logger.debug("DEDUP: Block %d added to source %s", name, place)
            block.places.add((place, name))
        return fresh

    def _content_of(self, place: _Place, name: int | None) -> bytes:
        """The content of a parent block, from the events of this place or of another; a stand-in if it is unknown."""
        if name is None:
            return b""
        for known in (self._known.get(place, {}), *self._known.values()):
            if name in known:
                return bytes(known[name][0])
        return b"unknown parent" + name.to_bytes(8, "big")

    # -- removed ------------------------------------------------------------------------------------------------------

    def _removed(self, stream: str, event: Event) -> list[dict[str, Any]]:
        names = [_number(name) for name in event["block_hashes"]]
        place = (stream, event.get("medium") or GPU)
        known = self._known.get(place, {})
        if not self._dedup:
            for name in names:
                known.pop(name, None)
            return [{**event, "block_hashes": names, "medium": _outside(place[1])}]
        gone: list[dict[str, Any]] = []
        for name in names:
            if (entry := known.get(name)) is not None:
                entry[1] -= 1
                if not entry[1]:
                    gone += self._forget(place, name)
                    del known[name]
        return gone

    def _forget(self, place: _Place, name: int) -> list[dict[str, Any]]:
        content = self._known[place][name][0]
        block = self._blocks[content]
        block.places.discard((place, name))
        if block.places:
            logger.debug("Block %d removed from source %s, still in %d source(s)", name, place, len(block.places))
            return []
        logger.debug("Block %d removed from last source %s, will publish REMOVE event", name, place)
        del self._blocks[content]
        return [{"type": "BlockRemoved", "block_hashes": [block.name], "medium": GPU}]


def _outside(medium: str) -> str:
    return _MEDIA.get(medium, medium)


def _number(name: object) -> int:
    """A name is a number of 64 bits, signed or not, or a whole hash, of which the last 8 bytes count."""
    if isinstance(name, bytes):
        return int.from_bytes(name[-8:], "big")
    if isinstance(name, int):
        return name & (2**64 - 1)
    raise TypeError(f"a block's name is a number or bytes, not {type(name).__name__}")


def _one(key: str, value: Any, i: int) -> Any:
    """The part of a field that belongs to block ``i``; some fields have an entry a block."""
    return value[i : i + 1] if key in ("extra_keys", "block_mm_infos") else value


def _digest(before: bytes, tokens: Iterable[int], each: Mapping[str, Any]) -> bytes:
    hasher = xxhash.xxh3_128(before)
    hasher.update(array("I", tokens).tobytes())
    scope = [each.get(key) for key in _SCOPE]
    if scope != [None] * len(_SCOPE):
        hasher.update(msgspec.msgpack.encode(scope))
    return hasher.digest()
