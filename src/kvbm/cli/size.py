"""Say how many blocks, tokens and gigabytes of KV a model needs, before anything starts.

The command reads the model's config.json (a folder, or the Hugging Face hub) and needs neither a GPU nor an engine.

examples:
  kvbm size Qwen/Qwen3-8B --gpu-memory 80             what the GPU holds, and a host tier to go with it
  kvbm size Qwen/Qwen3-8B --tokens 2M                 GB for two million tokens: 100 users with 20,000 each
  kvbm size Qwen/Qwen3-8B --cpu-gb 100 --tp 2
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from kvbm.cli.arguments import count, gigabytes, share, whole
from kvbm.observe.format import columns, size

if TYPE_CHECKING:
    from kvbm.cli.model_kv import ModelKv

NAME = "size"
HELP = "say how many GB a model's KV takes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kvbm.cli.model_kv import DTYPES

    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("--gpu-memory", type=gigabytes, metavar="GB", help="memory of one GPU: 80, 80GB or 80GiB")
    parser.add_argument("--gpu-memory-utilization", type=share, default=0.9, metavar="X", help="vLLM's option (0.9)")
    parser.add_argument("--weights-gb", type=gigabytes, metavar="GB", help="size of the weights, if it is not known")
    parser.add_argument("--tokens", type=count, metavar="N", help="tokens to keep, of all users: 2000000, 128k or 2M")
    parser.add_argument("--cpu-gb", type=gigabytes, metavar="GB", help="how much does a tier of this size hold?")
    parser.add_argument(
        "--tensor-parallel-size", "--tp", "-tp", type=whole, default=1, metavar="N", help="number of GPUs (1)"
    )
    parser.add_argument("--block-size", type=whole, default=16, metavar="N", help="tokens in a block (16)")
    parser.add_argument("--kv-cache-dtype", choices=("auto", *DTYPES), default="auto", help="vLLM's option (auto)")


def run(args: argparse.Namespace) -> int:
    from kvbm.cli.model_kv import ModelError, read_model

    try:
        model = read_model(args.model, args.kv_cache_dtype)
    except ModelError as error:
        print(f"kvbm size: {args.model}: {error}", file=sys.stderr)
        return 1
    token, ranks = model.token_bytes(args.tensor_parallel_size), args.tensor_parallel_size
    block = token * args.block_size

    def holding(amount: float) -> str:
        blocks = int(amount / block)
        return f"{blocks:,} blocks, {blocks * args.block_size:,} tokens"

    shape = "latent vectors (MLA)" if model.latent else f"{model.heads} KV heads"
    rows = [
        ("model", f"{model.layers} layers with {shape}, {model.dtype}"),
        ("a token", size(token)),
        (f"a block of {args.block_size} tokens", size(block) + (f" on {ranks} ranks together" if ranks > 1 else "")),
    ]
    device = None
    if args.gpu_memory:
        try:
            device = _device_bytes(args, model.weights)
        except ValueError as error:
            print(f"kvbm size: {error}", file=sys.stderr)
            return 1
        rows.append(("the engine's own cache", f"about {size(device)}: {holding(device)}"))
    if args.cpu_gb:
        rows.append((f"{args.cpu_gb:g} GB", holding(args.cpu_gb * 1e9)))
    if args.tokens:
        blocks = -(-args.tokens // args.block_size)
        rows.append((f"{args.tokens:,} tokens", f"{blocks:,} blocks, {size(blocks * block)}"))
    print("\n".join(columns(rows)))
    for line in _advice(args, model, device, block):
        print(line)
    return 0


def _device_bytes(args: argparse.Namespace, weights: int | None) -> float:
    """The KV cache of all ranks. Raises ValueError if it is not known."""
    if args.weights_gb:
        weights = int(args.weights_gb * 1e9)
    if weights is None:
        raise ValueError("the size of the weights is not known; give it with --weights-gb")
    left: float = args.gpu_memory * 1e9 * args.gpu_memory_utilization * args.tensor_parallel_size - weights
    if left <= 0:
        raise ValueError(
            f"the weights take {size(weights)}, and {args.tensor_parallel_size} GPU(s) of {args.gpu_memory:g} GB leave "
            f"nothing for KV at --gpu-memory-utilization {args.gpu_memory_utilization:g}"
        )
    return left


def _advice(args: argparse.Namespace, model: ModelKv, device: float | None, block: int) -> list[str]:
    lines = []
    tokens, wanted = f"{args.tokens or 0:,}", -(-(args.tokens or 0) // args.block_size) * block
    if device is not None:
        lines.append("vLLM also needs memory for activations and graphs; its log has the exact size of its cache.")
        if 0 < wanted <= device:
            lines.append(f"{tokens} tokens fit into the engine's own cache: KVBM gains only after restarts.")
        else:
            best = max(wanted, 2 * device) / 1e9
            room = " and room for all tokens" if wanted else ""
            lines.append(f"Choose --cpu-gb {best:.3g} or more: twice the engine's cache{room}.")
    elif wanted:
        best = max(wanted / 1e9, 0.01)
        lines.append(f"Choose --cpu-gb {best:.3g} or more, and more than the engine's own cache (see --gpu-memory).")
    if model.windowed:
        lines.append(f"{model.windowed} layers have a sliding window and may need less; they are counted in full.")
    if model.stateful:
        lines.append(f"{model.stateful} layers keep a state instead of KV; they are not counted.")
    return lines
