"""Read by Python at its start: without a GPU NIXL's progress thread waits a millisecond between two looks.

Left to itself it does not wait at all, and vLLM has no setting for it: with such a thread in every worker a machine
with few cores has no time left for anything else, and workers fall out of Dynamo's list because they cannot say in time
that they live.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
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


sys.meta_path.insert(0, _Finder())
