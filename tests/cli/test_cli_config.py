"""`kvbm config`: what it prints, and how it fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvbm
from kvbm import config
from kvbm.cli.config import docs, toml
from kvbm.cli.main import COMMANDS, main
from kvbm.config import SETTINGS, load

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"
LIVE = [row for row in SETTINGS if not row.retired]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if "KVBM" in name or name.startswith("DYN_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(config.table, "SYSTEM_FILE", tmp_path / "missing.toml")


def columns(text: str) -> dict[str, list[str]]:
    """The lines of the table by variable, the rest of each split at runs of blanks."""
    lines = [line.split() for line in text.splitlines() if line.startswith("  ")]
    return {name: rest for name, *rest in lines}


def test_the_table_has_value_and_source_of_what_is_used(monkeypatch, capsys):
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "0.5")
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    rows = columns(out)
    assert rows["DYN_KVBM_CPU_CACHE_GB"] == ["0.5", "environment"]
    assert rows["KVBM_ONBOARD"] == ["auto", "default"]
    assert set(rows) == {row.env for row in SETTINGS if row.used}
    assert [line for line in out.splitlines() if line and not line.startswith(" ")] == [
        group for group in config.GROUPS if any(row.used and row.group == group for row in SETTINGS)
    ]


def test_the_columns_are_aligned(capsys):
    main(["config", "--all"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len({line.index(" default") for line in lines if line.count("default") == 1}) == 1


def test_all_has_every_setting_and_marks_what_is_not_used(capsys):
    assert main(["config", "--all"]) == 0
    out = capsys.readouterr().out
    assert set(columns(out)) == {row.env for row in LIVE}
    assert out.count("(not used)") == sum(not row.used for row in LIVE)


def test_changed_has_only_what_a_source_sets(monkeypatch, capsys):
    assert main(["config", "--changed"]) == 0
    assert capsys.readouterr().out == "every setting is at its default\n"
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "0.5")
    monkeypatch.setenv("DYN_CONNECTOR", "kvbm")
    assert main(["config", "--changed"]) == 0
    rows = columns(capsys.readouterr().out)
    assert rows == {
        "DYN_KVBM_CPU_CACHE_GB": ["0.5", "environment"],
        "DYN_CONNECTOR": ["kvbm", "environment", "(not", "used)"],
    }
    assert main(["config", "--changed", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["settings"]) == {"cpu_cache_gb", "dyn_connector"}


def test_warnings_and_unused_go_to_standard_error(monkeypatch, capsys):
    monkeypatch.setenv("DYN_KVBM_CPU_CACH_GB", "1")
    monkeypatch.setenv("DYN_KVBM_DISABLE_WRITE_COMBINED", "1")
    assert main(["config"]) == 0
    printed = capsys.readouterr()
    assert "did you mean DYN_KVBM_CPU_CACHE_GB?" in printed.err
    assert "accepted, not used: DYN_KVBM_DISABLE_WRITE_COMBINED: KVBM never allocates" in printed.err
    assert "did you mean" not in printed.out


def test_a_bad_setting_is_said_on_standard_error_with_exit_code_2(monkeypatch, capsys):
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "abc")
    assert main(["config"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kvbm: DYN_KVBM_CPU_CACHE_GB='abc' (environment): expected a number of gigabytes")
    assert "Traceback" not in printed.err


def test_extra_goes_on_top(monkeypatch, capsys):
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "1")
    assert main(["config", "--extra", '{"cpu_cache_gb": 4, "connectors": []}']) == 0
    assert columns(capsys.readouterr().out)["DYN_KVBM_CPU_CACHE_GB"] == ["4", "kv_connector_extra_config"]


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_extra_that_is_no_json_object_is_refused(text, capsys):
    assert main(["config", "--extra", text]) == 2
    assert f"--extra {text!r}" in capsys.readouterr().err


def test_json_has_every_setting_with_its_source(monkeypatch, capsys):
    monkeypatch.setenv("KVBM_ONBOARD", "sync")
    monkeypatch.setenv("DYN_KVBM_OBJECT_SECRET_KEY", "hunter2")
    monkeypatch.setenv("DYN_CONNECTOR", "kvbm")
    assert main(["config", "--json"]) == 0
    out = capsys.readouterr().out
    printed = json.loads(out)
    assert list(printed["settings"]) == [row.key for row in LIVE]
    assert printed["settings"]["onboard"] == {
        "env": "KVBM_ONBOARD",
        "value": "sync",
        "source": "environment",
        "used": True,
    }
    assert printed["settings"]["disk_cache_dir"]["value"] == "/tmp"
    assert printed["settings"]["trtllm_zmq_port"]["value"] is None
    assert printed["unused"] == ["DYN_CONNECTOR"]
    assert "hunter2" not in out


@pytest.mark.parametrize("options", [[], ["--all"]])
def test_the_toml_template_changes_nothing(options, capsys, tmp_path):
    assert main(["config", "--toml", *options]) == 0
    path = tmp_path / "kvbm.toml"
    path.write_text(capsys.readouterr().out)
    loaded = load(environ={}, files=[path])
    assert set(loaded.sources.values()) == {"default"}
    assert loaded.warnings == ()


def test_the_toml_template_is_valid_when_uncommented(tmp_path):
    assignments = [line[2:] for line in toml(everything=True).splitlines() if " = " in line and "Accepts" not in line]
    path = tmp_path / "kvbm.toml"
    path.write_text("\n".join(assignments))
    loaded = load(environ={}, files=[path])
    assert loaded.warnings == ()
    assert {line.split(" = ")[0] for line in assignments} == {row.key for row in LIVE} - {"config_path"}
    for row in LIVE:
        if row.default is not None:
            assert getattr(loaded, row.key) == row.default


def test_the_manual_is_current():
    assert DOCS.read_text() == docs(), "run: kvbm config --docs > docs/configuration.md"


def test_the_manual_has_every_name(capsys):
    assert main(["config", "--docs"]) == 0
    out = capsys.readouterr().out
    for row in SETTINGS:
        assert all(f"`{name}`" in out for name in (row.env, *row.old_names))


def test_the_manual_prints_whatever_the_settings_are(monkeypatch, capsys):
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "abc")
    assert main(["config", "--docs"]) == 0
    assert main(["config", "--toml"]) == 0


def test_version(capsys):
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"kvbm {kvbm.__version__}\n"


def test_no_command_shows_the_help(capsys):
    assert main([]) == 2
    assert "config" in capsys.readouterr().err


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as exited:
        main(["frobnicate"])
    assert exited.value.code == 2


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.NAME)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exited:
        main([command.NAME, "--help"])
    assert exited.value.code == 0
    assert command.__doc__.splitlines()[0] in capsys.readouterr().out


def test_a_reader_that_leaves_early_is_no_error_message():
    code = "import sys; from kvbm.cli.main import main; sys.exit(main(['config', '--docs']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert err == b""


def test_the_package_has_no_other_attributes():
    with pytest.raises(AttributeError, match="nothing"):
        _ = kvbm.nothing
