"""What `kvbm top` draws, with rich. It fits a terminal of 60 columns and 20 lines."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvbm.observe.format import seconds, size
from kvbm.observe.remote import NotReachableError, fetch
from kvbm.observe.snapshot import DEVICE, Flow, Request, Served, Snapshot, SourceFlow, TierState

MAX_SOURCES = 8  # of a tier that are shown
_QUIT = "q or Ctrl-C quits"
_NARROW = 90  # columns; below it, a request is shown with less
_COLUMNS = ("when", "prompt", "device", "loaded", "took", "saved")
_FEW_COLUMNS = ("when", "prompt", "loaded", "saved")
_LEVELS = {"good": "green", "note": "yellow", "bad": "red"}


def open_console(is_terminal: bool) -> Console:
    """Text from an engine is never read as markup. Output that is piped is plain, and as wide as COLUMNS or 100."""
    width = None if is_terminal else shutil.get_terminal_size((100, 40)).columns
    return Console(width=width, force_terminal=is_terminal, markup=False, emoji=False, highlight=False)


def show_once(url: str, console: Console) -> None:
    before = fetch(url)
    time.sleep(0.5)  # rates need two snapshots
    console.print(draw(before, fetch(url, 20)))


def watch(url: str, every: float, console: Console) -> None:
    """Draw until the user presses q or Ctrl-C."""
    before: Snapshot | None = None
    with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                now = fetch(url, 50)
                known = before if before and before.started == now.started else None
                live.update(draw(known, now, console.width, console.height), refresh=True)
                before = now
            except NotReachableError as error:
                live.update(Text(f"{error}\n\ntrying again; {_QUIT}"), refresh=True)
            if _pressed_q(every):
                return


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Keys arrive without Enter, where standard input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed_q(seconds_to_wait: float) -> bool:
    if not sys.stdin.isatty():
        time.sleep(seconds_to_wait)
        return False
    deadline = time.monotonic() + seconds_to_wait
    while (left := deadline - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0]:
            key = os.read(sys.stdin.fileno(), 1)
            if key in (b"q", b"Q", b""):
                return True
    return False


def draw(before: Snapshot | None, now: Snapshot, width: int = 100, height: int = 0) -> Group:
    """The screen. Rates are between the two snapshots. ``height``: lines of the terminal; 0: no limit."""
    engine, window, saved = now.identity, now.hit_rates, now.saved
    ranks = f"{engine.ranks} rank{'' if engine.ranks == 1 else 's'}"
    title = f" {engine.kvbm}   {engine.model} on {engine.engine} {engine.engine_version}, {ranks}, up "
    lines = [_line(("KVBM", "bold"), title + seconds(now.at - now.started))]
    for finding in now.findings[: 1 if 0 < height < 30 else 3]:
        lines.append(Text(finding.text, _LEVELS[finding.level]))
    rates = ", ".join(f"{tier.tier} {window.rate(tier.tier):.0%}" for tier in now.tiers)
    net = seconds(saved.saved_seconds - saved.lost_seconds)
    guess = "" if saved.measured else ", speed of prefill not measured yet"
    faults = sum(now.failures.values())
    own = f"{size(round(engine.engine_blocks * engine.block_bytes / engine.packed))}, {engine.engine_blocks:,} blocks"
    packed = f", packed to {engine.packed:.0%} in the tiers" if engine.packed < 1 else ""
    device = f"{own if engine.engine_blocks else 'size not known'}, the engine's own{packed}"
    over = f" of {window.blocks:,} blocks"
    if 10 + len(rates + over) + 25 <= width:
        over += f", last {window.requests:,} requests"
    if height == 0 or height >= 24:
        lines.append(Text())
    lines += [
        _line("hit rate  ", (rates, "bold"), over),
        _line("saved     ", (net, "bold"), f" to first token in {saved.loads:,} loads (estimated{guess})"),
        _line("faults    ", (f"{faults:,}", "red" if faults else "")),
        Text(),
        _line((f"{'device':8}", "bold"), (device, "dim")),
    ]
    for tier in now.tiers:
        flows = [flow for flow in now.flows if tier.tier in (flow.source, flow.target)]
        here = [flow for flow in flows if flow.source != tier.tier or flow.target == DEVICE]
        lines += [_flow(flow, before, now, is_short=width < _NARROW) for flow in here]
        lines.append(_tier(tier, 30 if width >= _NARROW else 16, width))
        sources = sorted((s for s in now.sources if s.tier == tier.tier), key=lambda s: -s.blocks)
        lines += [_source(source) for source in sources[:MAX_SOURCES]]
        if len(sources) > MAX_SOURCES:
            lines.append(_line((f"    and {len(sources) - MAX_SOURCES} more sources", "dim")))
        lines += [_served(served) for served in now.served if served.tier == tier.tier]
    # The wrapped lines of findings, the table's header and empty lines take room too.
    used = sum(1 if line.no_wrap else len(textwrap.wrap(line.plain, width)) or 1 for line in lines) + 3
    end = [_line((_QUIT, "dim"))] if height else []
    return Group(*lines, Text(), *_requests(now.requests, width, height - used if height else None), *end)


def _requests(requests: Sequence[Request], width: int, height: int | None) -> Iterator[RenderableType]:
    """The latest requests, in at most so many lines. The reason wraps: it is the only column without a bound."""
    if not requests:
        yield Text("no request yet", "dim")
        return
    shown = _COLUMNS if width >= _NARROW else _FEW_COLUMNS
    rows = [dict(zip((*_COLUMNS, "why"), _request(request), strict=True)) for request in requests]
    table = Table(box=None, pad_edge=False, header_style="dim")
    left = width
    for name in shown:
        least = 8 if name == "when" else 6
        table.add_column(name, justify="right", min_width=least, no_wrap=True)
        left -= max(least, *(len(row[name]) for row in rows)) + 2
    table.add_column("why")
    for row in rows:
        why = textwrap.wrap(row["why"], max(10, left)) or [""]
        if height is not None and (height := height - len(why)) < 0:
            break
        table.add_row(*(row[name] for name in shown), "\n".join(why))
    yield table


def _line(*parts: str | Text | tuple[str, str]) -> Text:
    """Cut at the end of the screen."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _flow(flow: Flow, before: Snapshot | None, now: Snapshot, is_short: bool) -> Text:
    blocks = moved = 0.0
    if before is not None and now.at > before.at:
        old = next((f for f in before.flows if (f.source, f.target) == (flow.source, flow.target)), flow)
        blocks = (flow.blocks - old.blocks) / (now.at - before.at)
        moved = (flow.bytes - old.bytes) / (now.at - before.at)
    sign = "↑" if flow.target == DEVICE else "↓"
    waiting = f", {flow.queued_blocks:,} waiting" if flow.queued_blocks else ""
    way = f"  {sign} {flow.source + ' → ' + flow.target:17}"
    all_time = "" if is_short else f"   ({flow.blocks:,} blocks, {size(flow.bytes)})"
    wide = 6 if is_short else 9
    text = f"{way}{blocks:{wide}.1f} blocks/s {size(moved) + '/s':>{wide + 3}}{waiting}{all_time}"
    return _line((text, "" if blocks else "dim"))


