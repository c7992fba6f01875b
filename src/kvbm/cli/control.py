"""Look at the tiers of a running engine, empty them, or have routers told once more what they hold.

  kvbm control list                          engines on this machine, and in Dynamo's deployment if it is configured
  kvbm control status                        blocks in use, evictable and empty, by tier
  kvbm control reset host                    forget every block of a tier
  kvbm control reset host --block 17 ...     forget these blocks, named as in events or by their hash
  kvbm control reset all                     forget every block of every tier; with --block these, wherever they are
  kvbm control announce                      tell subscribers of block events about every block again

Orders go to engines of your own user only, for root too: `runuser -u USER -- kvbm control ...` gives them as another.
With several engines on the machine, --engine says which: any part of what `list` shows that fits only one. A reset here
leaves what is being written alone; after new weights use the engine's own reset.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

NAME = "control"
HELP = "look at a running engine's tiers, or empty them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("list", "status", "reset", "announce"))
    parser.add_argument("tier", nargs="?", help="of a reset: host, disk, or all")
    parser.add_argument("--block", action="append", default=[], metavar="BLOCK", help="of a reset: only this block")
    parser.add_argument("--engine", default="", metavar="TEXT", help="which engine, if there are several")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(args: argparse.Namespace) -> int:
    from kvbm.control.socket import OrderError, addresses, ask

    if args.what == "list":
        return _list(args.json)
    if args.what == "reset" and not args.tier:
        print("kvbm control reset: say which tier, host or disk, or all", file=sys.stderr)
        return 2
    fitting = [address for address in addresses() if args.engine in address]
    if len(fitting) != 1:
        print(f"kvbm control: {_which(args.engine, fitting)}", file=sys.stderr)
        return 1
    order: dict[str, Any] = {"do": args.what}
    if args.what == "reset" and args.tier != "all":
        order["tier"] = args.tier
    if args.block:
        order["blocks"] = args.block
    try:
        answer = ask(fitting[0], order)
    except (OSError, OrderError) as error:
        print(f"kvbm control: {printable(str(error))}", file=sys.stderr)
        return 1
    try:
        print(json.dumps(answer) if args.json else "\n".join(map(printable, _said(args.what, answer))))
    except (LookupError, TypeError, ValueError, AttributeError):
        print("kvbm control: the answer cannot be read; is this engine's KVBM of another release?", file=sys.stderr)
        return 1
    return 0


def printable(text: str) -> str:
    """The text with unprintable characters replaced, cut to 2,000 characters."""
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in text[:2000])


def _which(wanted: str, fitting: list[str]) -> str:
    if fitting:
        listed = "".join(f"\n  {address}" for address in fitting)
        fit = f"fit --engine {wanted!r}" if wanted else "run here"
        return f"{len(fitting)} engines {fit}; say which with --engine:{listed}"
    if wanted:
        return f"no engine fits --engine {wanted!r}; `kvbm control list` shows them"
    return "no engine of yours with KVBM runs on this machine, or KVBM_CONTROL is off"


def _said(what: str, answer: dict[str, Any]) -> list[str]:
    if what == "announce":
        return ["told again with the engine's next steps" if answer["announced"] else "the engine publishes no events"]
    if what == "reset":
        gone = answer["reset_blocks"]
        if isinstance(gone, int):
            return [f"{gone} blocks forgotten"]
        missing = answer["not_found_blocks"]
        return [f"{len(gone)} blocks forgotten" + (f", {len(missing)} were not there" if missing else "")]
    lines = [f"{answer['model']}, engine {answer['engine']}, rank {answer['rank']}, KVBM {answer['kvbm']}"]
    lines.append(f"{'tier':<8}{'in use':>10}{'evictable':>12}{'empty':>10}")
    for tier, pool in answer["pools"].items():
        lines.append(f"{tier:<8}{pool['active_blocks']:>10}{pool['inactive_blocks']:>12}{pool['empty_blocks']:>10}")
    return lines


def _list(as_json: bool) -> int:
    from kvbm import config as settings
    from kvbm.control import discovery
    from kvbm.control.socket import look

    found = look()
    local = [address for address, user in found if user == os.geteuid()]
    foreign = [(address, user) for address, user in found if user != os.geteuid()]
    config = settings.load()
    cards = []
    if config.runtime_enabled:
        try:
            cards = discovery.find(config)
        except OSError as error:
            print(f"kvbm control: Dynamo's registry cannot be read: {printable(str(error))}", file=sys.stderr)
    if as_json:
        others = [{"address": address, "user": user} for address, user in foreign]
        print(json.dumps({"here": local, "foreign": others, "registered": [_fields(card) for card in cards]}))
        return 0
    print("on this machine:" if local else "no engine of yours with KVBM on this machine")
    for address in local:
        print(f"  {address}")
    if foreign:
        print("not yours, and given no orders; the names are those that their owners chose:")
        for address, user in foreign:
            print(f"  {address} ({'owner not known, takes no connection' if user is None else f'user {user}'})")
    if config.runtime_enabled:
        print(f"registered in namespace {config.dynamo_namespace}:" if cards else "none registered")
        for card in cards:
            rank = f" rank {card.rank}" if card.role == "worker" else f" {card.model} {card.metrics}".rstrip()
            print(printable(f"  {card.role} {card.engine} on {card.host}, process {card.pid}{rank}"))
    return 0


def _fields(card: Any) -> dict[str, Any]:
    import msgspec

    return dict(msgspec.structs.asdict(card))
