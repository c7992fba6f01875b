"""Adapters, one folder an engine. Thin: an engine's types stop here, and nothing else of the project imports them."""
