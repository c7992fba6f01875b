"""Leader and worker: the halves that meet over plans and reports."""
