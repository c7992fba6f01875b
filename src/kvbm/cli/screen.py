"""What `kvbm top` draws, with rich."""

from __future__ import annotations

import shutil
import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvbm.observe.format import seconds, size
from kvbm.observe.remote import NotReachableError, fetch
from kvbm.observe.snapshot import DEVICE, Flow, Request, Served, Snapshot, SourceFlow, TierState

MAX_SOURCES = 8  # of a tier that are shown
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
    """Draw until the user presses Ctrl-C."""
    before: Snapshot | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                now = fetch(url, 50)
                live.update(draw(before if before and before.started == now.started else None, now), refresh=True)
                before = now
            except NotReachableError as error:
                live.update(Text(f"{error}\n\ntrying again; Ctrl-C stops"), refresh=True)
            time.sleep(every)


def draw(before: Snapshot | None, now: Snapshot) -> Group:
    """The screen. Rates are between the two snapshots."""
    engine, window, saved = now.identity, now.hit_rates, now.saved
    ranks = f"{engine.ranks} rank{'' if engine.ranks == 1 else 's'}"
    title = f" {engine.kvbm}   {engine.model} on {engine.engine} {engine.engine_version}, {ranks}, up "
    lines = [_line(("KVBM", "bold"), title + seconds(now.at - now.started))]
    lines += [Text(finding.text, _LEVELS[finding.level]) for finding in now.findings[:3]]
    rates = ", ".join(f"{tier.tier} {window.rate(tier.tier):.0%}" for tier in now.tiers)
    net = seconds(saved.saved_seconds - saved.lost_seconds)
    guess = "" if saved.measured else ", speed of prefill not measured yet"
    faults = sum(now.failures.values())
    own = f"{size(engine.engine_blocks * engine.block_bytes)}, {engine.engine_blocks:,} blocks"
    device = f"{own if engine.engine_blocks else 'size not known'}, the engine's own"
    lines += [
        Text(),
        _line("hit rate  ", (rates, "bold"), f" of {window.blocks:,} blocks, last {window.requests:,} requests"),
        _line("saved     ", (net, "bold"), f" to first token in {saved.loads:,} loads (estimated{guess})"),
        _line("faults    ", (f"{faults:,}", "red" if faults else "")),
        Text(),
        _line((f"{'device':8}", "bold"), (device, "dim")),
    ]
    for tier in now.tiers:
        flows = [flow for flow in now.flows if tier.tier in (flow.source, flow.target)]
        lines += [_flow(flow, before, now) for flow in flows if flow.source != tier.tier or flow.target == DEVICE]
        lines.append(_tier(tier))
        sources = sorted((s for s in now.sources if s.tier == tier.tier), key=lambda s: -s.blocks)
        lines += [_source(source) for source in sources[:MAX_SOURCES]]
        if len(sources) > MAX_SOURCES:
            lines.append(_line((f"    and {len(sources) - MAX_SOURCES} more sources", "dim")))
        lines += [_served(served) for served in now.served if served.tier == tier.tier]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("when", "prompt", "device", "loaded", "took", "saved"):
        table.add_column(name, justify="right", min_width=8, no_wrap=True)
    table.add_column("why", no_wrap=True, overflow="ellipsis")
    for request in now.requests:
        table.add_row(*_request(request))
    return Group(*lines, Text(), table if now.requests else Text("no request yet", "dim"))


def _line(*parts: str | Text | tuple[str, str]) -> Text:
    """Cut at the end of the screen."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _flow(flow: Flow, before: Snapshot | None, now: Snapshot) -> Text:
    blocks = moved = 0.0
    if before is not None and now.at > before.at:
        old = next((f for f in before.flows if (f.source, f.target) == (flow.source, flow.target)), flow)
        blocks = (flow.blocks - old.blocks) / (now.at - before.at)
        moved = (flow.bytes - old.bytes) / (now.at - before.at)
    sign = "↑" if flow.target == DEVICE else "↓"
    waiting = f", {flow.queued_blocks:,} waiting" if flow.queued_blocks else ""
    way = f"  {sign} {flow.source + ' → ' + flow.target:17}"
    text = (
        f"{way}{blocks:9.1f} blocks/s {size(moved) + '/s':>12}{waiting}   ({flow.blocks:,} blocks, {size(flow.bytes)})"
    )
    return _line((text, "" if blocks else "dim"))


def _tier(tier: TierState, cells: int = 30) -> Text:
    used = tier.slots - tier.free
    bar = Text()
    for slots, style in ((tier.pinned, "green"), (tier.idle, "blue"), (tier.writing, "yellow")):
        bar.append("█" * min(cells - len(bar), -(-slots * cells // max(1, tier.slots))), style)
    bar.append("░" * (cells - len(bar)), "dim")
    text = " size not known"
    if tier.slots:
        text = f" {size(used * tier.block_bytes)} of {size(tier.slots * tier.block_bytes)} ({used / tier.slots:.0%})"
    evicted = f", {tier.evictions:,} evicted" if tier.evictions else ""
    return _line((f"{tier.tier:8}", "bold"), bar, text + evicted)


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
