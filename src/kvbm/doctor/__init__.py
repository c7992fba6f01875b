"""What is wrong with this machine, this set-up or a running engine, and what to do about it.

A *check* looks at one thing and gives findings (:class:`kvbm.observe.snapshot.Finding`), good ones too. Checks are
small classes: ``name``, and ``run`` with the :class:`Examination` that all of them share. A check that cannot look says
so in a note, and one that breaks is a finding itself: whoever asks what is wrong is owed an answer.
"""

from kvbm.doctor.base import Check, Examination, examine
from kvbm.doctor.gpu import Bandwidth, Gpu
from kvbm.doctor.memory import HostMemory
from kvbm.doctor.running import Running
from kvbm.doctor.setup import Connector, Engine, Ports, Settings, Sizes
from kvbm.doctor.tiers import Disk

CHECKS: tuple[Check, ...] = (
    Settings(), Engine(), Connector(), Gpu(), HostMemory(), Bandwidth(), Disk(), Sizes(), Ports(), Running(),
)  # fmt: skip

__all__ = ["CHECKS", "Check", "Examination", "examine"]
