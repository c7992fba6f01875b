"""Show the settings in force and the source of each.

This command reads the environment and the TOML files as an engine started from this shell does.
If a setting is invalid, it prints the error on standard error and exits with code 2.

examples:
  kvbm config                                 the settings in force
  kvbm config --changed                       only those that are not at their defaults
  kvbm config --extra '{"cpu_cache_gb": 20}'  the settings with this kv_connector_extra_config
  kvbm config --toml > kvbm.toml              a file to edit; then set KVBM_CONFIG_PATH=kvbm.toml
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from kvbm.config import (
    DEFAULT,
    GROUPS,
    SETTINGS,
    SYSTEM_FILE,
    Config,
    ConfigError,
    Number,
    Setting,
    Switch,
    load,
)
from kvbm.config.setting import hide_credentials
from kvbm.observe.format import columns

NAME = "config"
HELP = "show the settings in force and the source of each"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="include the settings that KVBM accepts but does not use")
    parser.add_argument("--changed", action="store_true", help="only settings that a source sets")
    parser.add_argument("--extra", metavar="JSON", help="kv_connector_extra_config, which overrides all other sources")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print all settings as JSON")
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
    print(as_json(config, args.changed) if args.json else table(config, args.all, args.changed))
    for warning in config.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for reason in dict.fromkeys(config.unused_because.values()):
        names = [name for name, because in config.unused_because.items() if because == reason]
        print(f"accepted, not used: {', '.join(names)}: {reason}", file=sys.stderr)
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


def _is_changed(config: Config, row: Setting) -> bool:
    return config.sources[row.key] != DEFAULT


def table(config: Config, everything: bool = False, changed: bool = False) -> str:
    """Return aligned columns for a terminal: variable, value, source."""
    shown = [s for s in SETTINGS if not s.retired and (s.used or everything or changed)]
    groups = _by_group(s for s in shown if not changed or _is_changed(config, s))
    if not groups:
        return "every setting is at its default"
    rows = [
        (
            f"  {row.env}",
            row.show(getattr(config, row.key)),
            config.sources[row.key] + ("" if row.used else "  (not used)"),
        )
        for members in groups.values()
        for row in members
    ]
    lines = iter(columns(rows))
    return "\n\n".join("\n".join([group, *islice(lines, len(members))]) for group, members in groups.items())


def as_json(config: Config, changed: bool = False) -> str:
    def plain(row: Setting) -> object:
        value = getattr(config, row.key)
        if isinstance(value, str) and not row.secret:
            return hide_credentials(value)
        return row.show(value) if row.secret or isinstance(value, Path) else value

    rows = [row for row in SETTINGS if not row.retired and (not changed or _is_changed(config, row))]
    settings = {
        row.key: {"env": row.env, "value": plain(row), "source": config.sources[row.key], "used": row.used}
        for row in rows
    }
    return json.dumps({"settings": settings, "warnings": config.warnings, "unused": config.unused}, indent=2)


def toml(everything: bool = False) -> str:
    """Return a TOML file in which every setting is commented out at its default, so loading it changes nothing."""
    lines = [
        "# Settings of KVBM. To change a setting, remove the # in front of it.",
        f"# KVBM reads {SYSTEM_FILE} and the file at KVBM_CONFIG_PATH; the environment overrides both.",
    ]
    # config_path is left out: a settings file cannot name another file.
    rows = (s for s in SETTINGS if not s.retired and s.key != "config_path" and (s.used or everything))
    for group, members in _by_group(rows).items():
        lines += ["", f"# ---- {group} ----"]
        for row in members:
            unused = f" Not used: {row.unused}" if row.unused else ""
            lines += ["", f"# {row.doc}{unused}", f"# Accepts {_accepts(row)}."]
            if row.default is None:
                example = row.kind.example if isinstance(row.kind, Number) else json.dumps(row.kind.example)
                lines += ["# Not set by default; for example:", f"# {row.key} = {example}"]
            else:
                default = str(row.default) if isinstance(row.default, Path) else row.default
                lines.append(f"# {row.key} = {json.dumps(default)}")  # JSON scalars and {} are valid TOML
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# docs/configuration.md

_INTRODUCTION = f"""\
# Configuration

<!-- Made by `make docs` from the table in src/kvbm/config/table.py. Edit the table or src/kvbm/cli/config.py. -->

KVBM needs one setting: the size of a cache tier. `kvbm serve Qwen/Qwen3-0.6B --cpu-gb 20` sets it, and runs:

