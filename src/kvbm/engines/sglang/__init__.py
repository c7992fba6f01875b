"""The SGLang adapter: a storage backend for HiCache.

SGLang keeps its own host memory (L2) and asks a storage backend (L3) for pages that it has not, by the hash of the page
and all before it. Every rank has a backend of its own, called from three threads: one asks what there is, one reads,
one writes. :mod:`~kvbm.engines.sglang.backend` has the class that SGLang is pointed at.
:mod:`~kvbm.engines.sglang.store` keeps the pages, in tiers that :mod:`~kvbm.engines.sglang.tiers` opens through the
registry. :mod:`~kvbm.engines.sglang.pages` describes a pool of SGLang's as addresses and sizes.

``python -m kvbm.engines.sglang`` prints the value for ``--hicache-storage-backend-extra-config``.
"""
