"""Memory near a device.

On a machine with several NUMA nodes a copy between host memory and a GPU of another node crosses the link between the
processors. ``prefer`` asks the kernel for pages of one node; it is a wish, not an order: a node that is full gives way.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from pathlib import Path
from typing import Any

logger = logging.getLogger("kvbm")

_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}
_NODES = Path("/sys/devices/system/node")


def node_of_pci(bus_id: str) -> int | None:
    """The node a PCI device hangs on; None on a machine with one node, or one that does not say."""
    if len(list(_NODES.glob("node[0-9]*"))) < 2:
        return None
    try:
        node = int((Path("/sys/bus/pci/devices") / bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def node_of_device(device: str) -> int | None:
    """The node of a torch device; None for the CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    try:
        bus_id = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return None
    return node_of_pci(bus_id)


def prefer(address: int, length: int, node: int) -> bool:
    """Ask for the pages of a mapping to come from a node. Before they are touched; False when the kernel refuses."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    words = node // 64 + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // 64] = 1 << (node % 64)
    result = libc.syscall(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(length), ctypes.c_int(_MPOL_PREFERRED),
        mask, ctypes.c_ulong(words * 64 + 1), ctypes.c_uint(0),
    )  # fmt: skip
    if result != 0:
        logger.info("host tier: the kernel would not place it on NUMA node %d (error %d)", node, ctypes.get_errno())
    return bool(result == 0)
