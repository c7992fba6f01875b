"""Find out what is wrong, and what to do about it.

Looks at the settings as an engine started from this shell would read them, at the engine's version, the GPU, host
memory, the way between them, the disk tier's place, ports and sizes. If an engine with DYN_KVBM_METRICS=1 runs here, or
is named with --url, says whether KVBM helps it and, if not, why.

The exit code is 1 when something is wrong, 0 when there are only notes.

examples:
  kvbm doctor                              this machine, these settings, the engine on the metrics port
  kvbm doctor --quick                      measure nothing
  kvbm doctor --gpu-cache-gb 40            compare the tiers with the engine's own cache
  kvbm doctor --kv-transfer-config '{...}' look at what is handed to vLLM
"""

import argparse
import json
import os
import sys
import textwrap

from kvbm.config import ConfigError, load
from kvbm.observe.remote import normal_url
from kvbm.observe.snapshot import Finding

NAME = "doctor"
HELP = "find out what is wrong and what to do about it"

_SIGNS = {"good": ("ok  ", "\x1b[32m"), "note": ("note", "\x1b[33m"), "bad": ("BAD ", "\x1b[31m")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="metrics port of a running engine: port, host:port or URL")
    parser.add_argument("--quick", action="store_true", help="measure nothing, only read")
    parser.add_argument("--gpu-cache-gb", type=float, metavar="GB", help="size of the engine's own cache, from its log")
    parser.add_argument("--kv-transfer-config", metavar="JSON", help="what vLLM is started with")
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
    lines = textwrap.wrap(finding.text, 96) or [""]
    lines += [f"→ {line}" if i == 0 else f"  {line}" for i, line in enumerate(textwrap.wrap(finding.cure, 94))]
    return f"{sign} {check:10} " + ("\n" + " " * 16).join(lines)


def _port() -> str:
    """Of the settings if they can be read; that they cannot is said by a check."""
    try:
        return str(load().metrics_port)
    except ConfigError:
        return "6880"
