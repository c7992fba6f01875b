"""How many bytes of KV a token of a model takes, from its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

_DTYPE_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1,
}  # fmt: skip
DTYPES = tuple(_DTYPE_BYTES)
HUB_SECONDS = 5.0  # for an answer of the Hugging Face hub
_WITHOUT_KV = ("linear_attention", "mamba", "recurrent", "ssm", "conv")


class ModelError(Exception):
    """The model cannot be sized; the message says why."""


class FetchError(ModelError):
    """A file of a model that has a name, and is not on this machine."""


class ModelKv(NamedTuple):
    layers: int  # with a KV cache
    heads: int  # of keys and values, over all layers of a rank; 1 for latent vectors (MLA)
    head_bytes: int  # of one head and one token: keys and values
    dtype: str
    latent: bool  # MLA: all ranks hold the same KV, and one copy is stored
    windowed: int  # layers with a sliding window, counted in full
    stateful: int  # layers with a state instead of KV, not counted
    weights: int | None  # bytes; None if they are not known

    def token_bytes(self, ranks: int = 1) -> int:
        """Of all ranks together. With more ranks than heads, every head is on several ranks."""
        heads = self.heads if self.latent else max(1, -(-self.heads // ranks)) * ranks
        return self.layers * heads * self.head_bytes


def read_model(model: str, kv_dtype: str = "auto") -> ModelKv:
    """`model`: a folder or a name on the Hugging Face hub. Raises ModelError."""
    path = _file(model, "config.json")
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:  # not JSON, or not text
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object")
    return describe(config, kv_dtype, _weights(model))


def describe(config: dict[str, Any], kv_dtype: str = "auto", weights: int | None = None) -> ModelKv:
    inner = config.get("text_config") or config.get("llm_config") or config
    try:
        layers = int(inner["num_hidden_layers"])
        queries = int(inner["num_attention_heads"])
        dtype = kv_dtype
        if kv_dtype == "auto":
            dtype = str(inner.get("dtype") or inner.get("torch_dtype") or config.get("torch_dtype") or "bfloat16")
        itemsize = _DTYPE_BYTES[dtype.removeprefix("torch.")]
        kinds = [str(kind) for kind in inner.get("layer_types") or ()]
        stateful = sum(any(word in kind for word in _WITHOUT_KV) for kind in kinds)
        windowed = sum("sliding" in kind or "chunked" in kind for kind in kinds)
        latent = bool(inner.get("kv_lora_rank"))
        if latent:
            heads, head_bytes = 1, (int(inner["kv_lora_rank"]) + int(inner["qk_rope_head_dim"])) * itemsize
        else:
            heads = int(inner.get("num_key_value_heads") or queries)
            width = int(inner.get("head_dim") or inner["hidden_size"] // queries)
            head_bytes = 2 * width * itemsize
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"its config.json has no usable {error}; vLLM's log names the size of its KV cache") from error
    return ModelKv(layers - stateful, heads, head_bytes, dtype, latent, windowed, stateful, weights)


def _weights(model: str) -> int | None:
    folder = Path(model)
    if folder.is_dir():
        for pattern in ("*.safetensors", "*.bin", "*.gguf"):
            if found := sum(path.stat().st_size for path in folder.glob(pattern)):
                return found
        return None
    try:
        index = json.loads(_file(model, "model.safetensors.index.json").read_text())
        return int(index["metadata"]["total_size"])
    except (ModelError, LookupError, TypeError, ValueError):
        return None


def _file(model: str, name: str) -> Path:
    folder = Path(model).expanduser()
    if not model.strip():
        raise ModelError("the name of the model is empty")
    if folder.is_dir() or model.startswith((".", "/", "~")):
        if folder.is_file():
            raise ModelError(f"it is a file; give the folder of the model, {folder.parent}")
        if not folder.is_dir():
            raise ModelError("there is no such folder")
        if not (folder / name).is_file():
            raise ModelError(f"the folder has no {name}")
        return folder / name
    try:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise ModelError("it is no folder, and huggingface_hub, which finds it by name, is not installed") from None
    try:
        try:
            return Path(hf_hub_download(model, name, local_files_only=True))
        except LocalEntryNotFoundError:  # not downloaded so far
            # One request, as the download repeats a request that is not answered for 25 s.
            get_hf_file_metadata(hf_hub_url(model, name), timeout=HUB_SECONDS)
            return Path(hf_hub_download(model, name))
    except Exception as error:  # the hub's own errors, and those of the network below it
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FetchError(
            f"{name} cannot be fetched from {constants.ENDPOINT}: {first.rstrip('.')}. A folder with "
            f"{name} works without it"
        ) from error
