"""Make a page of results: tables in Markdown and a plot of each benchmark, dated by when they were taken.

    python benchmarks/gpu/report.py results/*.json

Reads what copies.py, ttft.py, disk.py, qps.py, agents.py, interference.py and throughput.py have written. Writes
``DATE.md`` and, where matplotlib is installed, ``DATE-BENCHMARK.png``. Results of several runs of one benchmark are
shown one after the other, none is left out and none is averaged away. What somebody has to say of a run goes into its
file, as a list of paragraphs called ``notes``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import agents
import disk
import interference
import qps
import throughput
import ttft
from records import Row, median

RESULTS = Path(__file__).resolve().parent / "results"


class ReportError(ValueError):
    """A file is no result of these scripts; the text says which and why."""


def read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} cannot be read: {error}") from error
    keys = ("benchmark", "taken", "machine", "settings", "rows")
    missing = [key for key in keys if not isinstance(record, dict) or key not in record]
    if missing:
        raise ReportError(f"{path} is no result of these benchmarks: it lacks {', '.join(missing)}")
    if record["benchmark"] not in TABLES:
        raise ReportError(f"{path}: {record['benchmark']!r} is none of {', '.join(TABLES)}")
    return record


def table(header: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """A table in Markdown. Numbers get one decimal, None a dash."""
    header = list(header)
    out = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    out += [f"| {' | '.join(_cell(value) for value in line)} |" for line in lines]
    return "\n".join(out)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.1f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


# -- tables -----------------------------------------------------------------------------------------------------------


def copies_table(record: dict[str, Any]) -> str:
    plain = next((row for row in record["rows"] if row["way"] == "plain"), {})
    lines: list[list[object]] = [
        ["one plain pinned copy", None, direction, plain.get(f"{name}_gbps"), None, None]
        for direction, name in (("to device", "to_device"), ("to host", "to_host"), ("both", "both"))
    ]
    trips = []
    little: list[list[object]] = []
    for row in record["rows"]:
        place = f"{row.get('layout')}, {row.get('piece_kib')} KiB"
        if "gbps" in row:
            rates, issue = row["gbps"], median(row["issue_ms"])
            spread = f"{min(rates):.1f} to {max(rates):.1f}"
            lines.append([row["way"], place, row["direction"], median(rates), spread, f"{issue:.2f}"])
        elif "beside_ms" in row:
            times = [f"{median(row[name]):.2f}" for name in ("alone_ms", "beside_ms")]
            little.append([row["way"], place, row["direction"], *times, f"{max(row['beside_ms']):.2f}"])
        elif "equal" in row:
            outcome = "every byte came back" if row["equal"] else "**NOT every byte came back**"
            trips.append(f"{row['blocks']} blocks ({place}) out and in again: {outcome}.")
    header = ("way", "pieces", "direction", "GB/s", "all repeats", "ms to issue")
    parts = [table(header, lines)]
    if little:
        parts.append("Little copies, as an engine makes them, beside a long one: milliseconds until the last is there.")
        parts.append(table(("beside", "pieces", "direction", "alone", "beside it", "worst"), little))
    return "\n\n".join([*parts, *trips])


def ttft_table(record: dict[str, Any]) -> str:
    columns = {
        "tokens": "length", "mode": "mode", "engine": "kind", "cold": "cold_ms", "on the GPU": "on_gpu_ms",
        "returned": "returned_ms", "worst": "worst_returned_ms", "floor": "floor_ms", "all at once": "batch_ms",
        "hits %": "hit_percent", "reference tokens": "same_tokens", "start, s": "start_s",
    }  # fmt: skip
    groups: dict[str, list[str]] = {}
    for row in record["rows"]:
        if row["what"] == "returned":
            groups.setdefault(f"{row['length']} {row['mode']} {row['kind']}", []).append(f"{row['ms']:.1f}")
    singles = [f"- {name}: {', '.join(times)}" for name, times in groups.items()]
    return "\n\n".join(
        [_summary(columns, ttft.summarise(record["rows"])), "Medians, ms. Every returned prompt:", "\n".join(singles)]
    )


def disk_table(record: dict[str, Any]) -> str:
    columns = {
        "engine": "kind", "pass": "pass", "ms": "ms", "best": "best_ms", "worst": "worst_ms", "of cold": "of_cold",
        "blocks from disk": "from_disk", "given up": "given_up", "GB/s expected": "disk_gbps", "right answers": "same",
        "of": "compared",
    }  # fmt: skip
    lines = [{**line, "of_cold": f"{line['ratio']:.3f}"} for line in disk.summarise(record["rows"])]
    cells = [[line[name] for name in columns.values()] for line in lines]
    what = (
        f"Milliseconds to the first token of prompts of {record['settings']['length']} tokens that only the disk has "
        f'kept, medians; "of cold" is beside the engine without KVBM, and for `auto` at most {disk.LIMIT}.'
    )
    failures = [f"Failed: {row['why'].splitlines()[0]}" for row in record["rows"] if row["what"] == "failed"]
    return "\n\n".join([table(columns, cells), what, *failures])


def qps_table(record: dict[str, Any]) -> str:
    lines = sorted(qps.summarise(record["rows"]), key=lambda line: line["qps"])
    cells = [[f"{line['qps']:g}", line["kind"], *qps.cells(line, qps.COLUMNS, missing="–")] for line in lines]
    names = ("users", "shared", "history", "answer", "rounds", "cache_tokens", "gb", "seconds", "mode")
    settings = ", ".join(f"{name.replace('_', ' ')} {record['settings'][name]}" for name in names)
    failures = [
        f"Failed: {row['kind']}: {row['why'].splitlines()[0]}" for row in record["rows"] if row["what"] == "failed"
    ]
    left_out = [
        f"Left out: {row['kind']} at {row['qps']:g} requests/s: {row['why']}."
        for row in record["rows"]
        if row["what"] == "left out"
    ]
    header = ("requests/s", "engine", *qps.COLUMNS)
    what = f"Seconds to the first token of `kvbm bench`'s multi-round workload: {settings}."
    return "\n\n".join([table(header, cells), what, *failures, *left_out])


def agents_table(record: dict[str, Any]) -> str:
    lines = agents.summarise(record["rows"])
    cells = [[line["kind"], *qps.cells(line, agents.COLUMNS, missing="–")] for line in lines]
    names = ("agents", "first", "last", "tool", "answer", "think", "cache_tokens", "gb", "seconds", "mode")
    settings = ", ".join(f"{name.replace('_', ' ')} {record['settings'][name]}" for name in names)
    failures = [
        f"Failed: {row['kind']}: {row['why'].splitlines()[0]}" for row in record["rows"] if row["what"] == "failed"
    ]
    what = f"Seconds to the first token of turns that come back, and between tokens: {settings}."
    return "\n\n".join([table(("engine", *agents.COLUMNS), cells), what, *failures])


def interference_table(record: dict[str, Any]) -> str:
    columns = {
        "mode": "mode", "engine": "kind", "p50 without": "without_p50_ms", "p50 with": "with_p50_ms",
        "p99 without": "without_p99_ms", "p99 on the GPU": "on_gpu_p99_ms", "p99 with": "with_p99_ms",
        "worst with": "with_max_ms",
        "p99 raised by %": "p99_raised_percent", "over a stretch, by %": "stretch_raised_percent",
        "on the GPU, by %": "on_gpu_stretch_raised_percent", "TTFT of the prompt": "ttft_ms",
        "its cached tokens": "cached", "its first token the same": "same",
        "rounds": "rounds",
    }  # fmt: skip
    settings = record["settings"]
    what = (
        f"Milliseconds between tokens of {settings['others']} requests that decode, with and without a prompt of "
        f"{settings['length']} tokens that returns beside them; on the GPU: with a prompt whose blocks vLLM still has."
    )
    return "\n\n".join([_summary(columns, interference.summarise(record["rows"])), what])


def throughput_table(record: dict[str, Any]) -> str:
    lines = []
    for line in throughput.summarise(record["rows"]):
        changes = ", ".join(f"{change:+.2f}" for change in line["changes_percent"])
        change = None if line["change_percent"] is None else f"{line['change_percent']:+.2f}"
        lines.append([line["kind"], f"{line['s']:.3f}", round(line["tokens_per_s"]), change, changes, line["cached"]])
    header = ("engine", "s", "tokens/s", "change %", "of each repeat", "cached tokens")
    requests, inputs, outputs = (record["settings"][name] for name in ("requests", "inputs", "outputs"))
    what = f"{requests} requests of {inputs} tokens, {outputs} to decode, nothing to reuse."
    failures = [f"Failed: {row['why'].splitlines()[0]}" for row in record["rows"] if row["what"] == "failed"]
    return "\n\n".join([table(header, lines), what, *failures])


def _summary(columns: dict[str, str], lines: list[Row]) -> str:
    """A table of summary lines, and below it why some have no numbers."""
    failures = [
        f"Failed: {line['kind']} {line['mode']} {line.get('length', '')}: {line['failed'].splitlines()[0]}"
        for line in lines
        if line["failed"]
    ]
    return "\n\n".join([table(columns, [[line[name] for name in columns.values()] for line in lines]), *failures])


# -- plots ------------------------------------------------------------------------------------------------------------


def copies_plot(axes: Any, record: dict[str, Any]) -> None:
    rows = [row for row in record["rows"] if "gbps" in row and row["direction"] != "both"]
    labels = [f"{row['way']}, {row['direction']} ({row['layout']}, {row['piece_kib']} KiB)" for row in rows]
    axes.barh(labels, [median(row["gbps"]) for row in rows])
    plain = next((row for row in record["rows"] if row["way"] == "plain"), None)
    if plain:
        axes.axvline(plain["to_device_gbps"], color="black", linestyle="--", label="one plain copy, to device")
        axes.legend()
    axes.invert_yaxis()
    axes.set_xlabel("GB/s")


def ttft_plot(axes: Any, record: dict[str, Any]) -> None:
    labels, times, floors = [], [], []
    for line in ttft.summarise(record["rows"]):
        key = (line["length"], line["mode"], line["kind"])
        values = [
            row["ms"]
            for row in record["rows"]
            if row["what"] == "returned" and (row["length"], row["mode"], row["kind"]) == key
        ]
        if values:
            labels.append(f"{line['kind']}\n{line['length']}\n{line['mode']}")
            times.append(values)
            floors.append(line["floor_ms"])
    for at, values in enumerate(times):
        axes.plot([at] * len(values), values, "o", color="tab:blue", alpha=0.5)
        axes.plot([at - 0.3, at + 0.3], [median(values)] * 2, color="tab:blue")
        if floors[at] is not None:
            axes.plot([at - 0.3, at + 0.3], [floors[at]] * 2, color="black", linestyle="--")
    axes.set_xticks(range(len(labels)), labels)
    _log_scale(axes)
    axes.set_ylabel("ms to the first token of a returned prompt; dashed: the floor")


def _log_scale(axes: Any) -> None:
    """With plain numbers beside it, a few to a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def disk_plot(axes: Any, record: dict[str, Any]) -> None:
    groups: dict[str, list[float]] = {}
    for row in record["rows"]:
        if "ms" in row:
            groups.setdefault(f"{row['kind']}\n{row['what']}", []).append(row["ms"])
    for at, values in enumerate(groups.values()):
        axes.plot([at] * len(values), values, "o", color="tab:blue", alpha=0.5)
        axes.plot([at - 0.3, at + 0.3], [median(values)] * 2, color="tab:blue")
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ms to the first token")


