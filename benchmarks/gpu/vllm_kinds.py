"""The engines that are compared: vLLM alone (base), with its own offloading (native), with KVBM (kvbm).

All serve one model: Qwen3-8B's shape with random weights, written once to disk. The weights are such that the output
depends on the KV cache; with vLLM's own dummy weights even zeroed KV gives the same tokens, and a benchmark that cannot
tell right from wrong would praise whoever copies nothing.

Imported by parents, which must not import vLLM or torch; only what runs in a child does.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("base", "native", "kvbm")
DRY_KINDS = ("base", "kvbm")  # vLLM's own offloading needs a GPU
STEP_TOKENS = 8192
FIRST_TOKEN, LAST_TOKEN = 10, 150_000  # prompts are drawn from these

Tokens = list[int]


class Shape(NamedTuple):
    """A dense Qwen3."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    dtype: str
    block_size: int

    @property
    def token_bytes(self) -> int:
        """KV of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * (2 if self.dtype == "bfloat16" else 4)

    def loaded_bytes(self, length: int) -> int:
        """What has to come back for a prompt: all whole blocks but the one with the last token."""
        return (length - 1) // self.block_size * self.block_size * self.token_bytes


QWEN3_8B = Shape("qwen3-8b-random", 36, 4096, 32, 8, 128, 12288, 151936, "bfloat16", 16)
TINY = Shape("qwen3-tiny-random-bench", 2, 64, 2, 1, 32, 128, 151936, "float32", 32)


def shape_of(dry: bool) -> Shape:
    return TINY if dry else QWEN3_8B


def model_folder(shape: Shape, under: Path) -> Path:
    """The model, made if it is not there yet. Needs torch."""
    folder = under.expanduser() / shape.name
    if not (folder / "model.safetensors.index.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        work = Path(tempfile.mkdtemp(prefix=f".{shape.name}-", dir=folder.parent))
        try:
            _write_model(shape, work)
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        print(f"wrote {folder} in {time.monotonic() - began:.0f} s", flush=True)
    return folder


def _write_model(shape: Shape, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    config = {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "head_dim": shape.head_dim, "hidden_act": "silu", "hidden_size": shape.hidden,
        "initializer_range": 0.02, "intermediate_size": shape.mlp, "max_position_embeddings": 131072,
        "max_window_layers": shape.layers, "model_type": "qwen3", "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers, "num_key_value_heads": shape.kv_heads, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "tie_word_embeddings": False, "torch_dtype": shape.dtype, "use_cache": True,
        "use_sliding_window": False, "vocab_size": shape.vocab,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # eight billion random numbers
    dtype = getattr(torch, shape.dtype)

    def normal(*size: int, std: float = 0.02) -> Any:
        return (torch.randn(*size, device=device, dtype=dtype) * std).cpu()

    def full(size: int, value: float = 1.0) -> Any:
        return torch.full((size,), value, dtype=dtype)

    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    files: dict[str, dict[str, Any]] = {}
    ends = {
        "model.embed_tokens.weight": lambda: normal(shape.vocab, hidden, std=1.0),
        "model.norm.weight": lambda: full(hidden),
        "lm_head.weight": lambda: normal(shape.vocab, hidden),
    }
    layer = {
        "input_layernorm.weight": lambda: full(hidden),
        "post_attention_layernorm.weight": lambda: full(hidden),
        # Twos make attention peaked: then the output depends on which keys are there.
        "self_attn.q_norm.weight": lambda: full(shape.head_dim, 2.0),
        "self_attn.k_norm.weight": lambda: full(shape.head_dim, 2.0),
        "self_attn.q_proj.weight": lambda: normal(queries, hidden),
        "self_attn.k_proj.weight": lambda: normal(keys, hidden),
        "self_attn.v_proj.weight": lambda: normal(keys, hidden),
        "self_attn.o_proj.weight": lambda: normal(hidden, queries),
        "mlp.gate_proj.weight": lambda: normal(shape.mlp, hidden),
        "mlp.up_proj.weight": lambda: normal(shape.mlp, hidden),
        "mlp.down_proj.weight": lambda: normal(hidden, shape.mlp),
    }
    files["ends.safetensors"] = ends
    for i in range(shape.layers):
        files[f"layer{i:02}.safetensors"] = {f"model.layers.{i}.{name}": make for name, make in layer.items()}
    places = {}
    for file, weights in files.items():
        save_file({name: make() for name, make in weights.items()}, folder / file)
        places.update(dict.fromkeys(weights, file))
    # Last: a folder with this file is complete.
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def connector(kind: str, gigabytes: float) -> dict[str, Any] | None:
    """``kv_transfer_config`` of a kind."""
    if kind == "native":
        extra = {"cpu_bytes_to_use": int(gigabytes * 1e9)}
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if kind == "kvbm":
        return {
            "kv_connector": "DynamoConnector",
            "kv_connector_module_path": "kvbm.vllm_integration.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
    return None


def open_engine(
    kind: str, *, model: Path, dry: bool, eager: bool, gigabytes: float, length: int, blocks: int, **more: Any
) -> Any:
    """``vllm.LLM`` for a kind, with a cache of ``blocks`` blocks and room for requests of ``length`` tokens."""
    shape = shape_of(dry)
    environment = {
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # needs a compiler at run time
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }  # fmt: skip
    if dry:
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        more["block_size"] = shape.block_size
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    os.environ["DYN_KVBM_CPU_CACHE_GB"] = f"{gigabytes:.6f}"
    transfer = connector(kind, gigabytes)
    if transfer is not None:
        more["kv_transfer_config"] = transfer
    from vllm import LLM

    return LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype=shape.dtype,
        max_model_len=length,
        enforce_eager=eager,
        enable_prefix_caching=True,
        max_num_batched_tokens=STEP_TOKENS,
        seed=0,
        num_gpu_blocks_override=blocks,
        **{"gpu_memory_utilization": 0.5, **more},
    )


def greedy(tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True, **more)


def draw(source: random.Random, length: int) -> Tokens:
    """A prompt that nothing else shares."""
    return [source.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]


def as_prompt(tokens: Tokens) -> Any:
    from vllm.inputs import TokensPrompt

    return TokensPrompt(prompt_token_ids=tokens)


def add_arguments(parser: Any, kinds: tuple[str, ...] = KINDS) -> None:
    """Arguments of every script that runs engines."""
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(kinds), help="engines, in this order")
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
