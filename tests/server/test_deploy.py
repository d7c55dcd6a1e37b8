"""Manifests of deploy/ have the form of Kubernetes; its dashboard asks for metrics that exist."""

import json
import re
from pathlib import Path

import httpx
import kubernetes_validate
import pytest
import typer
import yaml

from jspec.cli import main
from jspec.server.metrics import Observer
from tests.server import live
from tests.server.live import NAME

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
_NUMBER = {"type": "integer", "minimum": 1, "maximum": 65535}
# The fields of an InferencePool: gateway-api-inference-extension, inference.networking.k8s.io/v1.
_POOL = {
    "type": "object",
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "additionalProperties": False,
    "properties": {
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "additionalProperties": False,
            "properties": {
                "matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}
            },
        },
        "targetPorts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "items": {"type": "object", "required": ["number"], "properties": {"number": _NUMBER}},
        },
        "endpointPickerRef": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "port": {"type": "object", "properties": {"number": _NUMBER}},
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
}


def manifests(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def job(jobset):
    """Return the job of a JobSet, whose own form is that of a CRD."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": replicated["name"]}} | (
        replicated["template"]
    )


SPLIT = manifests("tpu_pod_slice.yaml"), manifests("two_gpu_nodes.yaml")
WORKLOADS = [manifests("deployment.yaml")[0], job(SPLIT[0][0]), SPLIT[1][0]]
PLAIN = [*manifests("deployment.yaml"), job(SPLIT[0][0]), *SPLIT[0][1:], *SPLIT[1]]


@pytest.mark.parametrize("manifest", PLAIN, ids=lambda each: each["kind"])
def test_a_manifest_has_the_form_of_kubernetes(manifest):
    kubernetes_validate.validate(manifest, "1.34", strict=True)


def test_the_inference_pool_has_its_form_and_selects_the_pods():
    import jsonschema

    pool, route = manifests("inference_pool.yaml")
    jsonschema.validate(pool["spec"], _POOL)
    deployment = manifests("deployment.yaml")[0]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each["kind"])
def test_the_flags_of_a_workload_are_those_of_serve(workload):
    pod = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = [word.replace("$(POD_INDEX)", "1") for word in container["args"]]
    command = typer.main.get_command(main.app).get_command(None, "serve")
    context = command.make_context("serve", words)
    assert context.args == []
    assert pod["terminationGracePeriodSeconds"] > context.params["shutdown_timeout"]


@pytest.mark.parametrize("manifests", SPLIT, ids=lambda each: each[0]["kind"])
def test_processes_of_a_split_model_have_all_devices_and_the_first_one_is_served(manifests):
    jobset, *services = manifests
    is_jobset = jobset["kind"] == "JobSet"
    workload = job(jobset) if is_jobset else jobset
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    (devices,) = map(int, container["resources"]["limits"].values())
    count = workload["spec"]["completions" if is_jobset else "replicas"]
    given = dict(word[2:].split("=", 1) for word in container["args"] if word.startswith("--"))
    assert int(given["tensor-parallel-size"]) == count * devices
    label = "batch.kubernetes.io/job-completion-index" if is_jobset else "apps.kubernetes.io/pod-i"
    selector = services[-1]["spec"]["selector"]
    assert any(name.startswith(label) and value == "0" for name, value in selector.items())
    if not is_jobset:
        host, port = given["coordinator"].split(":")
        assert host == f"{jobset['metadata']['name']}-0.{services[0]['metadata']['name']}"
        assert services[0]["spec"]["ports"][0]["port"] == int(port)
        assert int(given["num-processes"]) == count


def test_the_probes_ask_what_fails_once_the_engine_has_ended(llm):
    (container,) = manifests("deployment.yaml")[0]["spec"]["template"]["spec"]["containers"]
    kinds = "startupProbe", "readinessProbe", "livenessProbe"
    paths = {container[kind]["httpGet"]["path"] for kind in kinds}
    with live.running(llm) as server:
        asked = lambda: {httpx.get(f"{server.url}{path}").status_code for path in paths}
        assert asked() == {200}
        server.server.served.close()
        assert asked() == {503}


def test_the_dashboard_asks_for_metrics_of_the_server(llm):
    dashboard = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for text in expressions for name in re.findall(r"\w+:\w+", text)}
    given = set(re.findall(r"^(\w+:\w+)", Observer(llm, NAME).text().decode(), re.MULTILINE))
    # A counter without a label's value yet has no sample.
    assert asked - given <= {"vllm:request_success_total"} and len(asked) > 15


def test_the_extras_of_the_image_exist():
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    project = (DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8")
    extras = {name for each in re.findall(r"EXTRAS=([\w,]+)", text) for name in each.split(",")}
    assert extras and all(re.search(rf"^{name} = \[", project, re.MULTILINE) for name in extras)
