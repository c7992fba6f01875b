"""Show the tiers of a running engine, empty them, or announce their blocks to routers again.

  kvbm control list                          engines on this machine with model, process and metrics port, and
                                             those of Dynamo's deployment if it is configured
  kvbm control status                        blocks in use, evictable and empty, by tier
  kvbm control reset host                    drop every block of a tier
  kvbm control reset host --block 17 ...     drop these blocks, named as in events or by their hash
  kvbm control reset all                     drop every block of every tier; with --block these, in all tiers
  kvbm control announce                      send the event of every block to subscribers again

The command controls engines of your own user only. This holds for root too; `runuser -u USER -- kvbm control ...` runs
it as another user. With several engines on the machine, --engine selects one: any part of a name in `list` that fits
only that one. A reset leaves blocks alone that are being written; after new weights use the engine's own reset.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from kvbm.observe.format import printable
from kvbm.observe.terminal import print_table

NAME = "control"
HELP = "show the tiers of a running engine, or empty them"

_ACTIONS = ("list", "status", "reset", "announce")
_MAX_TEXT = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=_ACTIONS, metavar="ACTION", help=f"one of {', '.join(_ACTIONS)}")
    parser.add_argument("tier", nargs="?", help="for reset: host, disk, or all")
    parser.add_argument("--block", action="append", default=[], metavar="BLOCK", help="for reset: only this block")
    parser.add_argument("--engine", default="", metavar="TEXT", help="select one of several engines")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from kvbm.control.socket import CommandError, addresses, ask

    for name, value, owners in (("a tier", args.tier, ("reset",)), ("--block", args.block, ("reset",)),
                                ("--engine", args.engine, ("status", "reset", "announce"))):  # fmt: skip
        if value and args.what not in owners:
            shown = " ".join(value) if isinstance(value, list) else value
            return _fail(f"{args.what} takes no {name.removeprefix('a ')}, got {shown!r}", 2)
    if args.what == "list":
        return _list(args.json)
    if args.what == "reset" and not args.tier:
        return _fail("reset needs a tier: host, disk, or all", 2)
    fitting = [address for address in addresses() if args.engine in address]
    if len(fitting) != 1:
        return _fail(_which(args.engine, fitting))
    command: dict[str, Any] = {"do": args.what}
    if args.what == "reset" and args.tier != "all":
        command["tier"] = args.tier
    if args.block:
        command["blocks"] = args.block
    try:
        answer = ask(fitting[0], command)
    except (OSError, CommandError) as error:
        return _fail(printable(error, _MAX_TEXT))
    try:
        if args.json:
            print(json.dumps(answer))
        else:
            _print(args.what, answer)
    except (LookupError, TypeError, ValueError, AttributeError):
        return _fail("cannot read the engine's answer; its KVBM may be of another release")
    return 0


def _fail(problem: str, code: int = 1) -> int:
    print(f"kvbm control: {problem}", file=sys.stderr)
    return code


def _which(wanted: str, fitting: list[str]) -> str:
    if fitting:
        listed = "".join(f"\n  {address}" for address in fitting)
        fit = f"fit --engine {wanted!r}" if wanted else "run here"
        return f"{len(fitting)} engines {fit}; select one with --engine:{listed}"
    if wanted:
        return f"no engine fits --engine {wanted!r}; `kvbm control list` shows them"
    return "no engine of yours with KVBM runs on this machine, or KVBM_CONTROL is off"


def _print(what: str, answer: dict[str, Any]) -> None:
    if what == "announce":
        told = answer["announced"]
        print("the engine announces its blocks in its next steps" if told else "the engine publishes no events")
    elif what == "reset":
        gone = answer["reset_blocks"]
        missing = [] if isinstance(gone, int) else answer["not_found_blocks"]
        count = gone if isinstance(gone, int) else len(gone)
        print(f"{count} blocks dropped" + (f", {len(missing)} not found" if missing else ""))
    else:
        title = f"{answer['model']}, engine {answer['engine']}, rank {answer['rank']}, KVBM {answer['kvbm']}"
        counts = ("active_blocks", "inactive_blocks", "empty_blocks")
        rows = [(tier, *(pool[name] for name in counts)) for tier, pool in answer["pools"].items()]
        print(printable(title, _MAX_TEXT))
        print_table(("TIER", "IN USE", "EVICTABLE", "EMPTY"), rows, right=(1, 2, 3))


def _described(address: str) -> tuple[str, str, str]:
    """(model, process, port of the metrics) as the engine itself tells; empty where it does not."""
    from kvbm.control.socket import CommandError, ask

    try:
        answer = ask(address, {"do": "status"})
        return printable(answer["model"]), str(answer.get("pid", "")), printable(answer.get("metrics") or "off")
    except (OSError, CommandError, LookupError, TypeError, AttributeError):
        return "no answer", "", ""


def _list(as_json: bool) -> int:
    import msgspec

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
            _fail(f"cannot read Dynamo's registry: {printable(error, _MAX_TEXT)}")
    if as_json:
        others = [{"address": address, "user": user} for address, user in foreign]
        engines = [dict(zip(("address", "model", "pid", "metrics"), (a, *_described(a)), strict=True)) for a in local]
        registered = [msgspec.structs.asdict(card) for card in cards]
        print(json.dumps({"here": local, "engines": engines, "foreign": others, "registered": registered}))
        return 0
    rows = [(address, *_described(address), "you") for address in local]
    # The owner of a socket chooses its name, so a foreign name proves nothing.
    rows += [
        (a, "", "", "", "unknown: accepts no connection" if user is None else f"user {user}: foreign")
        for a, user in foreign
    ]
    if not local:
        print("no engine of yours with KVBM on this machine")
    if rows:
        print_table(("ENGINE", "MODEL", "PID", "METRICS", "OWNER"), rows)
    if config.runtime_enabled:
        print(f"\nregistered in namespace {config.dynamo_namespace}:" if cards else "\nnone registered")
    if cards:
        header = ("ROLE", "ENGINE", "RANK", "HOST", "PROCESS", "MODEL", "METRICS")
        print_table(header, [(c.role, c.engine, c.rank, c.host, c.pid, c.model, c.metrics) for c in cards])
    return 0
