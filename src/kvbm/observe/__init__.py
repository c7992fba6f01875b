"""Metrics, page, records and terminal output. Nothing here makes a decision or takes time of an engine's step."""