def _tier(tier: TierState, cells: int, width: int) -> Text:
    used = tier.slots - tier.free
    bar = Text()
    for slots, style in ((tier.pinned, "green"), (tier.idle, "blue"), (tier.writing, "yellow")):
        bar.append("█" * min(cells - len(bar), -(-slots * cells // max(1, tier.slots))), style)
    bar.append("░" * (cells - len(bar)), "dim")
    text = " size not known"
    if not tier.bounded:
        text = f" {size(used * tier.block_bytes)} known to this engine"
    elif tier.slots:
        text = f" {size(used * tier.block_bytes)} of {size(tier.slots * tier.block_bytes)} ({used / tier.slots:.0%})"
    if tier.evictions and 8 + cells + len(evicted := f"{text}, {tier.evictions:,} evicted") <= width:
        text = evicted
    return _line((f"{tier.tier:8}", "bold"), bar, text)


def _source(source: SourceFlow) -> Text:
    rate = f", {size(source.bytes_per_second)}/s" if source.bytes_per_second else ""
    refused = f", {sum(source.refused.values()):,} refused" if source.refused else ""
    state = ", suspended" if source.suspended else ""
    text = f"    ← {source.source}  {source.blocks:,} blocks, {size(source.bytes)}{rate} over {source.path}"
    return _line((text + refused + state, "" if source.blocks else "dim"))


def _served(served: Served) -> Text:
    refused = f", {sum(served.refused.values()):,} refused" if served.refused else ""
    text = f"    → other engines have read {served.blocks:,} blocks, {size(served.bytes)}{refused}"
    return _line((text, "" if served.blocks else "dim"))


def _request(request: Request) -> list[str]:
    times = ("-" if each is None else seconds(each) for each in (request.load_seconds, request.saved_seconds))
    tokens = (f"{each:,}" for each in (request.prompt_tokens, request.device_tokens, request.loaded_tokens))
    lost = f" ({request.failed_tokens:,} tokens did not arrive)" if request.failed_tokens else ""
    return [time.strftime("%H:%M:%S", time.localtime(request.at)), *tokens, *times, request.why + lost]
