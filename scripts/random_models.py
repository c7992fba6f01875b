"""Models with random weights whose output depends on their KV cache, written to disk. No network, no tokenizer.

With vLLM's own dummy weights even zeroed KV gives the same tokens, because attention hardly matters: a test would pass
on a cache that copies nothing. Here attention is peaked, so the output depends on the keys in the cache, and attention
adds as much to a token's state as its embedding does.

Shared by benchmarks/gpu and tests/gpu. Torch is imported when a model is written, not before.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

COMPLETE = "model.safetensors.index.json"  # written last

Weights = Mapping[str, Callable[[], Any]]
Shape: TypeAlias = "Dense | Latent | Windowed | GatedDelta | StateSpace"


class Dense(NamedTuple):
    """A Qwen3: grouped queries, K and V of every head in the cache."""

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
        """Bytes to load for a prompt: all whole blocks but the one with the last token."""
        return (length - 1) // self.block_size * self.block_size * self.token_bytes

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": self.head_dim,
            "max_window_layers": self.layers, "num_key_value_heads": self.kv_heads, "rope_theta": 1000000,
            "use_sliding_window": False,
        }  # fmt: skip

    def attention(self, draw: Draw) -> Weights:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            # Twos: scores between a query and the keys differ by four on average, which makes attention peaked.
            "q_norm.weight": lambda: draw.full(self.head_dim, 2.0),
            "k_norm.weight": lambda: draw.full(self.head_dim, 2.0),
            "q_proj.weight": lambda: draw.normal(queries, self.hidden),
            "k_proj.weight": lambda: draw.normal(keys, self.hidden),
            "v_proj.weight": lambda: draw.normal(keys, self.hidden),
            "o_proj.weight": lambda: draw.normal(self.hidden, queries),
        }


class Latent(NamedTuple):
    """A DeepSeek-V2 without experts: all heads share one compressed vector a token (MLA), 512 numbers and 64 for
    positions, as in every model of that family."""

    name: str
    layers: int
    hidden: int
    heads: int
    mlp: int
    vocab: int
    dtype: str
    compressed: int = 512
    rope: int = 64
    head_dim: int = 128

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "kv_lora_rank": self.compressed,
            "q_lora_rank": None, "qk_nope_head_dim": self.head_dim, "qk_rope_head_dim": self.rope,
            "v_head_dim": self.head_dim, "num_key_value_heads": self.heads, "rope_theta": 10000,
            # As in DeepSeek-V2 itself. Without scaling vLLM 0.31 on a CPU turns the wrong numbers.
            "rope_scaling": {
                "rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
            },
            # No layer has experts, but vLLM requires their number.
            "first_k_dense_replace": self.layers, "n_routed_experts": 2, "n_shared_experts": 1,
            "num_experts_per_tok": 1, "moe_intermediate_size": self.mlp, "moe_layer_freq": 1, "n_group": 1,
            "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        }  # fmt: skip

    def attention(self, draw: Draw) -> Weights:
        size, heads = self.head_dim, self.heads

        def unpacked() -> Any:
            """Keys twice as large as values, for the scores' sake: see above."""
            keys = draw.normal(heads, size, self.compressed, std=2 / math.sqrt(self.compressed))
            values = draw.normal(heads, size, self.compressed, std=1.3 / math.sqrt(self.compressed))
            return draw.beside(keys, values).reshape(heads * 2 * size, self.compressed).contiguous()

        twice = 2 / math.sqrt(self.hidden)
        return {
            "q_proj.weight": lambda: draw.normal(heads * (size + self.rope), self.hidden, std=twice),
            "kv_a_proj_with_mqa.weight": lambda: draw.normal(self.compressed + self.rope, self.hidden, std=twice),
            "kv_a_layernorm.weight": lambda: draw.full(self.compressed),
            "kv_b_proj.weight": unpacked,
            "o_proj.weight": lambda: draw.normal(self.hidden, heads * size, std=1.3 / math.sqrt(heads * size)),
        }


