"""Files of a model that change its KV and are in no tensor: the settings of its processor, and code that comes with it.

Engines name an image, a video or a sound by its raw content. The processor resizes and normalises it afterwards, so the
same name and the same weights give other KV when the processor has other settings.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
from pathlib import Path

logger = logging.getLogger("kvbm")

_PROCESSOR = ("*processor*.json", "tekken.json")  # of Hugging Face, and of Mistral
_CODE = ("*.py",)


def folder_of(model: str, revision: str | None = None) -> Path | None:
    """The folder of a model, or of its snapshot in the cache of the Hugging Face hub. None if there is none."""
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    try:
        hub = importlib.import_module("huggingface_hub")  # the engine brings it
        file = hub.try_to_load_from_cache(model, "config.json", revision=revision)
    except Exception:
        return None
    return Path(file).parent if isinstance(file, str | Path) else None


def hidden_size_of(model: str, revision: str | None = None) -> int | None:
    """From a model's config.json. None when that cannot be read: the cost model then takes all tokens for equal."""
    try:
        folder = folder_of(model, revision)
        if folder is None:
            return None
        config = json.loads((folder / "config.json").read_text())
        size = config.get("hidden_size") or config.get("text_config", {}).get("hidden_size")
        return int(size) if size else None
    except Exception as error:
        logger.debug("the hidden size of %s is unknown (%s: %s)", model, type(error).__name__, error)
        return None


def digest_of_files(folder: Path, *, processor: bool, code: bool) -> str:
    """A digest of the content of these files; empty if there are none. Raises OSError."""
    patterns = (_PROCESSOR if processor else ()) + (_CODE if code else ())
    files = sorted(file for pattern in patterns for file in folder.glob(pattern))
    hasher = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        hasher.update(f"{file.name} {len(content)}\0".encode() + content)
    return hasher.hexdigest()[:32] if files else ""
