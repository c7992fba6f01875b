"""`kvbm cache list | push | pull` and `verify --bucket`: caches in the object store of the settings."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm.config import ConfigError, load
from kvbm.observe.format import moment, printable, size
from kvbm.observe.terminal import block_progress, print_table

if TYPE_CHECKING:
    from kvbm.tiers.objects.settings import ObjectSettings
    from kvbm.tiers.objects.tools import BucketCache, Moved

_MAX_SHOWN = 20


def add_actions(actions: Any) -> None:
    for name, command, text in (
        ("list", _list, "list the caches in the bucket"),
        ("push", _push, "copy disk caches to the bucket; blocks that are there already are not sent again"),
        ("pull", _pull, "copy a cache of the bucket to a directory, for an engine's disk tier"),
    ):
        sub = actions.add_parser(name, help=text, description=text)
        sub.set_defaults(command=_guarded(command))
        if command is _list:
            sub.add_argument("--json", action="store_true", help="print JSON")
        if command is _push:
            sub.add_argument("path", nargs="?", type=Path, help="a cache, or a directory of caches")
        if command is _pull:
            sub.add_argument("path", nargs="?", type=Path, help="where to (DYN_KVBM_DISK_CACHE_DIR)")
            sub.add_argument("--model", default="", help="its cache; needed where the bucket has several")
            sub.add_argument("--cache", default="", help="the cache as `kvbm cache list` names it")
            sub.add_argument("--blocks", type=int, default=0, metavar="N", help="the newest N blocks only")


def verify(args: argparse.Namespace) -> int:
    """`kvbm cache verify --bucket [CACHE]`."""
    return _guarded(_verify)(args)


def _guarded(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        from kvbm.tiers.disk.inspect import CacheError
        from kvbm.tiers.objects.tools import ToolError

        try:
            return command(args)
        except (ToolError, CacheError, OSError) as error:
            print(f"kvbm: {printable(error, 1000)}", file=sys.stderr)
            return 2

    return run


def _settings() -> ObjectSettings:
    from kvbm.tiers.objects.settings import settings_for

    try:
        return settings_for(load(), None)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _list(args: argparse.Namespace) -> int:
    from kvbm.tiers.objects import tools

    settings = _settings()
    found = tools.list_caches(settings)
    if args.json:
        print(json.dumps([cache._asdict() for cache in found], indent=2))
        return 0
    if not found:
        print(f"no caches in bucket {printable(settings.bucket)} that these settings can read", file=sys.stderr)
        return 0
    rows = [
        (_name(cache), cache.model, f"{cache.blocks:,}", cache.ranks, size(cache.bytes), moment(cache.modified))
        for cache in found
    ]
    print_table(("CACHE", "MODEL", "BLOCKS", "RANKS", "SIZE", "LAST WRITTEN"), rows, right=(2, 3, 4))
    return 0


def _push(args: argparse.Namespace) -> int:
    from kvbm.tiers.disk import inspect
    from kvbm.tiers.objects import tools

    settings = _settings()
    root = args.path or load().disk_cache_dir
    paths = inspect.find(root)
    if not paths:
        raise tools.ToolError(f"no caches in {root}")
    code = 0
    for path in paths:
        with block_progress(path.name) as show:
            began = time.monotonic()
            moved = tools.push(path, settings, show)
        code = max(code, _say(path.name, "pushed", moved, time.monotonic() - began))
    return code


def _pull(args: argparse.Namespace) -> int:
    from kvbm.tiers.objects import tools

    settings = _settings()
    cache = _chosen(tools.list_caches(settings), settings, args.model, args.cache)
    root = args.path or load().disk_cache_dir
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with block_progress(_name(cache)) as show:
        began = time.monotonic()
        moved = tools.pull(cache, root, settings, show, args.blocks)
    code = _say(_name(cache), f"pulled to {root}", moved, time.monotonic() - began)
    needed = moved.blocks * cache.block_bytes * cache.ranks / 1e9
    print(
        f"  an engine finds them with DYN_KVBM_DISK_CACHE_DIR={root} and DYN_KVBM_DISK_CACHE_GB of {needed:.3f} or more"
    )
    return code


def _verify(args: argparse.Namespace) -> int:
    from kvbm.tiers.objects import tools

    settings = _settings()
    caches = tools.list_caches(settings)
    if args.path is not None:
        caches = [_chosen(caches, settings, "", str(args.path))]
    code = 0
    for cache in caches:
        with block_progress(_name(cache)) as show:
            found = tools.verify(cache, settings, show)
        print(f"{printable(_name(cache))}: {found.good:,} blocks good, {len(found.bad):,} objects bad")
        for name, reason in found.bad[:_MAX_SHOWN]:
            print(f"  {printable(name)}: {printable(reason)}")
        if found.bad:
            code = 1
            print("  an engine deletes a damaged object when it reads it, and recomputes the blocks")
    if not caches:
        print(f"no caches in bucket {printable(settings.bucket)} that these settings can read", file=sys.stderr)
    return code


def _chosen(caches: list[BucketCache], settings: ObjectSettings, model: str, name: str) -> BucketCache:
    from kvbm.tiers.objects.tools import ToolError

    found = [cache for cache in caches if name in ("", _name(cache)) and model in ("", cache.model)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{_name(cache)} ({cache.model})" for cache in caches) or "none that these settings can read"
    asked = f"{len(found)} caches match" if found else "no cache matches"
    raise ToolError(f"{asked} in bucket {settings.bucket}. Name one with --cache or --model: {listed}")


def _say(name: str, what: str, moved: Moved, seconds: float) -> int:
    print(f"{printable(name)}: {moved.blocks:,} blocks {what} in {seconds:.1f} s, {moved.failed:,} failed")
    if moved.failed:
        print(f"  the first because: {printable(moved.reason, 500)}")
    return 1 if moved.failed else 0


def _name(cache: BucketCache) -> str:
    return cache.root.rpartition("/")[2]
