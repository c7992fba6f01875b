"""What is deployed is what Grafana and Docker Compose take."""

from __future__ import annotations

import copy
import json

import jsonschema
import pytest
import yaml

from conftest import PROJECT

DEPLOY = PROJECT / "deploy"
DASHBOARD = DEPLOY / "observability" / "grafana" / "dashboards" / "kvbm.json"
COMPOSE = [DEPLOY / "docker-observability.yml", DEPLOY / "observability" / "compose.yml"]


def validator(path: str) -> jsonschema.protocols.Validator:
    with open(path) as file:
        schema = json.load(file)
    return jsonschema.validators.validator_for(schema)(schema)


def complaints(check, document) -> list[str]:
    return [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in check.iter_errors(document)
    ]


def test_grafana_takes_the_dashboard(tools):
    check = validator(tools["schemas"]["dashboard"])
    dashboard = json.loads(DASHBOARD.read_text())
    assert complaints(check, dashboard) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d["panels"][1]["gridPos"].update(h="tall"),
        lambda d: d.update(nonsense=1),
        lambda d: d["templating"]["list"][0].pop("type"),
    ],
)
def test_the_schema_notices_what_is_wrong(tools, damage):
    dashboard = copy.deepcopy(json.loads(DASHBOARD.read_text()))
    damage(dashboard)
    assert complaints(validator(tools["schemas"]["dashboard"]), dashboard)


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_takes_the_files(tools, path):
    check = validator(tools["schemas"]["compose"])
    document = yaml.safe_load(path.read_text())
    assert complaints(check, document) == []
    assert complaints(check, {**document, "services": {"x": {"imge": "y"}}})


def test_what_compose_files_mount_is_there():
    compose = yaml.safe_load(COMPOSE[1].read_text())
    for service in compose["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert not source.startswith(".") or (COMPOSE[1].parent / source).exists(), source
    (included,) = yaml.safe_load(COMPOSE[0].read_text())["include"]
    assert (COMPOSE[0].parent / included).exists()


def test_the_eight_panels_that_guides_name_are_there():
    panels = {panel["title"]: panel for panel in json.loads(DASHBOARD.read_text())["panels"]}
    for title, query in {
        "Host Cache Hit Rate": "kvbm_host_cache_hit_rate",
        "Disk Cache Hit Rate": "kvbm_disk_cache_hit_rate",
        "Matched Tokens": "kvbm_matched_tokens",
        "Offload Blocks - Device to Host": "kvbm_offload_blocks_d2h",
        "Offload Blocks - Host to Disk": "kvbm_offload_blocks_h2d",
        "Offload Blocks - Device to Disk (Bypass Host)": "kvbm_offload_blocks_d2d",
        "Onboard Blocks - Host to Device": "kvbm_onboard_blocks_h2d",
        "Onboard Blocks - Disk to Device": "kvbm_onboard_blocks_d2d",
    }.items():
        assert [target["expr"] for target in panels[title]["targets"]] == [f'{query}{{instance=~"$instance"}}']
    for panel in panels.values():
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
