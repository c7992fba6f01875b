"""The tiers below the engine, one folder each.

A tier has two parts. Its *catalog* (:class:`kvbm.core.catalog.Catalog`) lives in the leader and knows which blocks the
tier holds. Its *store* (:class:`kvbm.tiers.base.Store`) lives on each rank and moves bytes. Everything outside a tier's
folder asks what a tier is (:class:`kvbm.tiers.base.Tier`) and never which one.
"""
