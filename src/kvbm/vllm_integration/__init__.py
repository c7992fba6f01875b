"""The module path vLLM deployments name; re-exports only."""
