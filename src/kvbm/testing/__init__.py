"""Fault injection of every kind (``KVBM_INJECT_FAULTS``): outside the packages that serve requests."""