class Windowed(NamedTuple):
    """A Llama of which every third layer sees all tokens, and the others a sliding window."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    dtype: str
    window: int

    def config(self) -> dict[str, Any]:
        kinds = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(self.layers)]
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": self.head_dim,
            "num_key_value_heads": self.kv_heads, "rope_theta": 1000000, "layer_types": kinds,
            "sliding_window": self.window,
        }  # fmt: skip

    def attention(self, draw: Draw) -> Weights:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        twice = 2 / math.sqrt(self.hidden)  # for the scores' sake: see above
        return {
            "q_proj.weight": lambda: draw.normal(queries, self.hidden, std=twice),
            "k_proj.weight": lambda: draw.normal(keys, self.hidden, std=twice),
            "v_proj.weight": lambda: draw.normal(keys, self.hidden),
            "o_proj.weight": lambda: draw.normal(self.hidden, queries),
        }


class GatedDelta(NamedTuple):
    """A Qwen3-Next: every fourth layer is attention, the others keep a state (gated delta net). vLLM requires experts,
    and the last layer has two."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    dtype: str
    key_heads: int = 1
    value_heads: int = 2
    state_dim: int = 32  # of keys and of values
    norm = 0.0  # this family adds one to the weights of its norms

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "head_dim": self.head_dim,
            "num_key_value_heads": self.kv_heads, "rope_theta": 1000000, "partial_rotary_factor": 0.25,
            "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": self.state_dim,
            "linear_value_head_dim": self.state_dim, "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads, "mlp_only_layers": list(range(self.layers - 1)),
            "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": self.mlp,
            "shared_expert_intermediate_size": self.mlp,
        }  # fmt: skip

    def layer(self, draw: Draw, number: int) -> Weights:
        if number % 4 == 3:
            queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
            mixer: Weights = {
                "self_attn.q_norm.weight": lambda: draw.full(self.head_dim, 1.0),  # twos: see Dense
                "self_attn.k_norm.weight": lambda: draw.full(self.head_dim, 1.0),
                "self_attn.q_proj.weight": lambda: draw.normal(2 * queries, self.hidden),  # half of it gates the output
                "self_attn.k_proj.weight": lambda: draw.normal(keys, self.hidden),
                "self_attn.v_proj.weight": lambda: draw.normal(keys, self.hidden),
                "self_attn.o_proj.weight": lambda: draw.normal(self.hidden, queries),
            }
        else:
            key, value = self.key_heads * self.state_dim, self.value_heads * self.state_dim
            mixer = {
                "linear_attn.in_proj_qkvz.weight": lambda: draw.normal(2 * key + 2 * value, self.hidden),
                "linear_attn.in_proj_ba.weight": lambda: draw.normal(2 * self.value_heads, self.hidden),
                "linear_attn.conv1d.weight": lambda: draw.normal(2 * key + value, 1, 4, std=0.5),
                # The state loses about one part in eighty a token: it carries what was many blocks ago.
                "linear_attn.A_log": lambda: draw.full(self.value_heads, -4.0),
                "linear_attn.dt_bias": lambda: draw.full(self.value_heads, 0.0),
                "linear_attn.norm.weight": lambda: draw.full(self.state_dim),
                "linear_attn.out_proj.weight": lambda: draw.normal(self.hidden, value),
            }
        if number < self.layers - 1:
            return {**mixer, **_mlp(self, draw)}
        experts = [f"mlp.{name}" for name in ("experts.0", "experts.1", "shared_expert")]
        return {
            **mixer,
            **{name.replace("mlp", part): make for part in experts for name, make in _mlp(self, draw).items()},
            "mlp.gate.weight": lambda: draw.normal(2, self.hidden),
            "mlp.shared_expert_gate.weight": lambda: draw.normal(1, self.hidden),
        }


