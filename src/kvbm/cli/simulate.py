"""Replay a trace through KVBM's own bookkeeping at many sizes of the tiers, and advise on sizes and policies.

The trace is a file of JSON lines in Mooncake's format, a record of a running engine (DYN_KVBM_ENABLE_RECORD), or a
directory of such files. No engine and no GPU is needed. The results are a table, simulate.json and simulate.html with
plots of the hit rate over the size, beside the offline optimum.

Sizes of several tiers are combined, each with each. Without any size the command tries ten sizes of the host tier, up
to all blocks of the trace. Settings are those of the record, or those of this shell, and --set changes them.

examples:
  kvbm simulate conversation.jsonl                    ten sizes of host memory
  kvbm simulate kvbm-records --host-gb 16 32 64 --disk-gb 0 200 400
  kvbm simulate trace.jsonl --bytes-per-token 327680 --prefill-tokens-per-second 4000
                                                      a larger model: 70B, on eight GPUs
  kvbm simulate trace.jsonl --policy lru arc          two eviction policies side by side
  kvbm simulate trace.jsonl --host-gb 64 --disk-gb 400 \\
      --variant filter: --variant all:DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER=1
                                                      with the admission filter of the disk, and without it
  kvbm simulate synthetic:agents                      a generated workload
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.cli.arguments import integer, number
from kvbm.config import SETTINGS
from kvbm.tiers.registry import NEAR, TIERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvbm.simulate.results import Outcome
    from kvbm.simulate.sweep import Case, Source, Sweep
    from kvbm.simulate.trace import Trace

NAME = "simulate"
HELP = "replay a trace at many cache sizes; advises on sizes and policies"

_SYNTHETIC = "synthetic:"
_SIZED = [tier for tier in TIERS.values() if not tier.keyed]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", nargs="+", metavar="TRACE", help="files or directories, or synthetic:NAME")
    sizes = parser.add_argument_group("sizes")
    for tier in _SIZED:
        sizes.add_argument(f"--{tier.name}-gb", nargs="+", type=number, metavar="GB", help=f"of the {tier.name} tier")
        sizes.add_argument(f"--{tier.name}-blocks", nargs="+", type=integer, metavar="N", help="the same, in blocks")
    sizes.add_argument("--gpu-blocks", type=integer, default=0, metavar="N",
                       help="of the engine's own cache; a record tells what it had (0)")  # fmt: skip
    machine = parser.add_argument_group("model and machine")
    machine.add_argument(
        "--bytes-per-token", type=integer, metavar="N", help="of KV, all ranks (the record's, or 131072)"
    )
    machine.add_argument("--prefill-tokens-per-second", type=number, metavar="N", help="of the engine (10000)")
    for tier in _SIZED:
        rate = tier.prior.bytes_per_second / 1e9
        machine.add_argument(f"--{tier.name}-gbps", type=number, metavar="GB/S", help=f"read rate ({rate:g})")
    trace = parser.add_argument_group("trace")
    trace.add_argument(
        "--block-tokens", type=integer, default=0, metavar="N", help="tokens of a hash id (the record's, or 512)"
    )
    trace.add_argument("--max-requests", type=integer, metavar="N", help="only the first N")
    trace.add_argument("--whole-blocks", action="store_true",
                       help="count the last block of a prompt as full, as simulators of other caches do")  # fmt: skip
    trace.add_argument("--hints", default="given", metavar="KIND",
                       help="of callers: given, none, sessions, ends, priorities, true or false (given)")  # fmt: skip
    settings = parser.add_argument_group("settings")
    settings.add_argument("--policy", nargs="+", default=[], metavar="NAME", help="eviction policies to compare")
    settings.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE", help="a setting of KVBM")
    settings.add_argument("--variant", action="append", default=[], metavar="NAME:SETTING=VALUE,...",
                          help="settings to compare, under a name; may be repeated")  # fmt: skip
    parser.add_argument("--jobs", type=integer, default=0, metavar="N", help="processes (one for each core)")
    parser.add_argument("--no-optimum", action="store_true", help="skip the offline optimum")
    parser.add_argument(
        "--out", type=Path, default=Path("simulate-results"), metavar="DIR", help="for the results (simulate-results)"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON, and write no files")


def run(args: argparse.Namespace) -> int:
    from kvbm.simulate.trace import TraceError

    try:
        return _simulate(args)
    except BrokenPipeError:
        raise  # the entry point ends quietly
    except (TraceError, OSError, ValueError) as error:
        print(f"kvbm simulate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nkvbm simulate: stopped", file=sys.stderr)
        return 1


def _simulate(args: argparse.Namespace) -> int:
    from datetime import datetime, timezone

    import kvbm
    from kvbm.core.rate import Rate
    from kvbm.simulate import advice, report
    from kvbm.simulate.report import Bound, Result
    from kvbm.simulate.sweep import Case, Sweep, default_sizes, machine_of, possible, settings_of

    _check(args)
    source = _source(args)
    trace = source.open()
    rates = {}
    for tier in _SIZED:
        if given := getattr(args, f"{tier.name}_gbps"):
            rates[tier.name] = Rate(given * 1e9, tier.prior.fixed_seconds)
    machine = machine_of(
        trace, args.bytes_per_token or 0, args.prefill_tokens_per_second or 0.0, args.gpu_blocks, rates
    )
    variants = _variants(args)
    for settings in variants.values():
        settings_of(trace, settings, ())  # rejects an invalid one before the first replay
    sizes = _sizes(args, machine.block_bytes) or [{NEAR.name: slots} for slots in default_sizes(trace)]
    cases = [Case(name, settings, slots) for name, settings in variants.items() for slots in sizes]
    totals = sorted({sum(slots.values()) for slots in sizes})
    with Sweep(source, machine, args.jobs) as sweep:
        bounds = [] if args.no_optimum else totals
        outcomes, optima = _run(sweep, cases, bounds, len(trace.requests), "replay")
        more = _doubles(outcomes, cases)
        outcomes += _run(sweep, more, [], len(trace.requests), "replay of twice the size")[0] if more else []
    most = possible(trace)
    result = Result(
        kvbm=kvbm.__version__,
        taken=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=["kvbm", *sys.argv[1:]],
        trace={
            "name": trace.name, "requests": len(trace.requests), "blocks": trace.blocks, "seconds": trace.seconds,
            "block_tokens": trace.block_tokens,
        },
        machine={
            "block_bytes": machine.block_bytes, "prefill_tokens_per_second": machine.prefill_tokens_per_second,
            "gpu_blocks": machine.device_blocks,
            **{
                f"{tier.name}_gbps": machine.rates.get(tier.name, tier.prior).bytes_per_second / 1e9 for tier in _SIZED
            },
        },
        possible_prefix_hit_rate=most,
        outcomes=outcomes[: len(cases)],
        optimum=[
            Bound(slots, slots * machine.block_bytes, rate) for slots, rate in zip(bounds, optima, strict=True)
        ],
        advice=advice.sentences(outcomes, most, trace.seconds),
    )  # fmt: skip
    if trace.is_exact and trace.slots:
        result.replayed_lookups, result.equal_lookups = _compare(trace)
    if args.json:
        print(report.to_json(result).decode())
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "simulate.json").write_bytes(report.to_json(result))
    (args.out / "simulate.html").write_text(report.page(result))
    print(f"{report.text(result)}\n\n{args.out / 'simulate.html'}")
    return 0


def _check(args: argparse.Namespace) -> None:
    from kvbm.simulate.hints import KINDS

    names = [("block_tokens", 0), ("max_requests", 1), ("gpu_blocks", 0), ("jobs", 0), ("bytes_per_token", 1)]
    names += [(f"{tier.name}_{unit}", 0) for tier in _SIZED for unit in ("gb", "blocks", "gbps")]
    for name, least in [*names, ("prefill_tokens_per_second", 1)]:
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not least <= value < float("inf"):
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected a number of at least {least}")
    if args.hints not in KINDS:
        raise ValueError(f"--hints {args.hints}: expected one of {', '.join(KINDS)}")


def _source(args: argparse.Namespace) -> "Source":
    from kvbm.simulate.sweep import Source

    generated = [name for name in args.trace if name.startswith(_SYNTHETIC)]
    if generated and len(args.trace) > 1:
        raise ValueError(f"{generated[0]}: a generated workload cannot be merged with other traces")
    if generated:
        options = ("block_tokens", "max_requests", "whole_blocks")
        if given := [f"--{name.replace('_', '-')}" for name in options if getattr(args, name)]:
            raise ValueError(f"{', '.join(given)}: for traces of files only; {generated[0]} is generated as a whole")
        return Source(synthetic=generated[0].removeprefix(_SYNTHETIC), hints=args.hints)
    paths = tuple(map(Path, args.trace))
    return Source(paths, "", args.block_tokens, args.whole_blocks, args.max_requests, args.hints)


def _sizes(args: argparse.Namespace, block_bytes: int) -> list[dict[str, int]]:
    """All combinations of the sizes that were given; empty when there are none."""
    from itertools import product

    given: dict[str, list[int]] = {}
    for tier in _SIZED:
        gigabytes, blocks = getattr(args, f"{tier.name}_gb"), getattr(args, f"{tier.name}_blocks")
        if gigabytes and blocks:
            raise ValueError(f"--{tier.name}-gb and --{tier.name}-blocks: give one of them")
        slots = blocks or [int(size * 1e9 / block_bytes) for size in gigabytes or ()]
        if slots:
            given[tier.name] = sorted(set(slots))
    if not given:
        return []
    near = given.get(NEAR.name, [])
    if not near or not near[0]:
        raise ValueError(
            f"--{NEAR.name}-gb or --{NEAR.name}-blocks: expected sizes of at least one block "
            f"({block_bytes / 1e9:.6f} GB); all other tiers are reached through the {NEAR.name} tier"
        )
    return [
        {name: slots for name, slots in zip(given, chosen, strict=True) if slots} for chosen in product(*given.values())
    ]


def _variants(args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Settings to compare, by name."""
    common = dict(_setting("--set", text) for text in args.set)
    named: dict[str, dict[str, str]] = {}
    for text in args.variant:
        name, sign, rest = text.partition(":")
        if not name or not sign:
            raise ValueError(f"--variant {text!r}: expected NAME:SETTING=VALUE,SETTING=VALUE; NAME: alone changes none")
        named[name] = dict(_setting("--variant", part) for part in rest.split(",") if part)
    named = named or {"": {}}
    policies = args.policy or [""]
    found = {}
    for policy in policies:
        keys = [tier.policy_setting for tier in _SIZED if tier.policy_setting] if policy else []
        for name, settings in named.items():
            label = " ".join(part for part in (policy, name) if part) or "as configured"
            found[label] = {**common, **settings, **dict.fromkeys(keys, policy)}
    return found


