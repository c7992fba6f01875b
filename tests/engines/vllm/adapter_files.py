"""LoRA adapters with random weights for the tiny model, as PEFT saves them."""

from __future__ import annotations

import json
from pathlib import Path


def write_adapter(folder: Path, seed: int) -> str:
    """Large enough weights to change the tokens. Adapters of two seeds have files of the same names and sizes."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(4):
        for module, rows in (("q_proj", 128), ("v_proj", 64)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(4, 128, generator=random) / 2
            weights[f"{name}.lora_B.weight"] = torch.randn(rows, 4, generator=random) / 2
    save_file(weights, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "bias": "none"}
    config |= {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def write_hub_adapter(cache: Path, repository: str, commit: str, seed: int) -> None:
    """A commit in a local Hugging Face cache, which the branch main names from now on."""
    model = cache / f"models--{repository.replace('/', '--')}"
    write_adapter(model / "snapshots" / commit, seed)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(commit)
