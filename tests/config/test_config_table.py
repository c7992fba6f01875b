"""The table of settings: each is declared once, and each is read or says why it is not."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from kvbm import config
from kvbm.config import SETTINGS, Config

LIVE = [row for row in SETTINGS if not row.retired]
ABOUT = ("sources", "warnings", "misspelt", "unused_because")  # fields of Config that describe the settings


def test_every_field_is_a_setting_and_a_group_is_in_one_piece():
    assert sorted([*(row.key for row in LIVE), *ABOUT]) == sorted(Config.__struct_fields__)
    groups = [row.group for row in LIVE]
    assert list(dict.fromkeys(groups)) == list(config.GROUPS)
    assert groups == sorted(groups, key=config.GROUPS.index)


NEW_SETTING = """
    brand_new: Annotated[int, Setting(
        "KVBM_BRAND_NEW", DISK, Number(unit="things", low=1, example="4"), "Number of new things.",
    )] = 7
"""
SHOW_NEW_SETTING = """
from kvbm.cli.config import docs, table, toml
from kvbm.config import ConfigError, load

for extra, environ in ({}, {}), ({}, {"KVBM_BRAND_NEW": "5"}), ({"brand_new": 6}, {"KVBM_BRAND_NEW": "5"}):
    got = load(extra, environ, ())
    print(got.brand_new, got.sources["brand_new"])
print(load({"brand_mew": 1}, {}, ()).warnings[0])
try:
    load({}, {"KVBM_BRAND_NEW": "0"}, ())
except ConfigError as error:
    print(error)
print(repr(got))
for text in (table(got), toml(), docs()):
    print(*(line for line in text.splitlines() if "brand_new" in line.lower()), sep="\\n")
"""


def test_one_field_is_all_that_a_new_setting_needs(tmp_path):
    """In a copy of the package: the loader, `kvbm config` and the docs know a setting that `Config` alone declares."""
    shutil.copytree(Path(config.__file__).parents[1], tmp_path / "kvbm", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "kvbm" / "config" / "table.py"
    before, marker, after = path.read_text().partition("\n    # ---- Leader and workers ----\n")
    assert marker
    path.write_text(before + NEW_SETTING + marker + after)
    command = [sys.executable, "-c", SHOW_NEW_SETTING]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    *lines, in_table, in_toml, in_docs = done.stdout.splitlines()
    assert lines == [
        "7 default",
        "5 environment",
        "6 kv_connector_extra_config",
        "brand_mew (kv_connector_extra_config) is not a setting and is ignored; did you mean brand_new?",
        "KVBM_BRAND_NEW='0' (environment): expected a whole number of things >= 1, for example 4",
        "Config(brand_new=6)",
    ]
    assert in_table.split() == ["KVBM_BRAND_NEW", "6", "kv_connector_extra_config"]
    assert in_toml == "# brand_new = 7"
    assert in_docs == "| `KVBM_BRAND_NEW` | `brand_new` | 7 | Number of new things. | a whole number of things >= 1 |"


# The loader itself reads the path of the settings file.
READ_BY_THE_LOADER = {"config_path"}


def fields_read() -> set[str]:
    """Names that src/kvbm reads outside config/ as attributes of `config`, `self._config` and the like."""
    package = Path(config.__file__).parents[1]
    read = set()
    for path in package.rglob("*.py"):
        if path.parent != package / "config":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    owner = node.value
                    name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
                    if name.lstrip("_") == "config":
                        read.add(node.attr)
    return read


def test_every_setting_is_either_read_or_declared_as_unused():
    read = fields_read()
    unused = {row.key for row in LIVE if row.unused}
    assert {row.key for row in LIVE if row.key not in read} == unused | READ_BY_THE_LOADER
    assert not unused & READ_BY_THE_LOADER


@pytest.mark.parametrize("row", [row for row in LIVE if row.unused], ids=lambda row: row.key)
def test_an_unused_setting_says_what_to_do_instead(row):
    assert re.search(r"\b(Use|Name|Remove) .*\.$", row.unused)


@pytest.mark.parametrize("row", [row for row in LIVE if isinstance(row.kind, config.Choice)], ids=lambda row: row.key)
def test_the_type_of_a_choice_lists_the_words_that_are_accepted(row):
    assert get_args(get_type_hints(Config)[row.key]) == row.kind.words
