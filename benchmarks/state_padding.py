"""How much of a state's block is padding, for the published sizes of hybrid models.

    python benchmarks/state_padding.py [--align 16] [--check] [--json FILE]

In hybrid models vLLM gives the states of Mamba layers blocks as large as those of the attention layers. It chooses the
smallest block of the attention layers that holds a state, a multiple of ``--align`` tokens: what the attention kernel
takes, 16 with FlashAttention and FlashInfer. The rest of a state's block is padding, which KVBM copies and keeps. A
group of layers with states has as many layers as there are attention layers; the last group may have fewer, and the
pages of those that it lacks are empty. The shapes of the states are vLLM's own. ``--check`` fails if a model has more
padding or more empty pages than docs/vllm.md says.
"""

from __future__ import annotations

import argparse
import json
import sys
from math import prod
from pathlib import Path
from typing import NamedTuple

from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

MOST = 0.07  # of docs/vllm.md
BYTES = {"bfloat16": 2, "float32": 4}


class Mamba2(NamedTuple):
    heads: int
    head_size: int
    state_size: int
    groups: int

    def shapes(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        return MambaStateShapeCalculator.mamba2_state_shape(
            tp_world_size=ranks, intermediate_size=self.heads * self.head_size, n_groups=self.groups,
            num_heads=self.heads, head_dim=self.head_size, state_size=self.state_size, conv_kernel=4,
        )  # fmt: skip


class GatedDelta(NamedTuple):
    key_heads: int
    value_heads: int
    head_size: int

    def shapes(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        size = self.head_size
        return MambaStateShapeCalculator.gated_delta_net_state_shape(
            ranks, self.key_heads, self.value_heads, size, size, conv_kernel_size=4
        )


class Model(NamedTuple):
    name: str
    state: Mamba2 | GatedDelta
    kv_heads: int
    head_size: int  # of attention
    precision: str  # of the state that is not the convolution's
    attention: int  # layers
    states: int  # layers


MODELS = (
    Model("Qwen3-Next-80B-A3B", GatedDelta(16, 32, 128), 2, 256, "bfloat16", 12, 36),
    Model("Qwen3-Next-80B-A3B, float32 state", GatedDelta(16, 32, 128), 2, 256, "float32", 12, 36),
    Model("Granite 4.0 H Small", Mamba2(128, 64, 128, 1), 8, 128, "bfloat16", 4, 36),
    Model("Granite 4.0 H Tiny", Mamba2(48, 64, 128, 1), 4, 128, "bfloat16", 4, 36),
    Model("Nemotron-H-8B", Mamba2(128, 64, 128, 8), 8, 128, "float32", 4, 24),
    Model("Nemotron-Nano-9B-v2", Mamba2(128, 80, 128, 8), 8, 128, "float32", 4, 27),
    Model("Nemotron-Nano-12B-v2", Mamba2(128, 80, 128, 8), 8, 128, "float32", 6, 28),
)


class Row(NamedTuple):
    model: str
    ranks: int
    state_bytes: int  # of a layer, on a rank
    block_tokens: int
    block_bytes: int
    padding: float  # share of a layer's page in a state's block
    empty: float  # share of the pages in all groups that have no layer


def measure(model: Model, ranks: int, align: int) -> Row:
    conv, temporal = model.state.shapes(ranks)
    state = prod(conv) * BYTES["bfloat16"] + prod(temporal) * BYTES[model.precision]
    token = 2 * max(1, model.kv_heads // ranks) * model.head_size * BYTES["bfloat16"]
    tokens = align * -(-state // (align * token))
    groups = -(-model.states // model.attention)
    empty = 1 - model.states / (groups * model.attention)
    return Row(model.name, ranks, state, tokens, tokens * token, 1 - state / (tokens * token), empty)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--align", type=int, default=16)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [measure(model, ranks, args.align) for model in MODELS for ranks in (1, 2, 4, 8)]
    print(f"{'model':36} {'ranks':>5} {'state KiB':>10} {'block tokens':>12} {'padding':>8} {'empty':>6}")
    for row in rows:
        size = row.state_bytes / 1024
        print(f"{row.model:36} {row.ranks:5} {size:10,.0f} {row.block_tokens:12} {row.padding:8.1%} {row.empty:6.1%}")
    if args.json:
        args.json.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    most = max(max(row.padding, row.empty) for row in rows)
    if args.check and most > MOST:
        print(f"up to {most:.1%} of a state's block is padding or empty, docs/vllm.md says {MOST:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
