"""The directory of a cache: its files, and the description of what the cache is of.

A directory holds one cache::

    kvbm-llama-3.1-8b-9f86d081884c7d65/
      cache.json      what the cache is of, for people, for `kvbm cache ls` and to be compared at start
      index.sqlite    one row a block
      lock            held by the engine that uses the cache
      rank-0.slab     the blocks of rank 0, and rank-0.slab.sums their checksums
      keys.map        under SGLang, where all ranks have the same KV: which block lies where, for those that only read
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from kvbm.tiers.base import Fingerprint
from kvbm.tiers.directory import readable_name
from kvbm.tiers.disk.database import DATABASE, make_way

FORMAT = 1
DESCRIPTION = "cache.json"
LOCK = "lock"
KEY_MAP = "keys.map"  # the index, for ranks that read the slab of another rank
MAX_DESCRIPTION_BYTES = 1 << 20  # an engine writes about one thousand


def cache_directory(root: Path, fingerprint: Fingerprint) -> Path:
    """Where the cache of ``fingerprint`` lies: readable, and different for everything that is not exchangeable.

    The fingerprint holds every property by which the bytes of two blocks of one key can differ (model, dtype, layout,
    block size, ranks) and the scheme of the keys; the version of the format is added here.
    """
    return root / readable_name(_canonical(fingerprint), fingerprint.get("model", ""))


def is_cache(root: Path, fingerprint: Fingerprint) -> bool:
    """Whether an engine with this fingerprint has left a cache there."""
    return (cache_directory(root, fingerprint) / DESCRIPTION).exists()


def slab_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.slab"


def _canonical(fingerprint: Fingerprint) -> bytes:
    return json.dumps({"format": FORMAT, **fingerprint}, sort_keys=True).encode()


def compare(directory: Path, fingerprint: Fingerprint) -> str:
    """Why the cache in the directory cannot be used; empty when it can."""
    path = directory / DESCRIPTION
    try:
        found = json.loads(_read(path))["fingerprint"]
    except FileNotFoundError:
        return "" if not os.path.lexists(directory / DATABASE) else f"its {DESCRIPTION} is missing"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"its {DESCRIPTION} cannot be read ({error})"
    wanted = json.loads(_canonical(fingerprint))
    if found != wanted:
        keys = sorted(set(found) | set(wanted)) if isinstance(found, dict) else []
        differing = ", ".join(key for key in keys if found.get(key) != wanted.get(key))
        return f"it is of another cache ({differing or 'not described'} differ)"
    return ""


def _read(description: Path) -> bytes:
    """Raises ValueError for what no engine has written, and reads none of it: a device never ends."""
    status = os.lstat(description)
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_DESCRIPTION_BYTES:
        raise ValueError(f"expected a file of at most {MAX_DESCRIPTION_BYTES:,} bytes")
    return description.read_bytes()


def describe(directory: Path, fingerprint: Fingerprint, slots: int, about: Mapping[str, str | int]) -> None:
    text = json.dumps({"fingerprint": json.loads(_canonical(fingerprint)), "slots": slots, **about}, indent=2)
    path, new = directory / DESCRIPTION, directory / f"{DESCRIPTION}.new"
    with contextlib.suppress(OSError, ValueError):
        if _read(path) == f"{text}\n".encode():
            return  # a disk without room for a copy of it is no reason to go without the cache
    if path.is_dir():
        make_way(path)
    make_way(new)  # left by a crash
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(fd)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
