"""The pages name what there is: every finding, every metric, every option."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from kvbm import config as settings
from kvbm.cli.main import build_parser
from kvbm.engines.sglang.__main__ import extra_config
from kvbm.engines.sglang.__main__ import main as sglang_extra_config
from kvbm.observe.metrics import METRICS
from kvbm.tiers.registry import TIERS

PROJECT = Path(__file__).parents[2]
DOCS = PROJECT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), PROJECT / "README.md"]


def findings() -> set[str]:
    """Names of everything but good news, from the source."""
    names: set[str] = set()
    for path in [*(PROJECT / "src/kvbm/doctor").glob("*.py"), PROJECT / "src/kvbm/observe/findings.py"]:
        text = path.read_text()
        names.update(re.findall(r'\b(?:bad|note)\(\s*"([a-z-]+)"', text))
    return names


def tier_findings() -> list[str]:
    """Patterns of the names that contain the name of a tier."""
    text = (PROJECT / "src/kvbm/observe/findings.py").read_text()
    names = re.findall(r'\b(?:bad|note)\(\s*f"([^"]+)"', text)
    assert names
    return [re.sub(r"{[a-z.]+}", f"(?:{'|'.join(TIERS)})", name) for name in names]


def test_every_finding_is_in_troubleshooting():
    text = (DOCS / "troubleshooting.md").read_text()
    names = findings()
    assert len(names) > 30
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_every_finding_in_troubleshooting_exists():
    text = (DOCS / "troubleshooting.md").read_text()
    cells = re.findall(r"^\| (`[a-z-]+`(?:, `[a-z-]+`)*) \|", text, re.M)
    named = {name for cell in cells for name in re.findall(r"`([a-z-]+)`", cell)}
    source = "".join(path.read_text() for path in (PROJECT / "src/kvbm").rglob("*.py"))
    of_tiers = re.compile("|".join(tier_findings()))
    assert sorted(name for name in named if f'"{name}"' not in source and not of_tiers.fullmatch(name)) == []


def test_every_finding_about_a_tier_is_in_troubleshooting():
    text = (DOCS / "troubleshooting.md").read_text()
    assert [pattern for pattern in tier_findings() if not re.search(f"`{pattern}`", text)] == []


def test_every_metric_is_in_observability():
    text = (DOCS / "observability.md").read_text()
    assert [metric.name for metric in METRICS if f"`{metric.name}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target, place in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not place or place in headings(file), f"{target}#{place}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_configuration_survives_a_failed_load(page):
    """vLLM's default for kv_load_failure_policy ends a request with an error."""
    for block in re.findall(r"^```.*?^```", page.read_text(), re.M | re.S):
        assert '"kv_connector_module_path"' not in block or '"kv_load_failure_policy": "recompute"' in block, block


def headings(page: Path) -> set[str]:
    """What links call the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.M)
    }


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Of a command and of its own commands."""
    found = set()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                found |= options(below)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_one(page):
    """`kvbm NAME --option` in the text: the command and its options exist."""
    parsers = build_parser()._subparsers._group_actions[0].choices
    for line in re.findall(r"kvbm ([a-z]+)((?: +[^\n`|]*)?)", page.read_text()):
        name, rest = line
        if name not in parsers:
            continue
        known = options(parsers[name])
        for option in re.findall(r"(?<=\s)--[a-z-]+", rest.split("#")[0]):
            assert option in known, f"kvbm {name} {option}"


# -- what is to be copied from the pages ------------------------------------------------------------------------------


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def every(language: str) -> list:
    return [
        pytest.param(text, id=f"{page.name}-{number}")
        for page in PAGES
        for number, text in enumerate(blocks(page, language))
    ]


@pytest.mark.parametrize("text", every("bash"))
def test_every_command_is_one_for_a_shell(text):
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=30).stderr == ""


