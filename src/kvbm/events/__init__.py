"""Block events: what the tiers hold, told to routers and whoever else wants to know.

``ledger`` keeps account of what subscribers have been told and what they are still owed; an engine's adapter takes the
difference from it and hands it to the engine's own publisher. ``consolidator`` merges several such streams into one,
for set-ups that expect that.
"""