def _setting(option: str, text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise ValueError(f"{option} {text!r}: expected SETTING=VALUE, for example KVBM_LOAD=always")
    if not any(name in (row.key, row.env) for row in SETTINGS):
        raise ValueError(f"{option} {text!r}: {name} is not a setting; `kvbm config --all` lists them")
    return name, value


def _doubles(outcomes: "Sequence[Outcome]", cases: "Sequence[Case]") -> "list[Case]":
    """The replay with twice the advised sizes, unless the sweep has it."""
    from kvbm.simulate import advice
    from kvbm.simulate.sweep import Case

    chosen = advice.choose(outcomes)
    twice = advice.doubled(chosen)
    if advice.find(outcomes, chosen.variant, twice) is not None:
        return []
    settings = next(case.settings for case in cases if case.variant == chosen.variant)
    return [Case(chosen.variant, settings, twice)]


def _compare(trace: "Trace") -> tuple[int, int]:
    """Lookups of a record, and those that find the same in an exact replay."""
    from kvbm.simulate.engine import SimulatedEngine
    from kvbm.simulate.sweep import machine_of, settings_of

    engine = SimulatedEngine(trace, settings_of(trace, {}, trace.slots), trace.slots, machine_of(trace))
    engine.run(exact=True)
    lines = sorted((line for request in trace.requests for line in request.lookups), key=lambda line: line.order)
    return len(lines), sum(found == line.found for found, line in zip(engine.found, lines, strict=True))


def _run(
    sweep: "Sweep", cases: "Sequence[Case]", optima: "Sequence[int]", requests: int, what: str
) -> "tuple[list[Outcome], list[float]]":
    from kvbm.observe.terminal import progress

    total, first = (len(cases) + len(optima)) * requests, None
    with progress(what) as show:

        def watch(done: int) -> None:
            nonlocal first
            first = done if first is None else first
            show(done - first, total, lambda: f"{done - first:,} of {total:,} requests")

        return sweep.run(cases, optima, watch)
