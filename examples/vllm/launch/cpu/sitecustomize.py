"""Read by Python at its start: without a GPU, whoever waits in a loop lets the others have a turn.

NIXL's progress thread does not wait at all between two looks, and vLLM has no setting for it. vLLM's processes wait for
each other with `sched_yield`, which some kernels take so literally that other programs stand still for half a minute.
With two cores and two workers that ends Dynamo's leases. Here the first waits a millisecond and the others a tenth.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import time
from types import ModuleType
from typing import Any

MICROSECONDS = 1000


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if not (name.startswith("nixl") and name.endswith("._bindings")):
            return None
        sys.meta_path.remove(self)  # once is enough, and the search below must not end here
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _patient(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _patient(load: Any) -> Any:
    def exec_module(module: ModuleType) -> None:
        load(module)
        agent = module.nixlAgent

        def make(name: str, config: Any) -> Any:
            config.pthrDelay = MICROSECONDS
            return agent(name, config)

        module.nixlAgent = make

    return exec_module


os.sched_yield = lambda: time.sleep(1e-4)
sys.meta_path.insert(0, _Finder())