def qps_plot(axes: Any, record: dict[str, Any]) -> None:
    lines = qps.summarise(record["rows"])
    for kind in dict.fromkeys(line["kind"] for line in lines):
        mine = [line for line in lines if line["kind"] == kind and line["ttft_mean"] is not None]
        axes.plot([line["qps"] for line in mine], [line["ttft_mean"] for line in mine], "o-", label=kind)
    _log_scale(axes)
    axes.set_xlabel("requests a second")
    axes.set_ylabel("mean seconds to the first token")
    if lines:
        axes.legend()


def agents_plot(axes: Any, record: dict[str, Any]) -> None:
    for line in agents.summarise(record["rows"]):
        times = sorted(line["ttfts"])
        axes.plot(times, [100 * (i + 1) / len(times) for i in range(len(times))], label=line["kind"])
    axes.set_xscale("log")
    axes.set_xlabel("seconds to the first token")
    axes.set_ylabel("percent of turns within")
    axes.legend()


def interference_plot(axes: Any, record: dict[str, Any]) -> None:
    labels, values = [], []
    for line in interference.summarise(record["rows"]):
        rounds = [
            row
            for row in record["rows"]
            if row["what"] == "onboarding" and row["kind"] == line["kind"] and row["mode"] == line["mode"]
        ]
        for when in ("without", "with"):
            gaps = [gap for row in rounds for gap in row[f"{when}_ms"]]
            if gaps:
                labels.append(f"{line['kind']} {line['mode']}\n{when}")
                values.append(gaps)
    if values:
        axes.boxplot(values, whis=(1, 99))
        axes.set_xticks(range(1, len(labels) + 1), labels)
    axes.set_ylabel("ms between tokens; whiskers: 1st and 99th percentile")


