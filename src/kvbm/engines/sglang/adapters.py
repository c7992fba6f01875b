"""Servers with LoRA adapters, which this backend does not serve."""

from __future__ import annotations


def refuse_adapters() -> None:
    """Raise ValueError where the server may load LoRA adapters.

    SGLang's names of pages in storage leave the adapter out, or hold an id that does not depend on its weights: one
    adapter would be served the KV of another.
    """
    try:
        from sglang.srt.runtime_context import get_server_args

        enabled = bool(get_server_args().enable_lora)
    except Exception:
        return  # a release that does not say; there is nothing else to go by
    if enabled:
        raise ValueError(
            "--enable-lora: KVBM's storage backend cannot tell pages of different LoRA adapters apart. Remove "
            "--enable-lora and --lora-paths, or --hicache-storage-backend"
        )