class StateSpace(NamedTuple):
    """A Granite 4 without experts: Mamba2 layers and attention in turn."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    dtype: str
    state_heads: int = 4
    state_head_dim: int = 32
    state_dim: int = 16

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
            "num_key_value_heads": self.kv_heads, "position_embedding_type": "nope",
            "layer_types": ["attention" if i % 2 else "mamba" for i in range(self.layers)],
            "attention_multiplier": 1 / math.sqrt(self.hidden / self.heads), "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0, "logits_scaling": 1.0, "num_local_experts": 0, "num_experts_per_tok": 0,
            "shared_intermediate_size": self.mlp, "mamba_n_heads": self.state_heads,
            "mamba_d_head": self.state_head_dim, "mamba_d_state": self.state_dim, "mamba_d_conv": 4,
            "mamba_n_groups": 1, "mamba_chunk_size": 64, "mamba_conv_bias": True, "mamba_proj_bias": False,
            "mamba_expand": self.state_heads * self.state_head_dim // self.hidden,
        }  # fmt: skip

    def layer(self, draw: Draw, number: int) -> Weights:
        inner, state = self.state_heads * self.state_head_dim, self.state_dim
        if number % 2:
            size = self.hidden // self.heads
            twice = 2 / math.sqrt(self.hidden)  # for the scores' sake: see Dense
            mixer: Weights = {
                "self_attn.q_proj.weight": lambda: draw.normal(self.hidden, self.hidden, std=twice),
                "self_attn.k_proj.weight": lambda: draw.normal(self.kv_heads * size, self.hidden, std=twice),
                "self_attn.v_proj.weight": lambda: draw.normal(self.kv_heads * size, self.hidden),
                "self_attn.o_proj.weight": lambda: draw.normal(self.hidden, self.hidden),
            }
        else:
            mixer = {
                "mamba.in_proj.weight": lambda: draw.normal(2 * inner + 2 * state + self.state_heads, self.hidden),
                "mamba.conv1d.weight": lambda: draw.normal(inner + 2 * state, 1, 4, std=0.5),
                "mamba.conv1d.bias": lambda: draw.full(inner + 2 * state, 0.0),
                # The state loses about one part in fifty a token: it carries what was many blocks ago.
                "mamba.A_log": lambda: draw.full(self.state_heads, -1.0),
                "mamba.D": lambda: draw.full(self.state_heads),
                "mamba.dt_bias": lambda: draw.full(self.state_heads, -3.0),
                "mamba.norm.weight": lambda: draw.full(inner),
                "mamba.out_proj.weight": lambda: draw.normal(self.hidden, inner),
            }
        return {
            **mixer,
            "shared_mlp.input_linear.weight": lambda: draw.normal(2 * self.mlp, self.hidden),
            "shared_mlp.output_linear.weight": lambda: draw.normal(self.hidden, self.mlp),
        }


class Draw:
    """Makes weights. Most models start with a ``std`` of 0.02 at a width of 4,096; here the output of a layer has the
    same spread at all widths."""

    def __init__(self, shape: Shape) -> None:
        import torch

        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"  # a model may have eight billion numbers
        self._dtype = getattr(torch, shape.dtype)
        self._std = 0.02 * math.sqrt(4096 / shape.hidden)
        torch.manual_seed(0)

    def normal(self, *size: int, std: float | None = None) -> Any:
        numbers = self._torch.randn(*size, device=self._device, dtype=self._dtype)
        return (numbers * (self._std if std is None else std)).cpu()

    def full(self, size: int, value: float = 1.0) -> Any:
        return self._torch.full((size,), value, dtype=self._dtype)

    def beside(self, left: Any, right: Any) -> Any:
        return self._torch.cat([left, right], dim=1)


def model_folder(shape: Shape, under: Path) -> Path:
    """The folder of the model, which is built if it does not exist. Needs torch."""
    folder = under.expanduser() / shape.name
    if not (folder / COMPLETE).exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        work = Path(tempfile.mkdtemp(prefix=f".{shape.name}-", dir=folder.parent))
        try:
            _write(shape, work)
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        print(f"wrote {folder} in {time.monotonic() - began:.0f} s", flush=True)
    return folder


def config_folder(shape: Shape, under: Path) -> Path:
    """A folder with the model's configuration and no weights. Needs no torch."""
    folder = under.expanduser() / f"{shape.name}-config"
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(shape, folder)
    return folder


def _layer(shape: Shape, draw: Draw, number: int) -> Weights:
    """A layer's weights, all but its norms."""
    if isinstance(shape, GatedDelta | StateSpace):
        return shape.layer(draw, number)
    return {**{f"self_attn.{name}": make for name, make in shape.attention(draw).items()}, **_mlp(shape, draw)}


def _mlp(shape: Dense | Latent | Windowed | GatedDelta, draw: Draw) -> Weights:
    return {
        "mlp.gate_proj.weight": lambda: draw.normal(shape.mlp, shape.hidden),
        "mlp.up_proj.weight": lambda: draw.normal(shape.mlp, shape.hidden),
        "mlp.down_proj.weight": lambda: draw.normal(shape.hidden, shape.mlp),
    }


def _write_config(shape: Shape, folder: Path) -> None:
    config = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": shape.hidden, "initializer_range": 0.02, "intermediate_size": shape.mlp,
        "max_position_embeddings": 131072, "num_attention_heads": shape.heads, "num_hidden_layers": shape.layers,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": shape.dtype, "use_cache": True,
        "vocab_size": shape.vocab, **shape.config(),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def _write(shape: Shape, folder: Path) -> None:
    from safetensors.torch import save_file

    _write_config(shape, folder)
    draw, norm = Draw(shape), getattr(shape, "norm", 1.0)
    ends = {
        "model.embed_tokens.weight": lambda: draw.normal(shape.vocab, shape.hidden, std=1.0),
        "model.norm.weight": lambda: draw.full(shape.hidden, norm),
        "lm_head.weight": lambda: draw.normal(shape.vocab, shape.hidden),
    }
    norms = {
        "input_layernorm.weight": lambda: draw.full(shape.hidden, norm),
        "post_attention_layernorm.weight": lambda: draw.full(shape.hidden, norm),
    }
    files: dict[str, Weights] = {"ends.safetensors": ends}
    for i in range(shape.layers):
        layer = {**norms, **_layer(shape, draw, i)}
        files[f"layer{i:02}.safetensors"] = {f"model.layers.{i}.{name}": make for name, make in layer.items()}
    places = {}
    for file, weights in files.items():
        save_file({name: make() for name, make in weights.items()}, folder / file)
        places.update(dict.fromkeys(weights, file))
    (folder / COMPLETE).write_text(json.dumps({"metadata": {}, "weight_map": places}))