def throughput_plot(axes: Any, record: dict[str, Any]) -> None:
    for kind in dict.fromkeys(row["kind"] for row in record["rows"] if row["what"] == "run"):
        rows = [row for row in record["rows"] if row["what"] == "run" and row["kind"] == kind and row["round"]]
        rates = [(row["made"] + row["computed"]) / row["s"] for row in rows]
        axes.plot([row["round"] for row in rows], rates, "o-", label=kind)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("round")
    axes.set_ylabel("tokens a second")
    axes.legend()


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "ttft": ttft_table,
    "disk": disk_table,
    "qps": qps_table,
    "agents": agents_table,
    "interference": interference_table,
    "throughput": throughput_table,
    "copies": copies_table,
}
PLOTS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "ttft": ttft_plot,
    "disk": disk_plot,
    "qps": qps_plot,
    "agents": agents_plot,
    "interference": interference_plot,
    "throughput": throughput_plot,
    "copies": copies_plot,
}
TITLES = {
    "ttft": "Time to first token of prompts that return",
    "disk": "Time to first token of prompts that only the disk has kept",
    "qps": "Time to first token over the rate of requests",
    "agents": "Agents whose contexts grow",
    "interference": "Time between tokens while a long prompt returns",
    "throughput": "Throughput with nothing to reuse",
    "copies": "Copies between host memory and GPU",
}


