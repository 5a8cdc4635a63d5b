"""examples/kubernetes without a cluster: its manifests, and the jobs that a run of it creates.

A small API server takes the place of Kubernetes: it checks every job that dagster-k8s sends
against the schemas, and runs the pod's command on this machine.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._core.definitions.reconstruct import ReconstructableRepository
from dagster._core.launcher import LaunchRunContext

from bulk_pipeline import scan_table
from bulk_pipeline_tests.dev import wait_for

pytest.importorskip("dagster_k8s", reason="pip install 'bulk-pipeline[k8s]'")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install '.[dev]'")

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "kubernetes"
VERSIONS = ("1.31", "1.37")
GPU = "nvidia.com/gpu"


def documents(*names: str) -> list[dict[str, Any]]:
    return [each for name in names for each in yaml.safe_load_all((EXAMPLE / name).read_text())]


def test_the_manifests_are_valid_and_fit_together():
    kustomization = documents("kustomization.yaml")[0]
    manifests = documents(*kustomization["resources"])
    for manifest in manifests:
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)
    (config_map,) = kustomization["configMapGenerator"]
    assert all((EXAMPLE / name).exists() for name in config_map["files"])
    names = {(each["kind"], each["metadata"]["name"]) for each in manifests}
    launcher = documents("dagster.yaml")[0]["run_launcher"]["config"]
    claim = launcher["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert ("PersistentVolumeClaim", claim) in names
    assert ("ServiceAccount", launcher["service_account_name"]) in names
    assert launcher["instance_config_map"] == config_map["name"]
    assert launcher["job_namespace"] == kustomization["namespace"]
    (deployment,) = (each for each in manifests if each["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == launcher["service_account_name"]
    assert {each["image"] for each in pod["containers"]} == {launcher["job_image"]}


def test_a_wrong_manifest_is_found():
    (claim,) = documents("volume.yaml")
    with pytest.raises(kubernetes_validate.ValidationError, match="storageClas"):
        kubernetes_validate.validate(
            claim | {"spec": claim["spec"] | {"storageClas": "x"}}, VERSIONS[-1], strict=True
        )


class Api(ThreadingHTTPServer):
    """The part of Kubernetes' API that dagster-k8s uses for jobs; pods are processes here."""

    def __init__(self, environment: dict[str, str]):
        self.environment = environment
        self.jobs: dict[str, dict[str, Any]] = {}
        self.processes: dict[str, subprocess.Popen] = {}
        self.problems: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)

    def create(self, job: dict[str, Any]) -> None:
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(job, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                self.problems.append(error.message)
        name = job["metadata"]["name"]
        (container,) = job["spec"]["template"]["spec"]["containers"]
        given = {each["name"]: each.get("value", "a secret") for each in container["env"]}
        self.jobs[name] = job
        self.processes[name] = subprocess.Popen(container["args"], env=self.environment | given)

    def status(self, name: str) -> dict[str, Any]:
        code = self.processes[name].poll()
        counts = {"active": 1} if code is None else {"failed" if code else "succeeded": 1}
        return self.jobs[name] | {"status": counts}


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_POST(self) -> None:
        assert re.fullmatch("/apis/batch/v1/namespaces/bulk/jobs", self.path), self.path
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.create(job)
        self.answer(201, job)

    def do_GET(self) -> None:
        name = re.fullmatch("/apis/batch/v1/namespaces/bulk/jobs/([^/]*)/status", self.path)
        assert name, self.path
        self.answer(200, self.server.status(name[1]))

    def answer(self, code: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def api() -> Iterator[Api]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with Api({"PATH": path, "PYTHONPATH": str(ROOT), "HOME": os.environ["HOME"]}) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        for process in server.processes.values():
            process.kill()
            process.wait()
        server.shutdown()


@pytest.fixture
def project(tmp_path: Path, toy: Path, api: Api, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example with its volume in a folder, Dagster's history in files, and this API."""
    folder = tmp_path / "app"
    shutil.copytree(EXAMPLE, folder)
    (tmp_path / "bulk" / "models").mkdir(parents=True)
    (tmp_path / "bulk" / "models" / "my-model").symlink_to(toy)
    questions = tmp_path / "bulk" / "source" / "questions"
    questions.mkdir(parents=True)
    (questions / "monday.jsonl").write_text('{"question": "Why?"}\n{"question": "How?"}\n')
    definitions = (folder / "definitions.py").read_text()
    assert '"max_new_tokens": 256' in definitions
    definitions = definitions.replace('"max_new_tokens": 256', '"max_new_tokens": 8')
    (folder / "definitions.py").write_text(definitions)

    kubeconfig = tmp_path / "kubeconfig"
    url = f"http://127.0.0.1:{api.server_port}"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
                "clusters": [{"name": "here", "cluster": {"server": url}}],
                "users": [{"name": "me", "user": {}}],
            }
        )
    )
    settings = yaml.safe_load((folder / "dagster.yaml").read_text())
    del settings["storage"]
    launcher = settings["run_launcher"]["config"]
    launcher |= {"load_incluster_config": False, "kubeconfig_file": str(kubeconfig)}
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("DAGSTER_PG_HOST", "dagster-postgresql")
    monkeypatch.setenv("BULK_ROOT", str(tmp_path / "bulk"))
    return folder


@pytest.mark.slow
def test_a_run_and_its_steps_are_jobs_and_one_asks_for_a_gpu(project: Path, api: Api) -> None:
    repository = ReconstructableRepository.for_file(
        str(project / "definitions.py"), "defs", str(project)
    )
    job = repository.get_reconstructable_job("questions_job")
    with dg.DagsterInstance.get() as instance:
        instance.add_dynamic_partitions("questions_partitions", ["monday"])
        run = instance.create_run_for_job(
            job.get_definition(),
            job_code_origin=job.get_python_origin(),
            tags={"dagster/partition": "monday"},
        )
        instance.run_launcher.launch_run(LaunchRunContext(dagster_run=run, workspace=None))
        wait_for(lambda: instance.get_run_by_id(run.run_id).is_finished, "the run", 240)
        assert instance.get_run_by_id(run.run_id).status == dg.DagsterRunStatus.SUCCESS
    assert api.problems == []
    by_component = {
        (labels["app.kubernetes.io/component"], labels.get("dagster/op")): job
        for job in api.jobs.values()
        for labels in (job["metadata"]["labels"],)
    }
    steps = {op: job for (component, op), job in by_component.items() if component == "step_worker"}
    assert len(by_component) == 5
    limits = {op: container(job)["resources"]["limits"] for op, job in steps.items()}
    assert {op for op in limits if GPU in limits[op]} == {"questions__completions"}
    assert GPU not in container(by_component["run_worker", None])["resources"]["limits"]
    for job in by_component.values():
        pod = job["spec"]["template"]["spec"]
        assert pod["serviceAccountName"] == "bulk-dagster"
        assert container(job)["image"] == "registry.example.com/bulk-pipeline:1"
        assert {each["mountPath"] for each in container(job)["volumeMounts"]} == {"/bulk"}
        (password,) = (e for e in container(job)["env"] if e["name"] == "DAGSTER_PG_PASSWORD")
        assert password["valueFrom"]["secretKeyRef"]["name"] == "dagster-postgresql"
    table = scan_table(os.environ["BULK_ROOT"] + "/tables", "questions").collect()
    assert table["question"].to_list() == ["Why?", "How?"]


def container(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["template"]["spec"]["containers"][0]
