"""Replays a trace of requests through KVBM's own bookkeeping, at any sizes of the tiers.

The simulator stands in for the engine and for the workers. Everything between them is the code that serves an engine:
the request lifecycle (:mod:`kvbm.engines.session`), the leader, the block manager, catalogs, eviction policies,
admission rules, edges and the cost model. No bytes move, and the trace's timestamps are the clock.

``trace`` reads requests, ``engine`` replays them, ``optimum`` knows the future, ``sweep`` runs many sizes side by side
and gives advice, ``report`` writes the page.
"""
