"""Look after the caches that outlive an engine, on disk and in host memory.

PATH is the directory of one cache, or one that holds several. Without it: DYN_KVBM_DISK_CACHE_DIR, and for the host
tiers that KVBM_HOST_PERSIST has kept, KVBM_HOST_PERSIST_DIR.
All of it is safe while engines run. `verify` leaves out what changes under it; `clear` refuses a cache in use.
Only caches of this user are looked at, in directories that no other user can exchange; links are not followed.

examples:
  kvbm cache ls                          the caches of this machine
  kvbm cache stat                        everything about each of them
  kvbm cache verify /mnt/nvme/kvbm       read every block and compare it with its checksum
  kvbm cache clear --all                 remove them
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config import load
from kvbm.observe.format import printable, size

if TYPE_CHECKING:
    from kvbm.tiers.disk.inspect import Cache

NAME = "cache"
HELP = "list, check or remove the caches that outlive an engine"

_BAR = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, action, text in (
        ("ls", _ls, "list the caches"),
        ("stat", _stat, "show everything about them"),
        ("verify", _verify, "read every block and compare it with its checksum; the exit code is 1 when one is bad"),
        ("clear", _clear, "remove them"),
    ):
        sub = actions.add_parser(name, help=text, description=text)
        sub.add_argument("path", nargs="?", type=Path, help="a cache, or a directory of caches")
        sub.set_defaults(action=action)
        if action in (_ls, _stat):
            sub.add_argument("--json", action="store_true", help="print JSON")
        if action is _clear:
            sub.add_argument("--all", action="store_true", help="every cache in the directory")


def run(args: argparse.Namespace) -> int:
    from kvbm.tiers.disk import inspect as caches

    roots = [args.path] if args.path else _roots()
    found: list[Path] = []
    code = 0
    for root in roots:
        try:
            found += caches.find(root)
            if skipped := caches.links(root):
                _complain(f"{root}: links are not followed: {', '.join(skipped)}")
        except (caches.CacheError, OSError) as error:
            _complain(error)
            code = 2
    if not found and not code:
        print(f"no caches in {printable(' or '.join(map(str, roots)))}", file=sys.stderr)
    if not found:
        return code
    try:
        done: int = args.action(args, found)
        return max(code, done)
    except (caches.CacheError, OSError) as error:
        _complain(error)
        return 2


def _complain(problem: object) -> None:
    text = problem.strerror if isinstance(problem, OSError) and not problem.filename else problem
    print(f"kvbm: {printable(text, 1000)}", file=sys.stderr)


def _described(paths: list[Path]) -> tuple[list[Cache], int]:
    """What can be read of them, and the exit code: one that cannot be read does not hide the others."""
    from kvbm.tiers.disk import inspect as caches

    found, code = [], 0
    for path in paths:
        try:
            found.append(caches.describe(path))
        except (caches.CacheError, OSError) as error:
            _complain(error)
            code = 2
    return found, code


def _roots() -> list[Path]:
    config = load()
    memory = [config.host_persist_dir] if config.host_persist_dir.is_dir() else []
    return list(dict.fromkeys([config.disk_cache_dir, *memory]))


def _ls(args: argparse.Namespace, paths: list[Path]) -> int:
    found, code = _described(paths)
    if args.json:
        print(json.dumps([_plain(cache) for cache in found], indent=2))
        return code
    rows = [("CACHE", "MODEL", "BLOCKS", "OF", "SIZE", "LAST USED", "IN", "")]
    for cache in found:
        blocks = "?" if cache.blocks is None else f"{cache.blocks:,}"
        state = "in use" if cache.in_use else ""
        rows.append(
            (
                printable(cache.path.name),
                printable(cache.model),
                blocks,
                f"{cache.slots:,}",
                size(cache.disk_bytes),
                _when(cache.used_at),
                printable(cache.path.parent),
                state,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.ljust(widths[at]) if at in (0, 1, 5, 6) else text.rjust(widths[at]) for at, text in enumerate(row)
        ]
        print("  ".join(cells).rstrip())
    return code


def _stat(args: argparse.Namespace, paths: list[Path]) -> int:
    found, code = _described(paths)
    if args.json:
        print(json.dumps([_plain(cache) for cache in found], indent=2))
        return code
    for at, cache in enumerate(found):
        if at:
            print()
        print(printable(cache.path))
        share = f" ({cache.blocks / cache.slots:.0%})" if cache.blocks is not None and cache.slots else ""
        facts = {
            **{printable(name, 40): printable(value) for name, value in cache.fingerprint.items()},
            "blocks": f"{'cannot be read' if cache.blocks is None else f'{cache.blocks:,}'} of {cache.slots:,}{share}",
            "files": f"{cache.ranks} ranks, {size(cache.slot_bytes)} a block on each",
            "size": size(cache.disk_bytes),
            "last used": _when(cache.used_at),
            "state": "in use by an engine" if cache.in_use else "not in use",
        }
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"  {name:{width}}  {value}")
    return code


def _verify(args: argparse.Namespace, paths: list[Path]) -> int:
    from kvbm.tiers.disk import inspect as caches

    code = 0
    for path in paths:
        bar = _Bar(printable(path.name))
        try:
            verdicts = caches.verify(path, bar.show)
        except (caches.CacheError, OSError) as error:
            _complain(error)
            code = 2
            continue
        finally:
            bar.end()
        print(printable(path.name))
        for verdict in verdicts:
            changed = f", {verdict.changed:,} changed meanwhile" if verdict.changed else ""
            print(f"  {printable(verdict.rank)}: {verdict.good:,} blocks good, {len(verdict.bad):,} bad{changed}")
            if verdict.bad:
                code = max(code, 1)
                shown = ", ".join(map(str, verdict.bad[:20])) + (", ..." if len(verdict.bad) > 20 else "")
                print(f"    slots {shown}: an engine that finds them will recompute and drop them")
        if not verdicts:
            print("  no rank has made its file")
    return code


def _clear(args: argparse.Namespace, paths: list[Path]) -> int:
    from kvbm.tiers.disk import inspect as caches
    from kvbm.tiers.lock import CacheInUse

    if args.path not in paths and not args.all:
        names = ", ".join(path.name for path in paths)
        raise caches.CacheError(f"name the cache to remove, or say --all for {names}")
    code = 0
    for path in paths:
        try:
            print(f"{printable(path.name)} removed, {size(caches.clear(path))} free")
        except CacheInUse:
            _complain(f"{path.name} is in use by an engine and stays; stop the engine first")
            code = max(code, 1)
        except (caches.CacheError, OSError) as error:
            _complain(error)
            code = 2
    return code


def _plain(cache: Cache) -> dict[str, object]:
    return {**cache._asdict(), "path": str(cache.path)}


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


class _Bar:
    """A line that fills up, on a terminal; nothing elsewhere."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._on = sys.stderr.isatty()
        self._began = time.monotonic()
        self._last = 0.0

    def show(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._on or not total or (now - self._last < 0.1 and done < total):
            return
        self._last = now
        filled = _BAR * done // total
        left = (now - self._began) / max(1, done) * (total - done)
        bar = "█" * filled + "░" * (_BAR - filled)
        print(f"\r{self._name}  {bar}  {done:,} of {total:,} blocks, {left:.0f} s left \x1b[K", end="", file=sys.stderr)

    def end(self) -> None:
        if self._on:
            print("\r\x1b[K", end="", file=sys.stderr)