@pytest.mark.parametrize("text", every("bash"))
def test_every_setting_in_a_command_is_accepted(text):
    """`export NAME=value` and `NAME=value command`: KVBM knows the name and takes the value."""
    words = shlex.split(text.replace("…", ""), comments=True)
    given = dict(re.findall(r"^((?:DYN_)?KVBM_[A-Z0-9_]+)=(.*)$", "\n".join(words), re.M))
    known = {name: value for name, value in given.items() if name not in OF_SCRIPTS}
    tier = {"DYN_KVBM_CPU_CACHE_GB": "1"}
    assert settings.load(environ={**tier, **known}, files=()).warnings == ()


# Of examples/, deploy/ and the tests.
OF_SCRIPTS = {
    "KVBM_GRAFANA_PASSWORD",
    "KVBM_DEVICE",
    "KVBM_DECODE",
    "KVBM_DRY_RUN",
    "KVBM_MODEL_CACHE",
    "KVBM_TEST_CRASHES",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_in_the_text_exists(page):
    known = {name for row in settings.SETTINGS for name in (row.env, *row.old_names)} | OF_SCRIPTS
    named = set(re.findall(r"\b(?:DYN_)?KVBM_[A-Z0-9_]*[A-Z0-9]\b(?!\*)", page.read_text()))
    assert sorted(named - known) == []


@pytest.mark.parametrize("text", [*every("json"), *every("bash")])
def test_every_json_is_one(text):
    found = re.findall(r"""(?:-d|config) '(\{.*?\})'""", text, re.S) if not text.lstrip().startswith("{") else [text]
    for document in found:
        assert json.loads(document)


@pytest.mark.parametrize("text", every("python"))
def test_every_program_is_one(text):
    compile(text, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_configuration_for_tensorrt_llm_is_the_one_that_is_tested():
    [shell] = [text for text in blocks(DOCS / "tensorrt-llm.md", "bash") if "<<EOF" in text]
    page = yaml.safe_load(re.search(r"<<EOF\n(.*?)^EOF", shell, re.S | re.M)[1])
    example = yaml.safe_load((PROJECT / "examples/trtllm/kvbm_llm_api_config.yaml").read_text())
    assert page == example
    [program] = blocks(DOCS / "tensorrt-llm.md", "python")
    call = ast.parse(program).body[-1].value
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    connector = {keyword.arg: keyword.value.value for keyword in given["kv_connector_config"].keywords}
    assert connector == example["kv_connector_config"]


def test_what_is_shown_for_sglang_is_what_is_printed():
    [shown] = blocks(DOCS / "sglang.md", "json")
    assert json.loads(shown) == json.loads(extra_config())


def test_a_setting_for_sglang_is_looked_at_when_it_is_printed(capsys):
    assert json.loads(extra_config("disk_cache_gb=200"))["disk_cache_gb"] == "200"
    assert sglang_extra_config(["disk_cache_gb=much"]) == 2
    assert "disk_cache_gb='much' (kv_connector_extra_config): expected a number" in capsys.readouterr().err
    assert sglang_extra_config(["disk_cache_gib=2"]) == 0
    assert "did you mean disk_cache_gb?" in capsys.readouterr().err


def test_the_message_that_is_shown_for_a_wrong_value_is_the_one_that_is_given():
    page = " ".join((DOCS / "configuration.md").read_text().split())
    with pytest.raises(settings.ConfigError) as refused:
        settings.load(environ={"KVBM_STAGING_MB": "many"}, files=())
    assert f"`{refused.value}`" in page


def test_calls_of_sglangs_storage_backend_carry_the_admin_key():
    text = (DOCS / "sglang.md").read_text()
    calls = [line for line in text.splitlines() if line.startswith("curl") and "hicache" in line]
    assert calls
    assert all('-H "Authorization: Bearer $KEY"' in call for call in calls)
    assert "--admin-api-key" in text
    assert all(float(ratio) > 1 for ratio in re.findall(r"--hicache-ratio ([\d.]+)", text))