# -- the page ---------------------------------------------------------------------------------------------------------


def page(records: list[tuple[Path, dict[str, Any]]], plots: dict[Path, str], folder: Path) -> str:
    parts = [f"# Results of {_date(records)}"]
    machines: list[dict[str, Any]] = []
    for _, record in records:
        if record["machine"] not in machines:
            machines.append(record["machine"])
    for machine in machines:
        parts.append(", ".join(f"{name} {value}" for name, value in machine.items() if value is not None))
    for name in TABLES:
        for path, record in records:
            if record["benchmark"] != name:
                continue
            link = path.name if path.resolve().parent == folder.resolve() else str(path)
            dry = " **A dry run on a CPU: the times mean nothing.**" if record["settings"].get("dry") else ""
            parts.append(f"## {TITLES[name]}")
            command = " ".join(record.get("command", [name]))
            parts.append(f"`{command}`, {record['taken']}, all rows in [{path.name}]({link}).{dry}")
            parts.append(TABLES[name](record))
            parts += record.get("notes", [])
            if path in plots:
                parts.append(f"![{TITLES[name]}]({plots[path]})")
    return "\n\n".join(parts) + "\n"


def _date(records: list[tuple[Path, dict[str, Any]]]) -> str:
    return max(record["taken"] for _, record in records)[:10]


def draw(records: list[tuple[Path, dict[str, Any]]], folder: Path) -> dict[Path, str]:
    """A picture a record: path of the record -> name of its picture. Empty without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("No plots: matplotlib is not installed.", file=sys.stderr)
        return {}
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names: dict[Path, str] = {}
    drawn: Counter[str] = Counter()
    for path, record in records:
        drawn[record["benchmark"]] += 1
        number = drawn[record["benchmark"]]
        name = f"{_date(records)}-{record['benchmark']}" + (f"-{number}" if number > 1 else "")
        figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
        PLOTS[record["benchmark"]](axes, record)
        axes.set_title(TITLES[record["benchmark"]])
        figure.savefig(folder / f"{name}.png", dpi=120)
        pyplot.close(figure)
        names[path] = f"{name}.png"
    return names


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="JSON files of the benchmarks")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="DIR", help="where to write (benchmarks/gpu/results)"
    )
    options = parser.parse_args(argv)
    try:
        records = [(path, read(path)) for path in options.results]
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    plots = draw(records, options.out)
    target = options.out / f"{_date(records)}.md"
    target.write_text(page(records, plots, options.out))
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
