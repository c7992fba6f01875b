"""Which weights an engine serves, as far as that can be seen: part of the name of a cache that outlives the engine."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

NOT_FOR_OTHERS = "nothing that KVBM keeps outlives this engine: %s"  # for the log, with the reason


def untold(name: str) -> str:
    """Why not, where :func:`weights` is empty."""
    return f"nobody can tell whether the weights of {name} are the same the next time"


def weights(name: str, revision: str | None, load_format: str = "auto") -> str:
    """Which weights a model has: the commit they were published with, or what can be seen of their files. Empty when
    that is nothing: then nobody can tell whether the next engine of that name has the same.

    A folder whose files have been replaced is another model, whatever its name.
    """
    path = Path(name)
    if not path.exists():
        path = _in_hub_cache(name, revision) or path
    if commit := re.search(r"/snapshots/([0-9a-f]{40})(/|$)", str(path.resolve()) if path.exists() else ""):
        return f"{load_format} commit {commit[1]}"
    if not path.exists() and re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        return f"{load_format} commit {revision}"
    seen = files(path)
    return f"{load_format} {revision or ''} {seen}" if seen else ""


def files(path: Path) -> str:
    """Names, sizes and times of a folder's files, or of one file, as a digest; empty when there is none."""
    try:
        found = sorted(path.iterdir()) if path.is_dir() else [path]
        seen = [(file.name, status.st_size, status.st_mtime_ns) for file in found for status in [file.stat()]]
    except OSError:
        return ""
    return digest(repr(seen))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _in_hub_cache(name: str, revision: str | None) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except Exception:
        return None
    return Path(found).parent if isinstance(found, str) else None
