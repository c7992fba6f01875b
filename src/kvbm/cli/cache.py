"""List, verify or remove the persistent caches on disk and in host memory; copy them to and from an object store.

PATH is the directory of one cache, or of several. Without it, the command uses DYN_KVBM_DISK_CACHE_DIR and, for
persistent host tiers (KVBM_HOST_PERSIST), KVBM_HOST_PERSIST_DIR.
The command is safe while engines run: `verify` skips blocks that change, and `clear` refuses a cache in use.
It reads caches of this user only, in directories that no other user can replace, and follows no links.

examples:
  kvbm cache ls                          the caches of this machine
  kvbm cache stat                        the details of each cache
  kvbm cache verify /mnt/nvme/kvbm       read every block and verify its checksum
  kvbm cache clear --all                 remove them

  kvbm cache list                        the caches in the bucket of the settings (DYN_KVBM_OBJECT_*)
  kvbm cache push                        copy the disk caches of this machine to the bucket
  kvbm cache pull --model org/model      copy a cache of the bucket to DYN_KVBM_DISK_CACHE_DIR
  kvbm cache verify --bucket             read every object of the bucket and verify it
  kvbm cache warm prompts.jsonl          let an engine load, or compute, the prompts of a file
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.cli import bucket, warm
from kvbm.config import load
from kvbm.observe.format import columns, moment, printable, size
from kvbm.observe.terminal import block_progress, print_table

if TYPE_CHECKING:
    from kvbm.tiers.disk.inspect import Cache

NAME = "cache"
HELP = "list, verify, remove, copy or warm persistent caches"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, action, text in (
        ("ls", _ls, "list the caches"),
        ("stat", _stat, "show the details of the caches"),
        ("verify", _verify, "read every block and verify its checksum; the exit code is 1 if one is bad"),
        ("clear", _clear, "remove them"),
    ):
        sub = actions.add_parser(name, help=text, description=text)
        sub.add_argument("path", nargs="?", type=Path, help="a cache, or a directory of caches")
        sub.set_defaults(action=action)
        if action in (_ls, _stat):
            sub.add_argument("--json", action="store_true", help="print JSON")
        if action is _clear:
            sub.add_argument("--all", action="store_true", help="every cache in the directory")
        if action is _verify:
            sub.add_argument("--bucket", action="store_true", help="caches in the object store; PATH is a cache there")
    bucket.add_actions(actions)
    warm.add_action(actions)


def run(args: argparse.Namespace) -> int:
    if "command" in args:
        code: int = args.command(args)
        return code
    if getattr(args, "bucket", False):
        return bucket.verify(args)
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
        # Nothing to list is an answer. Nothing to verify or to remove, at a place that the user has named, is not.
        return 1 if args.path and args.action in (_verify, _clear) else 0
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
    """The readable caches, and the exit code: one unreadable cache does not hide the others."""
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
    rows = []
    for cache in found:
        blocks = "?" if cache.blocks is None else f"{cache.blocks:,}"
        sizes = blocks, f"{cache.slots:,}", size(cache.disk_bytes)
        state = "in use" if cache.in_use else ""
        rows.append((cache.path.name, cache.model, *sizes, moment(cache.used_at), cache.path.parent, state))
    print_table(("CACHE", "MODEL", "BLOCKS", "OF", "SIZE", "LAST USED", "IN", ""), rows, right=(2, 3, 4))
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
            "last used": moment(cache.used_at),
            "state": "in use by an engine" if cache.in_use else "not in use",
        }
        print("\n".join(f"  {line}" for line in columns(list(facts.items()))))
    return code


def _verify(args: argparse.Namespace, paths: list[Path]) -> int:
    from kvbm.tiers.disk import inspect as caches

    code = 0
    for path in paths:
        try:
            with block_progress(path.name) as show:
                verdicts = caches.verify(path, show)
        except (caches.CacheError, OSError) as error:
            _complain(error)
            code = 2
            continue
        print(printable(path.name))
        for verdict in verdicts:
            changed = f", {verdict.changed:,} changed during the check" if verdict.changed else ""
            print(f"  {printable(verdict.rank)}: {verdict.good:,} blocks good, {len(verdict.bad):,} bad{changed}")
            if verdict.bad:
                code = max(code, 1)
                shown = ", ".join(map(str, verdict.bad[:20])) + (", ..." if len(verdict.bad) > 20 else "")
                print(f"    slots {shown}: an engine drops them at the next load and recomputes")
        if not verdicts:
            print("  no rank has created its file")
    return code


def _clear(args: argparse.Namespace, paths: list[Path]) -> int:
    from kvbm.tiers.disk import inspect as caches
    from kvbm.tiers.lock import CacheInUse

    if args.path not in paths and not args.all:
        names = ", ".join(path.name for path in paths)
        raise caches.CacheError(f"name the cache to remove, or use --all for {names}")
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
