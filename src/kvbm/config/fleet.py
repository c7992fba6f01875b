"""The settings of engines that read each other's blocks. `Config` derives from this part of the table."""

from pathlib import Path
from typing import Annotated, Literal

from kvbm.config.kinds import Choice, FilePath, Number, Switch, Text
from kvbm.config.objects import ObjectSettings
from kvbm.config.setting import PEERS, Setting

_ADDRESS = r"(\[[0-9A-Fa-f:.]+\]|[^\s:,\[\]]+):\d{1,5}"
_PEER = rf"({_ADDRESS}|file:/[^,]+|etcd)"


class FleetSettings(ObjectSettings, frozen=True, kw_only=True):
    # fmt: off
    peers_enabled: Annotated[bool, Setting(
        "KVBM_PEERS_ENABLED", PEERS, Switch(),
        "Read blocks from the host memory of other engines of the same model, and let them read this engine's. "
        "Engines of this machine and user find each other. Needs a host tier, which is then kept in shared memory.",
    )] = False
    peers: Annotated[str, Setting(
        "KVBM_PEERS", PEERS,
        Text(noun="addresses, file:PATH or etcd, separated by commas", pattern=rf"\s*{_PEER}(\s*,\s*{_PEER})*\s*",
             example="10.0.0.4:23280,10.0.0.5:23280"),
        "Engines on other machines: their addresses (KVBM_PEER_LISTEN; a name with several addresses stands for "
        "several engines), `file:PATH` for a file with one address a line, which is read again when it changes, or "
        "`etcd`: each engine enters itself at ETCD_ENDPOINTS under DYN_NAMESPACE, with a lease. A list may contain "
        "this engine: all engines can have the same one.",
    )] = ""
    peer_listen: Annotated[str, Setting(
        "KVBM_PEER_LISTEN", PEERS,
        Text(noun="an IP address and a port", pattern=_ADDRESS, example="10.0.0.4:23280"),
        "Address at which engines of other machines reach this one. Needs a secret. Empty: this machine only. Port 0 "
        "takes a free one.",
    )] = ""
    peer_advertise: Annotated[str, Setting(
        "KVBM_PEER_ADVERTISE", PEERS,
        Text(noun="a host and a port", pattern=_ADDRESS, example="node-4.example.org:23280"),
        "Address under which other machines know this engine, if that is not KVBM_PEER_LISTEN: for example behind "
        "0.0.0.0, or a port that a container maps.",
    )] = ""
    peer_secret: Annotated[str, Setting(
        "KVBM_PEER_SECRET", PEERS, Text(noun="at least 16 characters", pattern=r".{16,}", example="..."),
        "Secret that all engines of the fleet share. Engines prove to each other that they know it, and encrypt what "
        "they send (AES-GCM). KVBM never prints it.", secret=True,
    )] = ""
    peer_secret_file: Annotated[Path | None, Setting(
        "KVBM_PEER_SECRET_FILE", PEERS, FilePath(example="/run/secrets/kvbm-peers"),
        "File with the secret, in place of KVBM_PEER_SECRET. No other user may be able to read it.",
    )] = None
    peer_transport: Annotated[Literal["auto", "socket", "nixl"], Setting(
        "KVBM_PEER_TRANSPORT", PEERS,
        Choice(words=("auto", "socket", "nixl")),
        "How blocks come from other machines: `socket` (encrypted), `nixl` (RDMA; verified by checksum, not encrypted) "
        "or `auto`: on a machine with RDMA and NIXL the faster of the two, as measured; elsewhere `socket`.",
    )] = "auto"
    peer_name: Annotated[str, Setting(
        "KVBM_PEER_NAME", PEERS, Text(noun="a name without spaces", pattern=r"[^\s]{1,64}", example="decode-0"),
        "Name of this engine's place in the fleet. An engine that starts with the name of a dead one takes over from "
        "it. Empty: KVBM_PEER_LISTEN.",
    )] = ""
    peer_dir: Annotated[Path | None, Setting(
        "KVBM_PEER_DIR", PEERS, FilePath(example="/run/kvbm"),
        "Directory of the Unix sockets through which engines of this machine find each other. Only this user may "
        "enter it. Not set: a directory of this user in /tmp.",
    )] = None
    peer_timeout_secs: Annotated[float, Setting(
        "KVBM_PEER_TIMEOUT_SECS", PEERS,
        Number(unit="seconds", low=0, high=3600, whole=False, above=True, example="1"),
        "Time in seconds without progress after which KVBM gives up a read from a peer. The engine then recomputes the "
        "missing blocks.",
    )] = 1.0
    peer_lookup_secs: Annotated[float, Setting(
        "KVBM_PEER_LOOKUP_SECS", PEERS, Number(unit="seconds", low=0, high=60, whole=False, example="0.05"),
        "Maximum time in seconds that a request waits until KVBM knows which of its blocks the peers hold.",
    )] = 0.05
    peer_orphan_secs: Annotated[float, Setting(
        "KVBM_PEER_ORPHAN_SECS", PEERS, Number(unit="seconds", low=0, high=1_000_000, whole=False, example="600"),
        "Time in seconds for which the blocks of an engine that has died are served, unless its successor starts "
        "before. Its host memory stays allocated for so long.",
    )] = 600.0
    peer_max_gbps: Annotated[float, Setting(
        "KVBM_PEER_MAX_GBPS", PEERS, Number(unit="GB a second", low=0, high=10_000, whole=False, example="5"),
        "Maximum rate, in GB a second, at which this engine sends blocks to all other machines together; each of them "
        "gets an equal share. 0 means no limit.",
    )] = 0.0
    # fmt: on
