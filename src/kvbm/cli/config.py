"""Show the settings in force and where each of them comes from.

The environment and the TOML files are read exactly as an engine started from this shell would read them.
What is wrong with them is said on standard error, and the exit code is then 2.

examples:
  kvbm config                                 as it is now
  kvbm config --extra '{"cpu_cache_gb": 20}'  as it would be with this kv_connector_extra_config
  kvbm config --toml > kvbm.toml              a file to start from; then KVBM_CONFIG_PATH=kvbm.toml
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvbm.config import (
    GROUPS,
    SETTINGS,
    SYSTEM_FILE,
    Config,
    ConfigError,
    Setting,
    Switch,
    load,
)

NAME = "config"
HELP = "show the settings in force and where each of them comes from"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="also the settings that are known but not used yet")
    parser.add_argument("--extra", metavar="JSON", help="kv_connector_extra_config to put on top")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, always with all settings")
    form.add_argument("--toml", action="store_true", help="print a commented TOML file with the defaults")
    form.add_argument("--docs", action="store_true", help="print docs/configuration.md")


def run(args: argparse.Namespace) -> int:
    if args.toml:
        print(toml(everything=args.all), end="")
        return 0
    if args.docs:
        print(docs(), end="")
        return 0
    config = load(_parse_extra(args.extra))
    print(as_json(config) if args.json else table(config, everything=args.all))
    for warning in config.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if config.unused:
        print(f"known, not used yet: {', '.join(config.unused)}", file=sys.stderr)
    return 0


def _parse_extra(text: str | None) -> Mapping[str, object]:
    if text is None:
        return {}
    try:
        extra = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra {text!r}: not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError(f'--extra {text!r}: expected a JSON object, for example {{"cpu_cache_gb": 20}}')
    return extra


def _by_group(settings: Iterable[Setting]) -> dict[str, list[Setting]]:
    rows = list(settings)
    groups = {group: [row for row in rows if row.group == group] for group in GROUPS}
    return {group: members for group, members in groups.items() if members}


def table(config: Config, everything: bool = False) -> str:
    """Aligned columns for a terminal: variable, value, source."""
    lines: list[tuple[str, str, str] | str] = []
    for group, rows in _by_group(s for s in SETTINGS if not s.retired and (s.used or everything)).items():
        lines += ["", group]
        for row in rows:
            source = config.sources[row.key] + ("" if row.used else "  (not used yet)")
            lines.append((f"  {row.env}", row.show(getattr(config, row.key)), source))
    cells = [line for line in lines if not isinstance(line, str)]
    widths = [max(len(cell[column]) for cell in cells) for column in (0, 1)]
    texts = [
        line if isinstance(line, str) else f"{line[0]:{widths[0]}}  {line[1]:{widths[1]}}  {line[2]}" for line in lines
    ]
    return "\n".join(texts[1:])


def as_json(config: Config) -> str:
    def plain(row: Setting) -> object:
        value = getattr(config, row.key)
        return row.show(value) if row.secret or isinstance(value, Path) else value

    rows = [row for row in SETTINGS if not row.retired]
    settings = {
        row.key: {"env": row.env, "value": plain(row), "source": config.sources[row.key], "used": row.used}
        for row in rows
    }
    return json.dumps({"settings": settings, "warnings": config.warnings, "unused": config.unused}, indent=2)


def toml(everything: bool = False) -> str:
    """A file in which every setting is commented out at its default, so that loading it changes nothing."""
    lines = [
        "# Settings of KVBM. Take away the # in front of those to change.",
        f"# Read from {SYSTEM_FILE}, or from where KVBM_CONFIG_PATH points; the environment wins over it.",
    ]
    # A file does not name another, hence no config_path.
    rows = (s for s in SETTINGS if not s.retired and s.key != "config_path" and (s.used or everything))
    for group, members in _by_group(rows).items():
        lines += ["", f"# ---- {group} ----"]
        for row in members:
            lines += ["", f"# {row.doc}" + ("" if row.used else " Not used yet."), f"# Accepts {_accepts(row)}."]
            if row.default is None:
                lines += ["# Not set by default; for example:", f"# {row.key} = {row.kind.example}"]
            else:
                lines.append(f"# {row.key} = {_toml_value(row.default)}")
    return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    return json.dumps(str(value) if isinstance(value, Path) else value)  # JSON's scalars and {} are TOML's as well


# ---------------------------------------------------------------------------------------------------------------------
# docs/configuration.md

_INTRODUCTION = f"""\
# Configuration

