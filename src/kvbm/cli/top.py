"""Watch a running KVBM in the terminal: tiers, what moves between them, hit rates, time saved, the latest requests.

The engine must have been started with DYN_KVBM_METRICS=1. The same is on a web page at the same address.

examples:
  kvbm top                       the engine on this machine
  kvbm top 6881                  another port
  kvbm top gpu-host:6880         another machine; its engine needs KVBM_METRICS_HOST
  kvbm top --once                print once and end
"""

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator

from kvbm.config import load
from kvbm.observe.format import seconds, size
from kvbm.observe.remote import NotReachableError, fetch, normal_url
from kvbm.observe.snapshot import DEVICE, Flow, Request, Snapshot, TierState

NAME = "top"
HELP = "watch a running KVBM in the terminal"

BOLD, SOFT, GREEN, YELLOW, RED, BLUE, PLAIN = (
    f"\x1b[{code}m" for code in ("1", "2", "32", "33", "31", "34", "0")
)  # fmt: skip
_LEVELS = {"good": GREEN, "note": YELLOW, "bad": RED}
_ESCAPES = re.compile(r"\x1b\[[\d;]*m")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", help="port, host:port or URL (DYN_KVBM_METRICS_PORT on this machine)")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="time between looks (1)")
    parser.add_argument("--once", action="store_true", help="print once and end")


def run(args: argparse.Namespace) -> int:
    url = normal_url(args.url or str(load().metrics_port))
    terminal = sys.stdout.isatty()
    color = terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    if args.once or not terminal:
        return _once(url, color)
    print("\x1b[?1049h\x1b[?25l", end="")  # another screen, no cursor
    try:
        _watch(url, max(0.1, args.every), color)
    except KeyboardInterrupt:
        pass
    finally:
        print("\x1b[?25h\x1b[?1049l", end="", flush=True)
    return 0


def _once(url: str, color: bool) -> int:
    try:
        before = fetch(url)
        time.sleep(0.5)  # rates need two looks
        now = fetch(url, 20)
    except NotReachableError as error:
        print(f"kvbm top: {error}", file=sys.stderr)
        return 1
    print("\n".join(draw(before, now, shutil.get_terminal_size((100, 40)).columns, color)))
    return 0


def _watch(url: str, every: float, color: bool) -> None:
    before: Snapshot | None = None
    while True:
        width, height = shutil.get_terminal_size()
        try:
            now = fetch(url, 50)
            lines = draw(before if before is not None and before.started == now.started else None, now, width, color)
            before = now
        except NotReachableError as error:
            lines = [str(error)[: width * 3], "", "trying again; Ctrl-C ends"]
        shown = "\n".join(f"{line}\x1b[K" for line in lines[: height - 1])
        print(f"\x1b[H{shown}\x1b[J", end="", flush=True)
        time.sleep(every)


# -- drawing ----------------------------------------------------------------------------------------------------------


def draw(before: Snapshot | None, now: Snapshot, width: int = 100, color: bool = False) -> list[str]:
    """The screen, line by line. Rates are between the two snapshots."""
    lines = list(_lines(before, now, max(40, width)))
    return lines if color else [_ESCAPES.sub("", line) for line in lines]


