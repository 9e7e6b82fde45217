"""The manifests of clusters: valid by Ray's and KubeRay's own schemas, and safe. Nothing is started."""

from __future__ import annotations

import asyncio
import functools
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pykustomize
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from rl_vlm.config import load_config

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "cluster"
SCHEMAS = json.loads((ROOT / "tests/fixtures/kuberay/schema.json").read_text())
LAUNCHED = ("aws", "gcp", "onprem")
OVERLAYS = {"RayCluster": "spot", "RayJob": "job", "RayService": "service"}
RAY_RESOURCES = tuple(OVERLAYS)


def launched(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name / "cluster.yaml").read_text())  # type: ignore[no-any-return]


@functools.cache
def built(overlay: str) -> str:
    """What `kubectl apply -k` sends: kustomize's own build of an overlay."""
    return asyncio.run(pykustomize.build(FOLDER / "kuberay/overlays" / overlay)).yaml  # type: ignore[no-any-return]


def resource(overlay: str, kind: str) -> dict[str, Any]:
    (found,) = (document for document in yaml.safe_load_all(built(overlay)) if document["kind"] == kind)
    return found  # type: ignore[no-any-return]


def kuberay(kind: str) -> dict[str, Any]:
    return resource(OVERLAYS[kind], kind)


def check(resource: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator({**SCHEMAS, "$ref": f"#/$defs/{resource['kind']}"}).validate(resource)


def templates(node: Any) -> Iterator[dict[str, Any]]:
    """Every pod template in a resource."""
    if isinstance(node, dict):
        if "containers" in node.get("spec", {}):
            yield node
        for value in node.values():
            yield from templates(value)
    elif isinstance(node, list):
        for value in node:
            yield from templates(value)


def pods(node: Any) -> Iterator[dict[str, Any]]:
    """Every pod specification in a resource."""
    return (template["spec"] for template in templates(node))


def cluster_of(resource: dict[str, Any]) -> dict[str, Any]:
    """The RayCluster specification in a resource."""
    spec = resource["spec"]
    return spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec  # type: ignore[no-any-return]


@pytest.mark.parametrize("overlay", ["cpu", "gpu", "spot", "job", "service"])
def test_an_overlay_has_one_ray_resource_its_storage_and_its_policy_in_one_namespace(overlay: str) -> None:
    documents = list(yaml.safe_load_all(built(overlay)))
    kinds = [document["kind"] for document in documents]
    assert sorted(kinds)[:3] == ["Namespace", "NetworkPolicy", "PersistentVolumeClaim"] and len(kinds) == 4
    assert {document["metadata"].get("namespace", "rl-vlm") for document in documents} == {"rl-vlm"}


@pytest.mark.parametrize("name", LAUNCHED)
def test_rays_launcher_accepts_the_configuration(name: str) -> None:
    validate_config(prepare_config(launched(name)))


@pytest.mark.parametrize("kind", RAY_RESOURCES)
def test_kuberays_schema_accepts_the_resource(kind: str) -> None:
    check(kuberay(kind))


@pytest.mark.parametrize("kind", RAY_RESOURCES)
def test_pods_are_confined_and_limited(kind: str) -> None:
    resource = kuberay(kind)
    containers = [container for pod in pods(resource) for container in pod["containers"]]
    cluster = cluster_of(resource)
    sidecar = cluster["autoscalerOptions"]
    for container in [*containers, sidecar]:
        security = container["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] == 1000
        assert security["allowPrivilegeEscalation"] is False and security["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"] or (
            container["name"] == "submitter"
        )
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert mounts["shm"] == "/dev/shm" and volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert mounts["shared"] == "/mnt/rl_vlm" and pod["terminationGracePeriodSeconds"] >= 60


@pytest.mark.parametrize("kind", RAY_RESOURCES)
def test_tokens_are_required_and_in_no_file(kind: str) -> None:
    cluster = cluster_of(kuberay(kind))
    assert cluster["authOptions"] == {"mode": "token"} and cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    for pod in pods(cluster):
        for variable in pod["containers"][0]["env"]:
            assert "TOKEN" not in variable["name"] or "secretKeyRef" in variable["valueFrom"]
    if kind == "RayService":  # its pods know the token of clients
        assert all("RL_VLM_API_TOKEN" in str(pod["containers"][0]["env"]) for pod in pods(cluster))


@pytest.mark.parametrize("name", LAUNCHED)
def test_launched_clusters_ask_for_a_token_and_show_the_dashboard_to_their_head_alone(name: str) -> None:
    config = launched(name)
    assert "--env=RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    assert config["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    (start,) = (command for command in config["head_start_ray_commands"] if "--head" in command)
    assert "--dashboard-host=127.0.0.1" in start and "--num-cpus=0" in start


def test_the_policy_lets_nobody_else_reach_rays_ports() -> None:
    policy = resource("gpu", "NetworkPolicy")["spec"]
    mine = policy["podSelector"]
    for ray in map(kuberay, RAY_RESOURCES):
        for template in templates(ray):
            assert mine["matchLabels"].items() <= template["metadata"]["labels"].items()
    everyone = [rule for rule in policy["ingress"] if rule["from"] != [{"podSelector": mine}]]
    ports = {str(rule["from"]): {port["port"] for port in rule["ports"]} for rule in everyone}
    assert len(everyone) == len(ports) == 3 and ports.pop(str([{"podSelector": {}}])) == {8000}
    for namespace, opened in (("kuberay-system", {8265, 52365, 8000}), ("monitoring", {8080})):
        (found,) = [ports.pop(peer) for peer in list(ports) if f"'{namespace}'" in peer]
        assert found == opened


def offers(resource: dict[str, Any]) -> set[str]:
    """The custom resources that worker groups offer."""
    return {
        name
        for group in cluster_of(resource)["workerGroupSpecs"]
        for name in json.loads(json.loads(group["rayStartParams"]["resources"]))
    }


def test_the_jobs_command_is_valid_and_placed_on_workers_that_there_are() -> None:
    job = kuberay("RayJob")
    program, command, config, *rest = shlex.split(job["spec"]["entrypoint"])
    assert (program, command, rest[-1]) == ("rl-vlm", "train", "--resume")
    run_dir = rest[rest.index("--run-dir") + 1]
    assert run_dir.startswith("/mnt/rl_vlm/")
    run = load_config(ROOT / config.removeprefix("/opt/rl_vlm/"), rest[: rest.index("--run-dir")])
    assert run.resources.node_kinds == offers(job) == {"gpu_serving", "gpu_learner", "cpu_env_runner"}
    assert run.learner.num_learners >= 1  # the driver is on the head, which has no GPU


def test_the_service_serves_what_the_configuration_allows() -> None:
    from rl_vlm.runs.serve_app import ServeArguments

    service = kuberay("RayService")
    settings = yaml.safe_load(service["spec"]["serveConfigV2"])
    (application,) = settings["applications"]
    arguments = ServeArguments.model_validate(application["args"])
    run = load_config(None, arguments.overrides)
    assert run.serving.autoscaling is not None and run.resources.replicas_on in offers(service)
    module, _, builder = application["import_path"].partition(":")
    assert callable(getattr(sys.modules[module], builder))


def test_preemptible_workers_offer_what_their_twins_do() -> None:
    types = launched("aws")["available_node_types"]
    for name, twin in (("gpu_serving", "gpu_serving_preemptible"), ("cpu_env_runner", "cpu_env_runner_preemptible")):
        assert types[name]["resources"] == types[twin]["resources"]
        assert types[twin]["node_config"].pop("InstanceMarketOptions") == {"MarketType": "spot"}
        assert types[name]["node_config"] == types[twin]["node_config"]
    assert "InstanceMarketOptions" not in types["gpu_learner"]["node_config"]


@pytest.mark.parametrize(
    ("address", "expected"), [("10.0.0.12", "--num-gpus=1 --resources={\"gpu_learner\":1}"), ("10.0.0.13", "--num-gpus=0")]
)  # fmt: skip
def test_a_machine_of_ones_own_offers_what_its_type_does(address: str, expected: str, tmp_path: Path) -> None:
    start = launched("onprem")["worker_start_ray_commands"][-1]
    for name, script in {
        "hostname": f'[ "$1" = -I ] && echo "{address} 172.17.0.1" || echo box',
        "ray": 'echo "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    known = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RAY_HEAD_IP": "10.0.0.10"}
    done = subprocess.run(["bash", "-c", start], env=known, capture_output=True, text=True, timeout=900, check=True)
    assert "start --address=10.0.0.10:6379" in done.stdout and expected in done.stdout


def test_pods_outlive_what_saves_a_checkpoint() -> None:
    for pod in pods(cluster_of(kuberay("RayJob"))):
        hook = " ".join(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"])
        seconds = int(hook.split("--timeout ")[1].split(";")[0])
        assert "rl-vlm cluster drain" in hook and seconds < pod["terminationGracePeriodSeconds"]
        assert ("--actors" in hook) == (pod["containers"][0]["name"] == "ray-worker")


def test_apptainer_copies_each_source_to_its_own_place() -> None:
    """It reads two words of a line, the source and where it goes, and drops the others."""
    text = (ROOT / "cluster/slurm/rl_vlm.def").read_text()
    lines = text.split("%files\n")[1].split("\n\n")[0].splitlines()
    copied = dict(line.split() for line in lines)
    assert all((ROOT / source).exists() and place == f"/opt/rl_vlm/{source}" for source, place in copied.items())
    assert {"pyproject.toml", "Makefile", "requirements", "rl_vlm", "configs"} <= copied.keys()
