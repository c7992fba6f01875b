"""Looks at the weights that a running vLLM has loaded, for driver.py."""

from __future__ import annotations

import gc

import torch
from safetensors.torch import load_file

from kvbm.engines.vllm import model as loaded
from kvbm.engines.weights import digest_of, tensors_of

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def digest(vllm_config) -> str:
    gc.unfreeze()  # vLLM hides everything from the collector once it has started
    return loaded.digest_of_models(loaded.models_of(vllm_config))


def names(vllm_config) -> list[str]:
    gc.unfreeze()
    return [name for name, _ in tensors_of(loaded.models_of(vllm_config))]


def changes(vllm_config) -> dict:
    """One value of every parameter and buffer is changed, two trade places. Returns how many were, and those that the
    digest missed."""
    gc.unfreeze()
    models = loaded.models_of(vllm_config)
    before = digest_of(tensors_of(models))
    tried, missed = 0, []
    seen = set()
    for name, (tensor,) in tensors_of(models):
        if not tensor.numel() or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        raw = tensor.detach().view(-1).view(torch.uint8) if tensor.is_contiguous() else None
        if raw is None:
            raw = tensor.detach().t().reshape(-1).view(torch.uint8)
            assert raw.data_ptr() == tensor.data_ptr()
        size = tensor.itemsize
        for at in {0, len(raw) - size}:
            raw[at] ^= 1
            tried += 1
            if digest_of(tensors_of(models)) == before:
                missed.append([name, at])
            raw[at] ^= 1
        first, last = raw[:size].clone(), raw[-size:].clone()
        if not torch.equal(first, last):
            raw[:size], raw[-size:] = last, first
            tried += 1
            if digest_of(tensors_of(models)) == before:
                missed.append([name, "swapped"])
            raw[:size], raw[-size:] = first, last
    return {"tried": tried, "missed": missed, "same at the end": digest_of(tensors_of(models)) == before}


def packed(vllm_config, checkpoint: str) -> dict:
    """Reads the linear layers that vLLM has packed, and compares them with the checkpoint, number by number. Then packs
    each of them again with one changed value."""
    gc.unfreeze()
    models = loaded.models_of(vllm_config)
    stored = load_file(checkpoint)
    found: dict = {"layers": 0, "different": [], "missed": [], "repacked": 0}
    before = loaded.digest_of_models(loaded.models_of(vllm_config))
    for label, layer in list(loaded._packed_layers(models)):
        name = label.partition(".")[2].removesuffix(".weight")
        parent, _, own = name.rpartition(".")
        parts = [f"{parent}.{part}" for part in FUSED.get(own, (own,))]
        wanted = torch.cat([stored[f"{part}.weight"].float() for part in parts])
        scales = [stored.get(f"{part}.weight_scale") for part in parts]
        columns = torch.cat(list(loaded._columns(layer))).t().float()
        if scales[0] is not None:
            columns = columns / torch.cat(scales).float().view(-1, 1)
            columns = torch.where((columns - columns.round()).abs() < 0.01, columns.round(), columns)
        found["layers"] += 1
        if not torch.equal(columns, wanted):
            found["different"].append(name)
        if scales[0] is None:
            for at in ((0, 0), (-1, -1)):
                changed = wanted.clone()
                changed[at] = torch.nextafter(changed[at], torch.tensor(9.0))
                _repack(layer, changed)
                found["repacked"] += 1
                if loaded.digest_of_models(loaded.models_of(vllm_config)) == before:
                    found["missed"].append(name)
            _repack(layer, wanted)
    found["same at the end"] = loaded.digest_of_models(loaded.models_of(vllm_config)) == before
    return found


def _repack(layer, weight: torch.Tensor) -> None:
    layer.weight = torch.nn.Parameter(weight.to(layer.params_dtype), requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)
