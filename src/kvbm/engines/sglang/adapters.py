"""Servers with LoRA adapters, which this backend does not serve."""

from __future__ import annotations


def refuse_adapters() -> None:
    """Raise ValueError where the server may load LoRA adapters, and where that cannot be read.

    SGLang's names of pages in storage leave the adapter out, or hold an id that does not depend on its weights: one
    adapter would be served the KV of another.
    """
    try:
        from sglang.srt.runtime_context import get_server_args

        arguments = get_server_args()
        enabled = arguments.enable_lora or arguments.lora_paths  # SGLang turns the first on for the second
    except Exception as error:
        raise ValueError(
            "KVBM's storage backend cannot tell whether this server loads LoRA adapters: "
            f"sglang.srt.runtime_context.get_server_args failed ({type(error).__name__}: {error}). Without it one "
            "adapter may be served the KV of another. Use SGLang 0.5.23, or remove --hicache-storage-backend"
        ) from error
    if enabled:
        raise ValueError(
            "--enable-lora: KVBM's storage backend cannot tell pages of different LoRA adapters apart. Remove "
            "--enable-lora and --lora-paths, or --hicache-storage-backend"
        )
