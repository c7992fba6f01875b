"""KVBM keeps the KV cache of an LLM engine alive after the GPU has forgotten it.

Engines load it as their KV connector: vLLM through `kvbm.vllm_integration.connector`. The settings are in
`kvbm.config`, and `kvbm config` prints them.

Importing this package costs next to nothing: no torch, no numpy, no engine.
"""

from typing import TYPE_CHECKING

LINUX_ONLY = (
    "KVBM runs on Linux only: it uses O_DIRECT, abstract sockets and the memory calls of its kernel. Use a Linux "
    "machine, a container on one, or WSL 2; without a GPU everything but the GPU kernels works there too"
)

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        # On demand, because importlib.metadata takes longer to import than everything else here together.
        if name in ("BlockManager", "KvbmLeader", "KvbmWorker"):
            raise ImportError(
                f"kvbm.{name} was part of the native module of earlier releases, which this one does without; engines "
                "load KVBM through kvbm.vllm_integration.connector or kvbm.trtllm_integration.connector"
            )
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("kvbm")
        except PackageNotFoundError:  # run from a source tree that was never installed
            found = "0+unknown"
        globals()["__version__"] = found
        return found
