"""Watch a running KVBM in the terminal: tiers, blocks moving between them, hit rates, time saved, the latest requests.

The engine must have been started with DYN_KVBM_METRICS=1; a web page at the same address shows the same.
The key q, or Ctrl-C, quits. This command needs the package rich: pip install rich.

examples:
  kvbm top                       the engine on this machine
  kvbm top 6881                  another port
  kvbm top gpu-host:6880         another machine; its engine needs KVBM_METRICS_HOST
  kvbm top --once                print once and exit
"""

from __future__ import annotations

import argparse
import sys

from kvbm.cli.arguments import positive
from kvbm.config import load
from kvbm.observe.remote import NotReachableError, normal_url

NAME = "top"
HELP = "watch a running KVBM in the terminal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", help="port, host:port or URL (DYN_KVBM_METRICS_PORT on this machine)")
    parser.add_argument("--every", type=_interval, default=1.0, metavar="SECONDS", help="time between updates (1)")
    parser.add_argument("--once", action="store_true", help="print once and exit")


def _interval(text: str) -> float:
    seconds = positive(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds from 0.1 to 3600")
    return seconds


def run(args: argparse.Namespace) -> int:
    try:
        from kvbm.cli import screen
    except ImportError:
        print("kvbm top: the package rich is not installed; pip install rich", file=sys.stderr)
        return 1
    url = normal_url(args.url or str(load().metrics_port))
    is_terminal = sys.stdout.isatty()
    console = screen.open_console(is_terminal)
    try:
        if args.once or not is_terminal:
            screen.show_once(url, console)
        else:
            screen.watch(url, args.every, console)
    except NotReachableError as error:
        print(f"kvbm top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0
