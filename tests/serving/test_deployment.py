"""The files of examples/serving say things that exist: options, addresses, names, metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from graphopt.cli.entry import build_app

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "serving"
KUBERNETES = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
DASHBOARD = EXAMPLES / "grafana" / "dashboard.json"


@cache
def compose() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "compose.yaml").read_text())


@cache
def resources() -> list[dict[str, Any]]:
    return [part for file in KUBERNETES for part in yaml.safe_load_all(file.read_text())]


def pods() -> list[dict[str, Any]]:
    return [
        resource["spec"]["template"] for resource in resources() if resource["kind"] in ("Deployment", "StatefulSet")
    ]


def containers() -> list[dict[str, Any]]:
    return [
        container
        for pod in pods()
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
    ]


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def metrics() -> set[str]:
    """Return what the dashboard reads, a histogram by its name."""
    names = set(
        re.findall(r"(?:dynamo|graphopt)_\w+", " ".join(re.sub(r'"[^"]*"', "", text) for text in expressions()))
    )
    return {name.removesuffix("_bucket") for name in names}


def test_command_lines_are_those_of_graphopt() -> None:
    lines = [service["command"] for service in compose()["services"].values() if service.get("image") == "graphopt"]
    lines += [container["args"] for container in containers() if container["image"] == "graphopt"]
    assert len(lines) == 5
    serve = typer.main.get_command(build_app()).commands["serve"]  # type: ignore[attr-defined]
    for line in lines:
        assert line[0] == "serve"
        parameters = serve.make_context("serve", list(line[1:])).params
        assert parameters["discovery"] == "etcd"
        assert (parameters["replicas"], parameters["front"]) in ((0, True), (1, False))


def test_kubernetes_names_what_is_there() -> None:
    services = {
        resource["metadata"]["name"]: resource["spec"] for resource in resources() if resource["kind"] == "Service"
    }
    labels = [pod["metadata"]["labels"] for pod in pods()]
    ports = {port["name"]: port["containerPort"] for container in containers() for port in container.get("ports", ())}
    for name, service in services.items():
        assert service["selector"] in labels, name
        assert all(port.get("targetPort", port["port"]) in {*ports, *ports.values()} for port in service["ports"])
    for resource in resources():
        if resource["kind"] in ("Deployment", "StatefulSet"):
            assert resource["spec"]["selector"]["matchLabels"] == resource["spec"]["template"]["metadata"]["labels"]
    for pod in pods():
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", ())} | {"data"}
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    for container in containers():
        probes = [container[kind]["httpGet"] for kind in container if kind.endswith("Probe")]
        assert all(probe["path"] in ("/live", "/health") and probe["port"] in ports for probe in probes)
    addresses = re.findall(r"http://(\w+):(\d+)", "".join(file.read_text() for file in KUBERNETES))
    assert {name for name, _ in addresses} - {"0"} <= set(services)
    kustomization = yaml.safe_load((EXAMPLES / "kustomization.yaml").read_text())
    assert sorted(kustomization["resources"]) == [f"kubernetes/{file.name}" for file in KUBERNETES]


def test_compose_and_kubernetes_say_the_same() -> None:
    images = {service["image"] for service in compose()["services"].values()} - {"prom/prometheus:v2.55.1"}
    assert images - {"grafana/grafana:11.3.0"} == {container["image"] for container in containers()}
    caddy = next(container for container in containers() if container["name"] == "caddy")
    for variables in (
        set(compose()["services"]["caddy"]["environment"]),
        {variable["name"] for variable in caddy["env"]},
    ):
        assert variables <= set(re.findall(r"\{\$(GRAPHOPT_\w+)", (EXAMPLES / "Caddyfile").read_text()))
    for service in compose()["services"].values():
        for volume in service.get("volumes", ()):
            assert not volume.startswith("./") or (EXAMPLES / volume.split(":")[0]).exists(), volume
    scrape_configs = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())["scrape_configs"]
    names = {name for job in scrape_configs for way in job["dns_sd_configs"] for name in way["names"]}
    assert names <= set(compose()["services"])
    assert names <= {resource["metadata"]["name"] for resource in resources() if resource["kind"] == "Service"}
    jobs = {job["job_name"] for job in scrape_configs}
    assert set(re.findall(r'job="([\w-]+)"', " ".join(expressions()))) == jobs


def test_the_image_has_what_it_is_built_from() -> None:
    lines = (EXAMPLES / "Dockerfile.dockerignore").read_text().splitlines()
    assert all((ROOT / line[1:]).exists() for line in lines if line.startswith("!"))
    sources = {"CMakeLists.txt", "pyproject.toml", "graphopt", "tools"}  # CMakeLists.txt runs a tool of tools/release
    assert {f"!{name}" for name in sources} <= set(lines)


def test_metrics_of_workers_on_the_dashboard_exist() -> None:
    source = (ROOT / "graphopt" / "serving" / "batch.py").read_text()
    of_workers = {name.removeprefix("graphopt_worker_") for name in metrics() if name.startswith("graphopt")}
    assert {name for name in of_workers if f'"{name}"' not in source} == set()
    assert len(of_workers) == 10


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_it() -> None:
    process = subprocess.run(["kubectl", "kustomize", str(EXAMPLES)], capture_output=True, text=True, check=True)
    parts = [part for part in yaml.safe_load_all(process.stdout) if part]
    assert len(parts) == len(resources()) + 1
    assert {part["metadata"]["namespace"] for part in parts} == {"graphopt"}
    config = next(part for part in parts if part["kind"] == "ConfigMap")
    assert config["data"].keys() == {"Caddyfile", "index.html"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_prometheus_reads_its_file_and_the_expressions(tmp_path: Path) -> None:
    subprocess.run(["promtool", "check", "config", EXAMPLES / "prometheus.yml"], check=True, capture_output=True)
    texts = [text.replace("$__rate_interval", "1m").replace("$model", ".*") for text in expressions()]
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(texts)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", file], check=True, capture_output=True)
