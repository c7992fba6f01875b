"""Python runs this file at start. It makes busy loops sleep, so that workers on few cores do not starve each other.

NIXL's progress thread polls without a pause, and vLLM has no setting for it. vLLM's processes wait for each other with
`sched_yield`, and on some kernels other programs then do not run for half a minute. With two cores and two workers,
Dynamo's leases expire. Here NIXL's thread sleeps 1 ms between two polls, and `sched_yield` sleeps 0.1 ms.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import time
from types import ModuleType
from typing import Any

POLL_MICROSECONDS = 1000


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if not (name.startswith("nixl") and name.endswith("._bindings")):
            return None
        sys.meta_path.remove(self)  # once is enough, and the search below must not find this finder again
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _with_pauses(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _with_pauses(load: Any) -> Any:
    def exec_module(module: ModuleType) -> None:
        load(module)
        agent = module.nixlAgent

        def make(name: str, config: Any) -> Any:
            config.pthrDelay = POLL_MICROSECONDS
            return agent(name, config)

        module.nixlAgent = make

    return exec_module


os.sched_yield = lambda: time.sleep(1e-4)
sys.meta_path.insert(0, _Finder())
