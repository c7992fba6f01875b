"""Names of the tiers, for tests."""

from kvbm.tiers import disk, host, objects
from kvbm.tiers.registry import priors

HOST, DISK, OBJECT = host.TIER.name, disk.TIER.name, objects.TIER.name
PRIORS = priors()


class Gone:
    """A journal that hands on the blocks that are gone, and forgets the rest."""

    def __init__(self, tell):
        self.remove = tell

    def put(self, pairs):
        pass

    def touch(self, keys, is_prefix=False):
        pass

    def clear(self):
        pass
