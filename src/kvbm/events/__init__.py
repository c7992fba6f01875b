"""Block events: routers and other subscribers learn which blocks each tier holds.

``ledger`` records the events that subscribers have received and those that they are still owed. An engine's adapter
takes the owed events and passes them to the engine's own publisher. ``consolidator`` merges several streams into one,
for deployments that expect one.
"""
