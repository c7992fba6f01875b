"""Leader and workers: the leader sends plans, the workers answer with reports."""