<!-- Made by `kvbm config --docs` from the table in src/kvbm/config.py. Change that, then make this again. -->

KVBM needs one setting: the size of a cache tier.

```bash
DYN_KVBM_CPU_CACHE_GB=20 vllm serve Qwen/Qwen3-0.6B \\
  --kv-transfer-config '{{"kv_connector": "DynamoConnector",
    "kv_connector_module_path": "kvbm.vllm_integration.connector", "kv_role": "kv_both"}}'
```

`kvbm config` shows the settings in force and where each of them comes from.

## Three ways to set things

| Where | Name of a setting | Good for |
|---|---|---|
| environment variables | `DYN_KVBM_CPU_CACHE_GB` | containers, launch scripts |
| a TOML file | `cpu_cache_gb` | a fleet of hosts, a setup under version control |
| the engine's `kv_connector_extra_config` | `cpu_cache_gb` | one engine among several on a host |

In a file and in `kv_connector_extra_config` the name of the variable is understood too.

When a setting is given in several places, the highest of these counts:

1. `kv_connector_extra_config`
2. the environment
3. the file at `KVBM_CONFIG_PATH`
4. `{SYSTEM_FILE}`, if there is one
5. the default

**A file.** `kvbm config --toml` prints one with every setting commented out at its default.

```toml
cpu_cache_gb = 20
onboard = "async"
staging_mb = 512
```

**`kv_connector_extra_config`**, for vLLM. Keys of others in it are left alone.

```bash
vllm serve Qwen/Qwen3-0.6B --kv-transfer-config '{{
  "kv_connector": "DynamoConnector",
  "kv_connector_module_path": "kvbm.vllm_integration.connector",
  "kv_role": "kv_both",
  "kv_connector_extra_config": {{"cpu_cache_gb": 20, "onboard": "async"}}
}}'
```

## How values are read

- A wrong value stops the engine at start, with a message that names the setting, its value, where it was set and what
  is accepted: `KVBM_STAGING_MB='many' (environment): expected a whole number of MiB from 0 to 65536, for example 512`.
  A value that a higher place replaces is not looked at.
- A switch is on with `1`, `true`, `on` or `yes`, and off with `0`, `false`, `off`, `no` or nothing, in whatever case.
- Numbers have no unit and no sign. Sizes are in GB of 1e9 bytes and need not be whole: `0.5` is half a GB.
- A variable that is empty counts as not set, unless it is a switch. `null` in JSON counts as not set.
- A name that looks like one of ours but is not gets a warning with the closest name.
- The size of a tier is for all ranks of an engine together: `int(GB * 1e9 / bytes of a block on all ranks)` blocks.
- A host tier smaller than the engine's own cache on the GPU seldom helps, because it forgets first.
"""

_NOT_USED_YET = """
## Known, not used yet

These are understood and checked, so that an existing configuration needs no change, but nothing acts on them yet. One
line at start names those that are set.
"""

_RETIRED = """
## Without effect

These are accepted, with a warning.

| Variable | What to know |
|---|---|
"""


def docs() -> str:
    """The text of docs/configuration.md."""
    used = [row for row in SETTINGS if row.used]
    unused = [row for row in SETTINGS if not row.used and not row.retired]
    parts = [_INTRODUCTION]
    parts += [f"\n## {group}\n\n{_markdown(rows)}" for group, rows in _by_group(used).items()]
    parts.append(_NOT_USED_YET)
    parts += [f"\n### {group}\n\n{_markdown(rows)}" for group, rows in _by_group(unused).items()]
    parts.append(_RETIRED)
    parts += [f"| `{row.env}` | {_sentence(row.retired)} |\n" for row in SETTINGS if row.retired]
    return "".join(parts)


def _markdown(rows: Iterable[Setting]) -> str:
    lines = ["| Variable | Key | Default | Meaning | Accepts |", "|---|---|---|---|---|"]
    for row in rows:
        old = "".join(f" Old name: `{name}`." for name in row.old_names)
        lines.append(f"| `{row.env}` | `{row.key}` | {row.show(row.default)} | {row.doc}{old} | {_accepts(row)} |")
    return "\n".join(lines) + "\n"


def _accepts(row: Setting) -> str:
    # The words for a switch are said once, under "How values are read".
    return "a switch" if isinstance(row.kind, Switch) else row.kind.accepts()


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
