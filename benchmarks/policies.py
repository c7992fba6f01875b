"""Eviction policies, hints, admission filters and quotas on traces, through the simulator.

    python benchmarks/policies.py [--trace FILE ...] [--json FILE] [--html FILE] [--png FILE] [--only PART ...]

Parts: ``policies`` (prefix hits a block of every policy and of the offline optimum), ``hints`` (sessions, their ends
and priorities: true and false), ``filters`` (bytes written to disk and the hits that they bring, for traces, agents
and chat), ``quotas`` (a quiet tenant beside a loud one). A trace is a file in Mooncake's format; its last
blocks count as full, as in figures of others. Generated workloads come without a file. Host memory has 3,000, 10,000
and 30,000 slots for a trace; for a generated workload, which is smaller, a fiftieth, a tenth and a third of its blocks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvbm.core.policy import POLICIES
from kvbm.observe import charts
from kvbm.observe.format import columns
from kvbm.simulate import hints
from kvbm.simulate.report import OPTIMUM
from kvbm.simulate.results import Outcome
from kvbm.simulate.sweep import Case, Source, Sweep, machine_of
from kvbm.tiers import disk, host

HOST, DISK = host.TIER.name, disk.TIER.name
SLOTS = [3_000, 10_000, 30_000]
PARTS_OF_BLOCKS = (50, 10, 3)
GENERATED = ("agents", "batch", "chat", "mixed", "rag", "scan")
OTHERS = ("batch", "mixed", "rag", "scan")  # have few sessions

# Names of sessions alone change nothing, and priorities say what ends say (docs/policies.md).
HINTS = [kind for kind in hints.KINDS if kind not in ("given", "sessions", "priorities")]

Figures = dict[str, object]


def policy(name: str) -> dict[str, str]:
    return {tier.policy_setting: name for tier in (host.TIER, disk.TIER)}


def sources(options: argparse.Namespace) -> dict[str, Source]:
    found = {path.stem: Source((path,), whole_blocks=True) for path in options.trace}
    return found | {name: Source(synthetic=name) for name in options.generated}


def few_sources(options: argparse.Namespace) -> dict[str, Source]:
    """For filters, which do little without sessions."""
    return {name: source for name, source in sources(options).items() if source.synthetic not in OTHERS}


def slots_for(source: Source) -> list[int]:
    if not source.synthetic:
        return SLOTS
    unique = len({key for request in source.open().requests for key in request.keys})
    return [unique // part for part in PARTS_OF_BLOCKS]


def run(source: Source, cases: list[Case], optima: list[int], jobs: int) -> tuple[list[Outcome], list[float]]:
    with Sweep(source, machine_of(source.open()), jobs) as sweep:
        return sweep.run(cases, optima)


def policies(options: argparse.Namespace) -> Figures:
    """Every policy at every size."""
    figures: Figures = {}
    for name, source in sources(options).items():
        sizes = slots_for(source)
        cases = [Case(known, policy(known), {HOST: slots}) for known in POLICIES for slots in sizes]
        outcomes, optima = run(source, cases, sizes, options.jobs)
        rates = {known: [one.prefix_hit_rate for one in outcomes if one.variant == known] for known in POLICIES}
        figures[name] = {"slots": sizes, **rates, OPTIMUM: optima}
        show(name, ["policy", *map(str, sizes)], {**rates, OPTIMUM: optima})
    return figures


def told(options: argparse.Namespace) -> Figures:
    """The session policy with hints of every kind, beside LRU."""
    figures: Figures = {}
    for name, source in sources(options).items():
        sizes = slots_for(source)
        rows: dict[str, list[float]] = {}
        for kind in HINTS:
            variants = ["lru", "session"] if kind == "none" else ["session"]
            cases = [Case(known, policy(known), {HOST: slots}) for known in variants for slots in sizes]
            outcomes, _ = run(source._replace(hints=kind), cases, [], options.jobs)
            for known in variants:
                rows[f"{known}, hints {kind}"] = [one.prefix_hit_rate for one in outcomes if one.variant == known]
        figures[name] = {"slots": sizes, **rows}
        show(name, ["hints", *map(str, sizes)], rows)
    return figures


FILTERS = {
    "every block": {"DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "1"},
    "frequency (guide)": {"KVBM_DISK_FILTER": "frequency"},
    "session": {"KVBM_DISK_FILTER": "session"},
}


def filters(options: argparse.Namespace) -> Figures:
    """Bytes written to disk, and blocks found there for each block written."""
    figures: Figures = {}
    for name, source in few_sources(options).items():
        small, *larger = slots_for(source)
        sizes = [{HOST: small, DISK: count} for count in larger]
        cases = [Case(word, given, each) for word, given in FILTERS.items() for each in sizes]
        outcomes, _ = run(source, cases, [], options.jobs)
        rows = {}
        for one in outcomes:
            size = next(iter(one.bytes.values())) // next(iter(one.slots.values()))
            written = one.tiers[DISK].written_bytes // size
            read = one.tiers[DISK].read_bytes // size
            rows[f"{one.variant}, {one.slots[DISK]} on disk"] = [
                one.prefix_hit_rate, one.tiers[DISK].prefix_hit_rate, written, read / written if written else 0.0,
                one.tiers[DISK].written_bytes / 1e9,
            ]  # fmt: skip
        figures[name] = rows
        show(name, ["filter", "prefix hits", "on disk", "blocks written", "read a block written", "GB written"], rows)
    return figures


def quotas(options: argparse.Namespace) -> Figures:
    """The prefix hit rate of a quiet tenant: alone, beside a loud one, and with a share of its own."""
    shares = {"KVBM_TENANT_SHARES": "quiet=0.5"}
    sizes = slots_for(Source(synthetic="quiet"))
    rows: dict[str, list[float]] = {}
    for word, name, given in (
        ("alone, half of the slots", "quiet", {}),
        ("alone", "quiet", {}),
        ("beside a loud tenant", "tenants", {}),
        ("beside it, with a share of a half", "tenants", shares),
    ):
        part = 2 if "half of" in word else 1
        cases = [Case(known, {**policy(known), **given}, {HOST: slots // part}) for known in ("lru", "session")
                 for slots in sizes]  # fmt: skip
        outcomes, _ = run(Source(synthetic=name), cases, [], options.jobs)
        for known in ("lru", "session"):
            rows[f"{known}, {word}"] = [one.tenants["quiet"] for one in outcomes if one.variant == known]
    show("two tenants", ["quiet tenant", *map(str, sizes)], rows)
    return {"tenants": {"slots": sizes, **rows}}


def show(name: str, header: list[str], rows: dict[str, list[float]]) -> None:
    def cell(value: float) -> str:
        return f"{value:,.0f}" if value > 100 else f"{value:.4f}"

    table = [header, *([label, *map(cell, values)] for label, values in rows.items())]
    print(f"\n{name}\n" + "\n".join(columns(table, right=range(1, len(header)))), flush=True)


def page(figures: Figures) -> str:
    """Plots of the policies, and of hits over bytes written."""
    parts = ["<h1>Eviction policies and admission filters</h1>"]
    for name, rates in figures.get("policies", {}).items():  # type: ignore[attr-defined]
        sizes = rates["slots"]
        x = charts.x_axis(sizes[0] * 0.9, sizes[-1] * 1.1, logarithmic=True)
        series = {
            word: [(slots, rate, f"{slots:,}: {rate:.3f}") for slots, rate in zip(sizes, found, strict=True)]
            for word, found in rates.items()
            if word != "slots"
        }
        y = charts.y_axis(0, max(rate for line in series.values() for _, rate, _ in line) * 1.1)
        drawing = charts.lines(series, x, y, dashed=OPTIMUM)
        parts.append(charts.legend(list(series)))
        parts.append(charts.figure(f"{name}: prefix hit rate", drawing, "slots (logarithmic)", "of all blocks"))
    for name, rows in figures.get("filters", {}).items():  # type: ignore[attr-defined]
        series = {}
        for label, (hits, _, _, _, gigabytes) in rows.items():
            word = label.rpartition(",")[0]
            series.setdefault(word, []).append((gigabytes, hits, f"{label}: {gigabytes:,.0f} GB, {hits:.3f}"))
        wide = max(x for line in series.values() for x, *_ in line)
        high = max(rate for line in series.values() for _, rate, _ in line)
        drawing = charts.lines(series, charts.x_axis(0, wide * 1.05 or 1), charts.y_axis(0, high * 1.1 or 1))
        parts += [charts.legend(list(series)), charts.figure(
            f"{name}: prefix hit rate over bytes written to disk", drawing, "GB written", "of all blocks"
        )]  # fmt: skip
    for part in ("hints", "quotas"):
        for name, rows in figures.get(part, {}).items():  # type: ignore[attr-defined]
            cells = [[label, *(f"{v:.4f}" for v in values)] for label, values in rows.items() if label != "slots"]
            parts += [f"<h2>{part}: {name}</h2>", charts.table([part, *map(str, rows["slots"])], cells)]
    return charts.page("policies", parts)


def picture(figures: Figures, name: str, file: Path) -> None:
    """Hit rate over capacity, and hits over bytes written, of one trace or workload. Needs matplotlib."""
    import matplotlib.pyplot as plt

    plot, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    rates = dict(figures["policies"][name])  # type: ignore[index]
    sizes = rates.pop("slots")
    for word, found in rates.items():
        left.plot(sizes, found, "k--" if word == OPTIMUM else "o-", label=word)
    left.set(xscale="log", xlabel="slots", ylabel="prefix hits of all blocks", title=name, ylim=0)
    left.set_xticks(sizes, [f"{size:,}" for size in sizes])
    left.minorticks_off()
    written: dict[str, list[tuple[float, float]]] = {}
    for label, (hits, _, _, _, gigabytes) in figures["filters"][name].items():  # type: ignore[index]
        written.setdefault(label.rpartition(",")[0], []).append((gigabytes / 1e3, hits))
    for word, points in written.items():
        right.plot(*zip(*points, strict=True), "o-", label=word)
    right.set(
        xlabel="TB written to disk", ylabel="prefix hits of all blocks", title="admission to disk", xlim=0, ylim=0
    )
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    plot.savefig(file, dpi=110)


PARTS = {"policies": policies, "hints": told, "filters": filters, "quotas": quotas}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", nargs="+", type=Path, default=[], help="files in Mooncake's format")
    parser.add_argument("--generated", nargs="*", choices=GENERATED, default=list(GENERATED), help="workloads (all)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--jobs", type=int, default=0, help="processes; one for each core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write plots there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="and those of the first trace or workload there")
    options = parser.parse_args(arguments)
    # Parts and workloads that are not run keep their figures.
    figures: Figures = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for part in options.only:
        print(f"\n== {part}")
        figures[part] = {**figures.get(part, {}), **PARTS[part](options)}  # type: ignore[dict-item]
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if options.html:
        options.html.write_text(page(figures))
    if options.png:
        picture(figures, next(iter(sources(options))), options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
