"""The engines that are compared: vLLM alone (base), with its own offloading (native), with KVBM (kvbm), which decides
whether to pack blocks, with KVBM and blocks packed always (packed) or never (raw); and, where a folder has them
(``--peers``), with the KVBM of NVIDIA (upstream) and with LMCache (lmcache).

All serve one model: Qwen3-8B's shape with random weights, written once to disk, whose output depends on the KV cache.

Imported by parents, which must not import vLLM or torch; only what runs in a child does.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

from records import PROJECT, SOURCE

sys.path.insert(0, str(PROJECT / "scripts"))
from random_models import Dense
from random_models import config_folder as config_folder
from random_models import model_folder as model_folder

KINDS = ("base", "native", "kvbm")
PACKED = {"packed": {"pack": "on"}, "raw": {"pack": "off"}}  # settings in kv_connector_extra_config
PEERS = ("upstream", "lmcache")
DRY_KINDS = ("base", "kvbm", *PACKED)  # vLLM's own offloading needs a GPU
STEP_TOKENS = 8192
# "decode-graphs": of whole decode steps only, without torch.compile, which takes a minute.
MODES = ("eager", "graphs", "decode-graphs")
DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 16, 24]}
FIRST_TOKEN, LAST_TOKEN = 10, 150_000  # prompts are drawn from these

Tokens = list[int]

QWEN3_8B = Dense("qwen3-8b-random", 36, 4096, 32, 8, 128, 12288, 151936, "bfloat16", 16)
TINY = Dense("qwen3-tiny-random-bench", 2, 64, 2, 1, 32, 128, 151936, "float32", 32)


def shape_of(dry: bool) -> Dense:
    return TINY if dry else QWEN3_8B


def connector(kind: str, gigabytes: float) -> dict[str, Any] | None:
    """``kv_transfer_config`` of a kind."""
    if kind == "native":
        extra = {"cpu_bytes_to_use": int(gigabytes * 1e9)}
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if kind == "lmcache":
        return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    if kind in ("kvbm", "upstream", *PACKED):
        return {
            "kv_connector": "DynamoConnector",
            "kv_connector_extra_config": PACKED.get(kind, {}),
            "kv_connector_module_path": "kvbm.vllm_integration.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
    return None


def set_environment(dry: bool, gigabytes: float) -> None:
    """What vLLM and KVBM read from the environment of this process and of those that it starts."""
    environment = {
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # needs a compiler at run time
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }  # fmt: skip
    if dry:
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    os.environ["DYN_KVBM_CPU_CACHE_GB"] = f"{gigabytes:.6f}"
    os.environ["LMCACHE_LOCAL_CPU"] = "True"
    os.environ["LMCACHE_MAX_LOCAL_CPU_SIZE"] = f"{gigabytes:.6f}"
    os.environ.setdefault("LMCACHE_CHUNK_SIZE", "256")


def open_engine(
    kind: str, *, model: Path, dry: bool, mode: str, gigabytes: float, length: int, blocks: int, **more: Any
) -> Any:
    """``vllm.LLM`` for a kind, with a cache of ``blocks`` blocks and room for requests of ``length`` tokens."""
    shape = shape_of(dry)
    set_environment(dry, gigabytes)
    if dry:
        more["block_size"] = shape.block_size
    if mode == "decode-graphs":
        more["compilation_config"] = DECODE_GRAPHS
    transfer = connector(kind, gigabytes)
    if transfer is not None:
        more["kv_transfer_config"] = transfer
    from vllm import LLM

    return LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype=shape.dtype,
        max_model_len=length,
        enforce_eager=mode == "eager",
        enable_prefix_caching=True,
        max_num_batched_tokens=STEP_TOKENS,
        seed=0,
        num_gpu_blocks_override=blocks,
        **{"gpu_memory_utilization": 0.5, **more},
    )


def beside_others(shape: Dense, tokens: int) -> dict[str, Any]:
    """For :func:`open_engine`, with a cache of so many tokens. Said outright: an engine that looks at what is free
    would count what another takes meanwhile as its own."""
    return {"gpu_memory_utilization": 0.25, "kv_cache_memory_bytes": tokens * shape.token_bytes}


def import_path(kind: str, peers: Path | None) -> list[Path]:
    """Where a kind's packages lie, in front of everything else. Upstream's has the name of ours."""
    return [peers.expanduser()] if kind in PEERS and peers is not None else [SOURCE]


def greedy(tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True, **more)


def draw(source: random.Random, length: int) -> Tokens:
    """A prompt that nothing else shares."""
    return [source.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]


def as_prompt(tokens: Tokens) -> Any:
    from vllm.inputs import TokensPrompt

    return TokensPrompt(prompt_token_ids=tokens)


def add_arguments(parser: Any, kinds: tuple[str, ...] = KINDS, peers: bool = False) -> None:
    """Arguments of every script that runs engines."""
    choices = (*KINDS, *PACKED, *(PEERS if peers else ()))
    parser.add_argument("--kinds", nargs="+", choices=choices, default=list(kinds), help="engines, in this order")
    if peers:
        parser.add_argument(
            "--peers", type=Path, metavar="DIR", help="a folder with the packages of upstream and lmcache"
        )
    parser.add_argument(
        "--models", type=Path, default=Path("~"), metavar="DIR", help="where the model is or is put (16 GB)"
    )
    parser.add_argument("--limit", type=float, default=600, metavar="S", help="seconds an engine may take altogether")
    parser.add_argument(
        "--dry",
        action="store_true",
        help="a tiny model on the CPU: tries the script where there is no GPU; the times mean nothing",
    )


def check(arguments: Any) -> None:
    """Ends the program where it cannot run as asked."""
    from records import leave_without_device

    if not arguments.dry:
        leave_without_device()
    elif set(arguments.kinds) - set(DRY_KINDS):
        arguments.kinds = [kind for kind in arguments.kinds if kind in DRY_KINDS]
        print(f"dry: only {', '.join(DRY_KINDS)} run on a CPU", file=sys.stderr)
