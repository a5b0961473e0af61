"""Compose files are what Compose takes, and what they mount, build and scrape is there."""

from __future__ import annotations

from typing import Any

import pytest
from compose_spec import PyCompose

import server
from tests.deployment import files


@pytest.mark.parametrize("name", files.COMPOSES)
def test_it_follows_the_specification(name: str) -> None:
    PyCompose.from_yaml(files.interpolated((files.FOLDER / name).read_text(), {})).validate()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("read_only: true", "read_only: maybe"), ("cap_drop", "caps"), ("unless-stopped", "always-stopped")],
)
def test_the_specification_is_really_asked(right: str, wrong: str) -> None:
    text = (files.FOLDER / files.COMPOSE).read_text()
    assert right in text
    with pytest.raises(ValueError, match=r"services\.server"):
        PyCompose.from_yaml(files.interpolated(text.replace(right, wrong, 1), {}))


def services() -> dict[str, Any]:
    [document] = files.documents(files.COMPOSE)
    found: dict[str, Any] = document["services"]
    return found


def test_files_that_are_mounted_or_built_from_exist() -> None:
    mounts = [volume for service in services().values() for volume in service["volumes"]]
    sources = {mount.split(":")[0] for mount in mounts}
    local = {source for source in sources if source.startswith(".")}
    assert len(local) == 3
    assert sources - local == files.documents(files.COMPOSE)[0]["volumes"].keys()
    assert [path for path in local if not (files.FOLDER / path).exists()] == []
    for name in files.COMPOSES:
        build = files.documents(name)[0]["services"]["server"]["build"]
        root = (files.FOLDER / build["context"]).resolve()
        assert root == files.ROOT
        assert (root / build["dockerfile"]).is_file()


def test_nothing_answers_beyond_this_machine() -> None:
    ports = [port for service in services().values() for port in service["ports"]]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_server_is_hardened() -> None:
    service = services()["server"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert f"cache:{files.last('Dockerfile', 'VOLUME')}" in service["volumes"]


def test_prometheus_asks_the_server_and_grafana_prometheus() -> None:
    [prometheus] = files.documents("prometheus/prometheus.yml")
    [job] = prometheus["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    assert target == f"server:{files.last('Dockerfile', 'EXPOSE')}"
    assert target.partition(":")[0] in services()
    assert all((files.FOLDER / "prometheus" / name).is_file() for name in prometheus["rule_files"])
    [source] = files.documents("grafana/provisioning/datasources/prometheus.yml")[0]["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    [provider] = files.documents("grafana/provisioning/dashboards/bouquet.yml")[0]["providers"]
    mounted = [mount.split(":")[1] for mount in services()["grafana"]["volumes"]]
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in mounted
    assert home.rpartition("/")[0] == provider["options"]["path"]


def test_images_bear_the_servers_version() -> None:
    tags = [files.documents(name)[0]["services"]["server"]["image"] for name in files.COMPOSES]
    tags += [files.container(name)["image"] for name in files.MANIFESTS]
    assert {tag.removesuffix("-cuda") for tag in tags} == {f"bouquet:{server.VERSION}"}
    for name, tag in zip(files.DOCKERFILES, tags[:2], strict=True):
        assert f"-t {tag} ." in (files.FOLDER / name).read_text()
