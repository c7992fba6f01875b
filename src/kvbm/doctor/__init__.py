"""`kvbm doctor`: find faults of this machine, of the settings and of a running engine, each with a cure.

A *check* examines one thing and yields findings (:class:`kvbm.observe.snapshot.Finding`), good ones included. A check
is a small class with a ``name`` and a method ``run``, which takes the :class:`Examination` that all checks share. If a
check cannot examine its subject, it yields a note. An exception in a check becomes a finding, and the others go on.
"""

from kvbm.doctor.base import Check, Examination, examine
from kvbm.doctor.connector import Connector
from kvbm.doctor.gpu import Bandwidth, Gpu
from kvbm.doctor.limits import Limits
from kvbm.doctor.memory import HostMemory
from kvbm.doctor.object_store import ObjectStore
from kvbm.doctor.packing import Packing
from kvbm.doctor.peers import Peers
from kvbm.doctor.registry import Registry
from kvbm.doctor.running import Running
from kvbm.doctor.setup import Engine, Ports, Settings, Shortcuts, Sizes, Versions
from kvbm.doctor.tiers import Disk

CHECKS: tuple[Check, ...] = (
    Versions(), Settings(), Engine(), Shortcuts(), Connector(), Limits(), Gpu(), HostMemory(), Bandwidth(), Disk(),
    ObjectStore(), Peers(), Packing(), Registry(), Sizes(), Ports(), Running(),
)  # fmt: skip

__all__ = ["CHECKS", "Check", "Examination", "examine"]