def _lines(before: Snapshot | None, now: Snapshot, width: int) -> Iterator[str]:
    who = now.identity
    ranks = f"{who.ranks} rank{'' if who.ranks == 1 else 's'}"
    up = seconds(now.at - now.started)
    yield f"{BOLD}KVBM{PLAIN} {who.kvbm}   {who.model} on {who.engine} {who.engine_version}, {ranks}, up {up}"
    for finding in now.findings[:3]:
        yield from _wrapped(finding.text, width, _LEVELS[finding.level])
    yield ""
    window = now.hit_rates
    rates = ", ".join(f"{tier.tier} {window.rate(tier.tier):.0%}" for tier in now.tiers)
    net = now.saved.saved_seconds - now.saved.lost_seconds
    guess = "" if now.saved.measured else ", speed of prefill guessed"
    yield f"hit rate  {BOLD}{rates}{PLAIN} of {window.blocks:,} blocks, last {window.requests:,} requests"
    yield f"saved     {BOLD}{seconds(net)}{PLAIN} to first token in {now.saved.loads:,} loads (estimated{guess})"
    faults = sum(now.failures.values())
    yield f"faults    {RED if faults else ''}{faults:,}{PLAIN}"
    yield ""
    device = (
        f"{size(who.engine_blocks * who.block_bytes):>9}, {who.engine_blocks:,} blocks" if who.engine_blocks else ""
    )
    yield f"{BOLD}{'device':7}{PLAIN} {SOFT}{device or 'size not known'} of the engine's own{PLAIN}"
    for tier in now.tiers:
        for flow in (f for f in now.flows if tier.tier in (f.source, f.target)):
            if flow.source != tier.tier or flow.target == DEVICE:
                yield _flow(flow, before, now)
        yield _tier(tier, width)
    yield ""
    yield f"{SOFT}{'when':>8} {'prompt':>8} {'device':>8} {'loaded':>8} {'took':>8} {'saved':>8}  why{PLAIN}"
    for request in now.requests:
        yield _request(request, width)
    if not now.requests:
        yield f"{SOFT}no request yet{PLAIN}"


def _flow(flow: Flow, before: Snapshot | None, now: Snapshot) -> str:
    blocks = moved = 0.0
    if before is not None and now.at > before.at:
        old = next((f for f in before.flows if (f.source, f.target) == (flow.source, flow.target)), flow)
        blocks = (flow.blocks - old.blocks) / (now.at - before.at)
        moved = (flow.bytes - old.bytes) / (now.at - before.at)
    sign = "↑" if flow.target == DEVICE else "↓"
    waiting = f", {flow.queued_blocks:,} waiting" if flow.queued_blocks else ""
    tone = "" if blocks else SOFT
    return (
        f"  {tone}{sign} {flow.source + ' → ' + flow.target:17}{blocks:9.1f} blocks/s {size(moved) + '/s':>12}{waiting}"
        f"   ({flow.blocks:,} blocks, {size(flow.bytes)}){PLAIN}"
    )


def _tier(tier: TierState, width: int) -> str:
    used = tier.slots - tier.free
    room = max(10, min(40, width - 60))
    parts = {GREEN: tier.pinned, BLUE: tier.idle, YELLOW: tier.writing}
    bar, cells = "", 0
    for tone, slots in parts.items():
        count = min(room - cells, -(-slots * room // tier.slots) if slots else 0)
        bar += f"{tone}{'█' * count}{PLAIN}"
        cells += count
    text = f"{size(used * tier.block_bytes)} of {size(tier.slots * tier.block_bytes)} ({used / tier.slots:.0%})"
    evicted = f", {tier.evictions:,} evicted" if tier.evictions else ""
    return f"{BOLD}{tier.tier:7}{PLAIN} {bar}{SOFT}{'░' * (room - cells)}{PLAIN} {text}{evicted}"


def _request(request: Request, width: int) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(request.at))
    took = "-" if request.load_seconds is None else seconds(request.load_seconds)
    saved = "-" if request.saved_seconds is None else seconds(request.saved_seconds)
    start = (
        f"{when:>8} {request.prompt_tokens:>8,} {request.device_tokens:>8,} {request.loaded_tokens:>8,} {took:>8} "
        f"{saved:>8}  "
    )
    lost = f" ({request.failed_tokens:,} tokens did not arrive)" if request.failed_tokens else ""
    return start + (request.why + lost)[: max(10, width - len(start))]


def _wrapped(text: str, width: int, tone: str) -> Iterator[str]:
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            yield f"{tone}{line}{PLAIN}"
            line = word
        else:
            line = f"{line} {word}".lstrip()
    yield f"{tone}{line}{PLAIN}"