```bash
DYN_KVBM_CPU_CACHE_GB=20 vllm serve Qwen/Qwen3-0.6B \\
  --kv-transfer-config '{{"kv_connector": "DynamoConnector",
    "kv_connector_module_path": "kvbm.vllm_integration.connector", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute"}}'
```

`kvbm config` shows the settings in force and the source of each.

## Sources of settings

| Source | Name of a setting | Suitable for |
|---|---|---|
| environment variables | `DYN_KVBM_CPU_CACHE_GB` | containers, launch scripts |
| a TOML file | `cpu_cache_gb` | many hosts, a configuration under version control |
| the engine's `kv_connector_extra_config` | `cpu_cache_gb` | one of several engines on a host |

A TOML file and `kv_connector_extra_config` also accept the name of the environment variable.

If several sources set the same setting, KVBM uses the first of these:

1. `kv_connector_extra_config`
2. the environment
3. the TOML file at `KVBM_CONFIG_PATH`
4. the TOML file `{SYSTEM_FILE}`, if it exists
5. the default

**TOML file.** `kvbm config --toml` prints a file with every setting commented out at its default.

```toml
cpu_cache_gb = 20
onboard = "async"
staging_mb = 512
```

**`kv_connector_extra_config`**, with vLLM. KVBM ignores keys that belong to other connectors.

```bash
vllm serve Qwen/Qwen3-0.6B --kv-transfer-config '{{
  "kv_connector": "DynamoConnector",
  "kv_connector_module_path": "kvbm.vllm_integration.connector",
  "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {{"cpu_cache_gb": 20, "onboard": "async"}}
}}'
```

## How KVBM reads values

- An invalid value stops the engine at start. The error names the setting, its value, its source and the accepted
  values: `KVBM_STAGING_MB='many' (environment): expected a whole number of MiB from 0 to 65536, for example 512`.
  KVBM does not check a value that a higher source overrides.
- A switch is on with `1`, `true`, `on` or `yes`. It is off with `0`, `false`, `off`, `no` or an empty value. Case does
  not matter.
- Numbers have no unit and no sign. Sizes are in GB (1 GB = 1e9 bytes) and can be fractions: `0.5` is half a GB.
- An empty environment variable counts as not set, unless the setting is a switch. `null` in JSON counts as not set.
- KVBM ignores an unknown name that resembles a setting, and logs a warning with the closest name. `kvbm doctor` calls
  it a fault, and `kvbm serve` does not start with it.
- The size of a tier is the sum over all ranks of an engine: `int(GB * 1e9 / bytes of a block on all ranks)` blocks.
- A host tier that is smaller than the engine's KV cache on the GPU rarely helps, because it evicts blocks before the
  GPU does.
"""

_NOT_USED = """
## Accepted, not used

KVBM accepts and checks these settings, so that existing configurations keep working, but does not use them. At start,
it logs the names of those that are set.
"""

_RETIRED = """
## Without effect

KVBM accepts these variables and logs a warning.

| Variable | Reason |
|---|---|
"""


def docs() -> str:
    """Return the text of docs/configuration.md."""
    used = [row for row in SETTINGS if row.used]
    unused = [row for row in SETTINGS if row.unused]
    parts = [_INTRODUCTION]
    parts += [f"\n## {group}\n\n{_markdown(rows)}" for group, rows in _by_group(used).items()]
    parts.append(_NOT_USED)
    for group, rows in _by_group(unused).items():
        parts.append(f"\n### {group}\n")
        for reason in dict.fromkeys(row.unused for row in rows):
            parts.append(f"\n{reason}\n\n{_markdown(row for row in rows if row.unused == reason)}")
    parts.append(_RETIRED)
    parts += [f"| `{row.env}` | {row.retired[0].upper()}{row.retired[1:]}. |\n" for row in SETTINGS if row.retired]
    return "".join(parts)


def _markdown(rows: Iterable[Setting]) -> str:
    lines = ["| Variable | Key | Default | Meaning | Accepts |", "|---|---|---|---|---|"]
    for row in rows:
        old = "".join(f" Old name: `{name}`." for name in row.old_names)
        cells = (f"`{row.env}`", f"`{row.key}`", row.show(row.default), row.doc + old, _accepts(row))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _accepts(row: Setting) -> str:
    # "How KVBM reads values" lists the words of a switch once.
    return "a switch" if isinstance(row.kind, Switch) else row.kind.accepts()
