"""Prints the value for SGLang's ``--hicache-storage-backend-extra-config``.

Settings of KVBM may be given as ``key=value``, for example ``disk_cache_gb=200``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from kvbm import config as settings

BACKEND = {
    "backend_name": "kvbm",
    "module_path": "kvbm.engines.sglang.backend",
    "class_name": "KvbmStorage",
    "interface_v1": 1,
}


def extra_config(*given: str) -> str:
    """The JSON that makes SGLang take KVBM as its storage backend."""
    values: dict[str, object] = dict(BACKEND)
    for setting in given:
        key, sign, value = setting.partition("=")
        if not sign or not key:
            raise ValueError(f"{setting!r}: expected a setting as key=value, for example disk_cache_gb=200")
        values[key] = value
    # Said here, because a server would say it only after it has loaded its model.
    for warning in settings.load(values, environ={}, files=()).warnings:
        print(warning, file=sys.stderr)
    return json.dumps(values)


def main(arguments: Sequence[str]) -> int:
    try:
        print(extra_config(*arguments))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
