"""Everything under deploy/ that has a schema fits it, and says nothing that KVBM does not know."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from kvbm import config as settings

PROJECT = Path(__file__).parents[2]
MANIFESTS = sorted((PROJECT / "deploy" / "kubernetes").glob("*.yaml"))
COMPOSE = sorted(PROJECT.glob("deploy/docker-*.yml"))
CONTAINERFILES = sorted(PROJECT.glob("deploy/Containerfile*"))
BIN = Path(sys.executable).parent


def documents(path: Path) -> list[dict]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def tool(*command: str | Path, text: str | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(BIN / command[0]), *map(str, command[1:])], capture_output=True, text=True, input=text, timeout=120
    )


def test_there_is_something_to_check():
    assert {path.name for path in MANIFESTS} >= {"agg.yaml", "disagg.yaml", "disagg-2p2d.yaml", "platform.yaml"}
    assert {path.name for path in COMPOSE} >= {"docker-compose.yml"}
    assert {path.name for path in CONTAINERFILES} == {"Containerfile.trtllm", "Containerfile.vllm"}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_fit_the_schema_of_kubernetes(path):
    import kubernetes_validate

    for document in documents(path):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_a_manifest_that_does_not_fit_is_noticed():
    import kubernetes_validate

    worker = next(d for d in documents(PROJECT / "deploy/kubernetes/agg.yaml") if d["kind"] == "StatefulSet")
    worker["spec"]["replica"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(worker, kubernetes_validate.latest_version(), strict=True)


def containers(path: Path):
    for document in documents(path):
        if document["kind"] in ("Deployment", "StatefulSet"):
            pod = document["spec"]["template"]["spec"]
            for container in pod["containers"]:
                yield document, pod, container


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_pods_are_careful(path):
    """Nobody is root, everybody is probed, memory has a limit, and no token of the cluster lies around."""
    for document, pod, container in containers(path):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert {"livenessProbe", "readinessProbe"} <= set(container)
        assert container["resources"]["limits"]["memory"]
        assert document["spec"]["selector"]["matchLabels"] == document["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("name", ["agg", "disagg", "disagg-2p2d"])
def test_no_group_can_write_to_the_volume_of_the_disk_tier(name):
    """The disk tier refuses such a directory, and fsGroup makes every volume one."""
    path = PROJECT / "deploy" / "kubernetes" / f"{name}.yaml"
    pods = [
        pod for _, pod, one in containers(path) if "kvbm" in {mount["name"] for mount in one.get("volumeMounts", ())}
    ]
    assert pods
    for pod in pods:
        assert "fsGroup" not in pod["securityContext"]
        (prepare,) = pod["initContainers"]
        user = pod["securityContext"]["runAsUser"]
        assert prepare["command"][-1] == f"chown {user}:{user} /var/lib/kvbm && chmod 0700 /var/lib/kvbm"
        assert prepare["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}


@pytest.mark.parametrize("name", ["agg", "disagg", "disagg-2p2d"])
def test_what_manifests_say_to_kvbm_is_understood(name):
    path = PROJECT / "deploy" / "kubernetes" / f"{name}.yaml"
    (data,) = [document["data"] for document in documents(path) if document["kind"] == "ConfigMap"]
    config = settings.load(environ=data, files=())
    assert config.warnings == ()
    assert config.metrics
    cached = 0
    for document, pod, container in containers(path):
        names = {mount["name"] for mount in container.get("volumeMounts", ())}
        claims = {claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", ())}
        assert names == claims | {volume["name"] for volume in pod.get("volumes", ())}
        arguments = container.get("args", [])
        for option in ("--kv-transfer-config", "--kv-events-config"):
            if option in arguments:
                json.loads(arguments[arguments.index(option) + 1])
        if "DynamoConnector" in str(arguments):
            cached += document["spec"]["replicas"]
            (disk,) = [mount for mount in container["volumeMounts"] if mount["name"] == "kvbm"]
            assert disk["mountPath"] == str(config.disk_cache_dir)
            (claim,) = document["spec"]["volumeClaimTemplates"]
            room = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) * 2**30
            assert config.disk_cache_gb * 1e9 < room
            memory = int(container["resources"]["requests"]["memory"].removesuffix("Gi")) * 2**30
            assert config.cpu_cache_gb * 1e9 < memory
    assert cached == {"agg": 1, "disagg": 1, "disagg-2p2d": 2}[name]


def test_the_engines_of_a_fleet_find_each_other():
    """By the name of the service, at the port where they listen, with one secret; and in compose as in Kubernetes."""
    path = PROJECT / "deploy" / "kubernetes" / "fleet.yaml"
    (data,) = [document["data"] for document in documents(path) if document["kind"] == "ConfigMap"]
    config = settings.load(environ=data, files=())
    assert config.warnings == ()
    assert config.peers_enabled
    host, _, port = config.peers.rpartition(":")
    (service,) = [d for d in documents(path) if d["kind"] == "Service" and d["metadata"]["name"] == host]
    assert service["spec"]["clusterIP"] == "None"
    assert [str(entry["port"]) for entry in service["spec"]["ports"]] == [port]
    assert config.peer_listen.endswith(f":{port}")
    ((document, _, container),) = containers(path)
    assert service["spec"]["selector"] == document["spec"]["template"]["metadata"]["labels"]
    assert int(port) in {entry["containerPort"] for entry in container["ports"]}
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "secret"]
    assert str(config.peer_secret_file).startswith(mount["mountPath"])
    (policy,) = [d for d in documents(path) if d["kind"] == "NetworkPolicy"]
    assert policy["spec"]["ingress"][0]["ports"] == [{"port": int(port)}]

    compose = yaml.safe_load((PROJECT / "deploy/docker-fleet.yml").read_text())
    ((name, engine),) = compose["services"].items()
    environ = {key: str(value).split(":-")[-1].rstrip("}") for key, value in engine["environment"].items()}
    told = settings.load(environ=environ, files=())
    assert told.warnings == ()
    assert told.peers == f"{name}:{told.peer_listen.rpartition(':')[2]}"
    assert str(told.peer_secret_file) == f"/run/secrets/{engine['secrets'][0]}"
    assert "ports" not in engine


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_files_fit_their_schema(path):
    checked = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_compose_file_that_does_not_fit_is_noticed(tmp_path):
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text((PROJECT / "deploy/docker-compose.yml").read_text().replace("restart:", "restarts:"))
    assert tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", wrong).returncode == 1


def test_services_of_compose_are_reachable_from_this_machine_only():
    compose = yaml.safe_load((PROJECT / "deploy/docker-compose.yml").read_text())
    ports = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert len(ports) == 2
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_containerfiles_pass_the_linter(path):
    checked = tool("hadolint", "--failure-threshold", "warning", path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_containerfile_that_does_not_pass_is_noticed():
    wrong = (PROJECT / "deploy/Containerfile.vllm").read_text().replace("USER 10001", "USER root\nRUN cd /tmp && ls")
    assert tool("hadolint", "--failure-threshold", "warning", "-", text=wrong).returncode == 1


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_images_run_as_nobody_special(path):
    lines = path.read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users[-1] == "10001"
    assert any("kvbm-*.whl" in line for line in lines)


def test_asked_for_help_the_script_of_the_dashboard_writes_none(tmp_path):
    script = tmp_path / "scripts" / "dashboard.py"
    script.parent.mkdir()
    script.write_bytes((PROJECT / "scripts" / "dashboard.py").read_bytes())
    target = tmp_path / "deploy/observability/grafana/dashboards/kvbm.json"
    target.parent.mkdir(parents=True)
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "usage: dashboard.py" in done.stdout
    assert not target.exists()
    assert subprocess.run([sys.executable, script], capture_output=True, timeout=60).returncode == 0
    assert target.read_bytes() == (PROJECT / "deploy/observability/grafana/dashboards/kvbm.json").read_bytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_the_disk_tier_trusts_the_volume_of_the_chart(tmp_path):
    """fsGroup gives the volume to the image's group, which has the image's user alone. The chart needs no root."""
    volume = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        os.chown(volume, 0, 10001)
        volume.chmod(0o2775)
        (tmp_path / "passwd").write_text("root:x:0:0::/root:/bin/sh\nkvbm:x:10001:10001::/home/kvbm:/bin/sh\n")
        (tmp_path / "group").write_text("root:x:0:\nkvbm:x:10001:\n")
        program = "from pathlib import Path; from kvbm.tiers.directory import private_directory as p; import sys"
        # The tests' own Python may lie where other users cannot go; this module needs no packages.
        python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
        source = volume.with_name(f"{volume.name}-source")
        shutil.copytree(PROJECT / "src" / "kvbm", source / "kvbm", ignore=shutil.ignore_patterns("__pycache__"))
        inner = f"{shlex.quote(python)} -c '{program}; p(Path(sys.argv[1]))' {volume}/cache/kvbm-model"
        script = (
            f"mount --bind {tmp_path}/passwd /etc/passwd && mount --bind {tmp_path}/group /etc/group && "
            f"exec setpriv --reuid 10001 --regid 10001 --clear-groups env PYTHONPATH={source} {inner}"
        )
        done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60)
        if "unshare" in done.stderr or "mount:" in done.stderr or "setpriv" in done.stderr:
            pytest.skip(f"this machine has no namespaces: {done.stderr}")
        assert done.returncode == 0, done.stderr
        assert (volume / "cache" / "kvbm-model").stat().st_uid == 10001
    finally:
        shutil.rmtree(volume)
        shutil.rmtree(f"{volume}-source", ignore_errors=True)


def test_no_image_has_a_moving_tag():
    chart = yaml.safe_load((PROJECT / "deploy/helm/kvbm/values.yaml").read_text())["image"]
    images = [f"{chart['repository']}:{chart['tag']}"]
    for path in [*MANIFESTS, *PROJECT.glob("deploy/**/*.yml"), *CONTAINERFILES]:
        images += re.findall(r"^\s*(?:image:|ARG ENGINE_IMAGE=|FROM) ?(\S+)", path.read_text(), re.MULTILINE)
    images = [re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", image) for image in images if image != "${ENGINE_IMAGE}"]
    assert len(images) > 10
    for image in images:
        assert re.search(r":v?\d+\.\d+\.\d+", image), image
        assert "bitnami" not in image  # its free images are no longer maintained


def test_docker_run_has_the_gpus_and_shared_memory():
    texts = [path.read_text() for path in [*CONTAINERFILES, PROJECT / "docs" / "deploy.md"]]
    runs = [re.sub(r"\\\n#? *", "", text)[at.start() :].splitlines()[0] for text in texts
            for at in re.finditer("docker run --", re.sub(r"\\\n#? *", "", text))]  # fmt: skip
    assert len(runs) == 3
    assert all("--gpus all" in run and "--shm-size" in run for run in runs)
