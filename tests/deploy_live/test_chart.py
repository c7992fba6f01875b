"""The Helm chart: lint, its schema of values, and what it renders."""

from __future__ import annotations

import json
import subprocess

import kubernetes_validate
import pytest
import yaml

from conftest import PROJECT
from kvbm import config as settings

CHART = PROJECT / "deploy" / "helm" / "kvbm"
EVERYTHING = [
    "--set=metrics.serviceMonitor.enabled=true", "--set=metrics.networkPolicy.enabled=true",
    "--set=huggingFace.existingSecret=hf", "--set=gpus=4", "--set-json=cache.cpuGb=100.5",
]  # fmt: skip
LESS = ["--set=cache.disk.enabled=false", "--set=models.existingClaim=weights"]


@pytest.fixture
def render(helm):
    def render(*options):
        command = [helm, "template", "demo", str(CHART), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    return render


@pytest.fixture
def documents(render):
    def documents(*options):
        done = render(*options)
        assert done.returncode == 0, done.stderr
        return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout) if each}

    return documents


def test_the_linter_has_nothing_to_say(helm):
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "0 chart(s) failed" in done.stdout


@pytest.mark.parametrize("options", [[], EVERYTHING, LESS], ids=["defaults", "everything", "less"])
def test_what_it_renders_fits_the_schema_of_kubernetes(documents, options):
    for (kind, _), document in documents(*options).items():
        if kind != "ServiceMonitor":  # not a part of Kubernetes
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    "wrong",
    [
        "image.tag=latest", "gpus=0", "cache.cpuGb=0", "cache.cpuGB=100", "models.size=lots", "memory=1.5",
        "args[0]=--kv-transfer-config={}", "metrics.port=70000", "huggingFace.token=secret",
    ],
)  # fmt: skip
def test_the_schema_of_the_values_refuses_what_cannot_work(render, wrong):
    done = render(f"--set={wrong}")
    assert done.returncode != 0
    assert wrong.split("=")[0].split(".")[0].split("[")[0] in done.stderr


def test_the_pod_is_careful_and_large_enough(documents):
    rendered = documents(*EVERYTHING)
    pod = rendered["StatefulSet", "demo-kvbm"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"] == 10001
    assert pod["automountServiceAccountToken"] is False
    assert "initContainers" not in pod  # no root anywhere
    (container,) = pod["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["image"].endswith(":2.0.0")
    memory = int(container["resources"]["limits"]["memory"].removesuffix("Mi")) * 2**20
    assert 48 * 2**30 + 100.5e9 <= memory < 48 * 2**30 + 101e9
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert "--tensor-parallel-size=4" in container["args"]
    assert {"models", "shm", "cache"} == {mount["name"] for mount in container["volumeMounts"]}
    (token,) = [each for each in container["env"] if each["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hf", "key": "token"}


def test_the_volumes_are_of_their_kinds(documents):
    rendered = documents()
    assert rendered["PersistentVolumeClaim", "demo-kvbm-models"]["spec"]["resources"]["requests"]["storage"] == "100Gi"
    (claim,) = rendered["StatefulSet", "demo-kvbm"]["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "cache"
    less = documents(*LESS)
    assert not [name for kind, name in less if kind == "PersistentVolumeClaim"]
    assert "volumeClaimTemplates" not in less["StatefulSet", "demo-kvbm"]["spec"]


def test_prometheus_finds_the_metrics(documents):
    rendered = documents(*EVERYTHING)
    monitor = rendered["ServiceMonitor", "demo-kvbm"]["spec"]
    ports = {
        port["name"]
        for (kind, _), service in rendered.items()
        if kind == "Service" and monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        for port in service["spec"]["ports"]
    }
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} == ports


def test_kvbm_understands_what_the_chart_says_to_it(documents, monkeypatch, capsys):
    """`kvbm serve` itself takes the arguments, and KVBM the environment."""
    from kvbm.cli.main import main

    (container,) = documents()["StatefulSet", "demo-kvbm"]["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert settings.load({"cpu_cache_gb": 1}, environment, []).warnings == ()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert container["command"] == ["kvbm", "serve"]
    assert main(["serve", *container["args"], "--print"]) == 0
    assert "DYN_KVBM_CPU_CACHE_GB=100 DYN_KVBM_DISK_CACHE_GB=200" in capsys.readouterr().out


def test_the_versions_agree():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == values["image"]["tag"]
    assert json.loads((CHART / "values.schema.json").read_text())["additionalProperties"] is False
