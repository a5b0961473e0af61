"""Manifests follow Kubernetes' own schemas, and name each other, the image and the server rightly."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest

import server
from tests.deployment import files
from tests.http.served import serving

PARTS = [(name, document) for name in files.MANIFESTS for document in files.documents(f"kubernetes/{name}")]
ENGINES = ("cpu.yaml", "gpu.yaml")
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@pytest.mark.parametrize(("name", "document"), PARTS, ids=[f"{name}-{part['kind']}" for name, part in PARTS])
def test_it_follows_the_schema(name: str, document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_schema_is_really_asked() -> None:
    document = files.manifest("cpu.yaml", "Deployment")
    document["spec"]["template"]["spec"]["terminationGracePeriod"] = 50
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


async def test_probes_ask_for_pages_that_the_server_has() -> None:
    paths = {files.container(name)[probe]["httpGet"]["path"] for name in files.MANIFESTS for probe in PROBES}
    assert paths == {"/health", "/ready"}
    scraped = {pod_metadata(name)["annotations"]["prometheus.io/path"] for name in files.MANIFESTS}
    async with serving() as served:
        for path in paths | scraped:
            assert (await served.send("GET", path)).status == 200


@pytest.mark.parametrize("name", files.MANIFESTS)
def test_readiness_and_liveness_ask_for_different_things(name: str) -> None:
    container = files.container(name)
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    # A gateway waits for its engines, an engine for its model, which must come in time.
    ready = name in ENGINES
    assert container["startupProbe"]["httpGet"]["path"] == ("/ready" if ready else "/health")
    window_s = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
    assert window_s >= (300 if ready else 60)


def pod_metadata(name: str) -> dict[str, Any]:
    metadata: dict[str, Any] = files.manifest(name, "Deployment")["spec"]["template"]["metadata"]
    return metadata


@pytest.mark.parametrize("name", files.MANIFESTS)
def test_everything_that_selects_pods_selects_these(name: str) -> None:
    labels = pod_metadata(name)["labels"]
    deployment = files.manifest(name, "Deployment")
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert files.manifest(name, "Service")["spec"]["selector"] == labels
    assert files.manifest(name, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    for spread in files.pod(name).get("topologySpreadConstraints", ()):
        assert spread["labelSelector"]["matchLabels"] == labels


@pytest.mark.parametrize("name", files.MANIFESTS)
def test_ports_are_the_servers(name: str) -> None:
    [port] = files.container(name)["ports"]
    assert str(port["containerPort"]) == files.last("Dockerfile", "EXPOSE")
    assert pod_metadata(name)["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    [offered] = files.manifest(name, "Service")["spec"]["ports"]
    assert offered["targetPort"] == port["name"]
    for probe in PROBES:
        assert files.container(name)[probe]["httpGet"]["port"] == port["name"]


@pytest.mark.parametrize("name", ENGINES)
def test_gateways_find_the_engines_by_the_headless_service(name: str) -> None:
    service = files.manifest(name, "Service")
    assert service["spec"]["clusterIP"] == "None"
    url = f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    flags = [word.replace("$(MODEL)", "minilm") for word in files.container("gateway.yaml")["args"]]
    assert server.parse_options(flags).replicas is not None
    assert files.value_of(flags, "--replica") == url


def test_gateways_and_engines_have_the_same_model_and_keys() -> None:
    config = files.manifest("gateway.yaml", "ConfigMap")
    for name in files.MANIFESTS:
        given = {entry["name"]: entry["valueFrom"] for entry in files.container(name)["env"]}
        assert given["MODEL"]["configMapKeyRef"]["name"] == config["metadata"]["name"]
        assert given["MODEL"]["configMapKeyRef"]["key"] in config["data"]
        own = given["BOUQUET_API_KEY"]["secretKeyRef"]["key"]
        assert own == ("replica-api-key" if name in ENGINES else "api-key")
        used = set(re.findall(r"\$\((\w+)\)", " ".join(files.container(name)["args"])))
        assert used <= given.keys()
    sent = next(e for e in files.container("gateway.yaml")["env"] if e["name"] == "BOUQUET_REPLICA_API_KEY")
    assert sent["valueFrom"]["secretKeyRef"]["key"] == "replica-api-key"


@pytest.mark.parametrize("name", files.MANIFESTS)
def test_pods_run_as_the_images_user_on_a_read_only_root(name: str) -> None:
    user, _, group = files.last("Dockerfile", "USER").partition(":")
    context = files.pod(name)["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (
        int(user),
        int(group),
        int(group),
    )
    own = files.container(name)["securityContext"]
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in files.container(name)["volumeMounts"]}
    assert mounts.keys() == {files.last("Dockerfile", "VOLUME"), "/tmp"}
    assert set(mounts.values()) == {volume["name"] for volume in files.pod(name)["volumes"]}


@pytest.mark.parametrize("name", ENGINES)
def test_engines_are_scaled_by_figures_that_the_adapter_makes(name: str) -> None:
    spec = files.manifest(name, "HorizontalPodAutoscaler")["spec"]
    assert spec["scaleTargetRef"]["name"] == files.manifest(name, "Deployment")["metadata"]["name"]
    assert "replicas" not in files.manifest(name, "Deployment")["spec"]
    wanted = {metric["type"]: metric[metric["type"].lower()]["metric"]["name"] for metric in spec["metrics"]}
    [adapter] = files.documents("kubernetes/prometheus-adapter.yaml")
    rules = adapter["rules"]
    made = {
        "Pods": {rule["name"]["as"] for rule in rules["custom"]},
        "External": {rule["name"]["as"] for rule in rules["external"]},
    }
    assert wanted.keys() == made.keys()
    assert all(figure in made[kind] for kind, figure in wanted.items())
