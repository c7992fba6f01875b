"""Find faults of a set-up or of a running engine, each with a cure.

This command checks the settings as an engine started from this shell reads them, the engine's version, the GPU, host
memory, the bandwidth between them, the directory of the disk tier, ports and sizes. If an engine with
DYN_KVBM_METRICS=1 runs here, or --url names one, it reports whether KVBM helps that engine and, if not, why.

The exit code is 1 if there is a fault, 0 if there are only notes.

examples:
  kvbm doctor                              this machine, these settings, the engine on the metrics port
  kvbm doctor --quick                      skip the measurements
  kvbm doctor --gpu-cache-gb 40            compare the tiers with the engine's own cache
  kvbm doctor --kv-transfer-config '{...}' check the JSON that vLLM is started with
"""

import argparse
import json
import os
import sys
import textwrap

from kvbm.cli.arguments import positive
from kvbm.config import ConfigError, load
from kvbm.observe.format import printable
from kvbm.observe.remote import normal_url
from kvbm.observe.snapshot import Finding

NAME = "doctor"
HELP = "find faults of a set-up or of a running engine, and their cures"

_MAX_TEXT = 5000
_SIGNS = {"good": ("ok  ", "\x1b[32m"), "note": ("note", "\x1b[33m"), "bad": ("BAD ", "\x1b[31m")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="metrics port of a running engine: port, host:port or URL")
    parser.add_argument("--quick", action="store_true", help="skip the measurements")
    parser.add_argument(
        "--gpu-cache-gb", type=positive, metavar="GB", help="size of the engine's own cache, from its log"
    )
    parser.add_argument("--kv-transfer-config", metavar="JSON", help="the JSON that vLLM is started with")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from kvbm.doctor import CHECKS, Examination, examine

    case = Examination(
        url=normal_url(args.url or _port()),
        asked=args.url is not None,
        quick=args.quick,
        transfer=args.kv_transfer_config,
        device_gb=args.gpu_cache_gb,
    )
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    found: list[tuple[str, Finding]] = []
    for name, finding in examine(case, CHECKS):
        found.append((name, finding))
        if not args.json:
            print(show(name, finding, color), flush=True)
    wrong = sum(finding.level == "bad" for _, finding in found)
    if args.json:
        rows = [
            {"check": check, "name": finding.name, "level": finding.level, "text": finding.text, "cure": finding.cure}
            for check, finding in found
        ]
        print(json.dumps({"ok": not wrong, "findings": rows}, indent=2))
    else:
        print(f"\n{wrong} thing{'' if wrong == 1 else 's'} wrong." if wrong else "\nNothing is wrong.")
    return 1 if wrong else 0


def show(check: str, finding: Finding, color: bool) -> str:
    sign, tone = _SIGNS[finding.level]
    if color:
        sign = f"{tone}{sign}\x1b[0m"
    text, cure = (printable(" ".join(each.split()), _MAX_TEXT) for each in (finding.text, finding.cure))
    wrap = textwrap.TextWrapper(96, break_long_words=False, break_on_hyphens=False)  # paths and options stay whole
    lines = wrap.wrap(text)
    wrap.initial_indent, wrap.subsequent_indent = "→ ", "  "
    lines += wrap.wrap(cure)
    return f"{sign} {check:10} " + ("\n" + " " * 16).join(lines)


def _port() -> str:
    """The metrics port of the settings; the default if they are invalid, which a check reports."""
    try:
        return str(load().metrics_port)
    except ConfigError:
        return "6880"
