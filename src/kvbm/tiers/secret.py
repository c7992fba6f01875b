"""The secret that the machines of a deployment share."""

from __future__ import annotations

import os
import stat

from kvbm.config import Config

_MIN_SECRET = 16


def read_secret(config: Config) -> str:
    """Empty where none is set. Raises ValueError with the setting and what to do."""
    path = config.peer_secret_file
    if path is None:
        return config.peer_secret
    if config.peer_secret:
        raise ValueError("KVBM_PEER_SECRET and KVBM_PEER_SECRET_FILE are both set. Set one of them")
    try:
        found = path.stat()
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"KVBM_PEER_SECRET_FILE={path} cannot be read: {error}") from None
    if stat.S_IMODE(found.st_mode) & 0o077 and found.st_uid == os.geteuid():
        raise ValueError(f"KVBM_PEER_SECRET_FILE={path} can be read by other users. Run chmod 600 {path}")
    if len(secret) < _MIN_SECRET:
        raise ValueError(
            f"KVBM_PEER_SECRET_FILE={path} has {len(secret)} characters: at least {_MIN_SECRET} are needed"
        )
    return secret
