"""The manifests of examples/kubernetes against the schemas of Kubernetes and JobSet."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
jobset = pytest.importorskip("kubeflow_trainer_api.models.jobset_v1alpha2_job_set")
yaml = pytest.importorskip("yaml")

EXAMPLES = Path(__file__).parents[2] / "examples/kubernetes"
VERSIONS = ["1.30", "1.34", "1.37"]
JOBS = ["job", "jobset", "mpijob"]

INTEGER, TEXT, ANY = {"type": "integer"}, {"type": "string"}, {"type": "object"}


def only(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


# The MPI operator's schema is in no package. These are the fields beside the pods' and the values
# that it takes (kubeflow/mpi-operator, pkg/apis/kubeflow: v2beta1/types.go, validation).
REPLICA = only(replicas=INTEGER, restartPolicy={"enum": ["Never", "OnFailure"]}, template=ANY)
MPIJOB = only(
    slotsPerWorker=INTEGER,
    sshAuthMountPath=TEXT,
    mpiReplicaSpecs=only(Launcher=REPLICA, Worker=REPLICA),
    runPolicy=only(
        cleanPodPolicy={"enum": ["None", "Running", "All"]},
        backoffLimit=INTEGER,
        activeDeadlineSeconds=INTEGER,
        ttlSecondsAfterFinished=INTEGER,
        suspend={"type": "boolean"},
    ),
)


def documents(name: str) -> Iterator[dict[str, Any]]:
    """What the kustomization of that folder names."""
    folder = EXAMPLES / name
    for resource in yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))["resources"]:
        if (folder / resource).is_dir():
            yield from documents(str((folder / resource).resolve().relative_to(EXAMPLES)))
        else:
            yield from yaml.safe_load_all((folder / resource).read_text("utf-8"))


def of_kind(name: str, kind: str) -> dict[str, Any]:
    (found,) = (one for one in documents(name) if one["kind"] == kind)
    return found


def validate(document: dict[str, Any], version: str) -> None:
    if document["kind"] == "JobSet":
        # Kubeflow's model of JobSet's schema drops what it does not know.
        kept = jobset.JobsetV1alpha2JobSet.from_dict(document)
        assert_holds(kept.to_dict(), document)
        for job in document["spec"]["replicatedJobs"]:
            validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]},
                      **job["template"]}, version)  # fmt: skip
    elif document["kind"] == "MPIJob":
        jsonschema.validate(document["spec"], MPIJOB)
        for replica in document["spec"]["mpiReplicaSpecs"].values():
            validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"},
                      **replica["template"]}, version)  # fmt: skip
    else:
        kubernetes_validate.validate(document, version, strict=True)


def assert_holds(kept: Any, given: Any) -> None:
    """`kept` has all of `given`; defaults may be added."""
    if isinstance(given, dict):
        assert given.keys() <= kept.keys()
        for name, value in given.items():
            assert_holds(kept[name], value)
    elif isinstance(given, list):
        assert len(kept) == len(given)
        for mine, its in zip(kept, given, strict=True):
            assert_holds(mine, its)
    else:
        assert kept == given


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", JOBS)
def test_each_document_fits_the_schema(name: str, version: str) -> None:
    for document in documents(name):
        validate(document, version)


@pytest.mark.parametrize(
    ("name", "kind", "path"),
    [
        ("job", "Job", ["spec"]),
        ("jobset", "JobSet", ["spec", "failurePolicy"]),
        ("jobset", "JobSet", ["spec", "replicatedJobs", 0, "template", "spec"]),
        ("mpijob", "MPIJob", ["spec", "runPolicy"]),
        ("mpijob", "MPIJob", ["spec", "mpiReplicaSpecs", "Worker", "template", "spec"]),
    ],
)
def test_a_field_that_does_not_exist_is_found(name: str, kind: str, path: list[Any]) -> None:
    document = of_kind(name, kind)
    place = document
    for key in path:
        place = place[key]
    place["completionModus"] = "Indexed"
    with pytest.raises(
        (kubernetes_validate.ValidationError, jsonschema.ValidationError, AssertionError)
    ):
        validate(document, VERSIONS[0])


def test_names_and_numbers_of_the_job_agree() -> None:
    service, job = of_kind("job", "Service"), of_kind("job", "Job")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    # Pod 0 of an indexed Job is called NAME-0, in the domain of its Service.
    assert_torchrun_fits(job["spec"], f"{job['metadata']['name']}-0.{service['metadata']['name']}")


def test_names_and_numbers_of_the_jobset_agree() -> None:
    jobs = of_kind("jobset", "JobSet")
    (node,) = jobs["spec"]["replicatedJobs"]
    assert node["replicas"] == 1
    # Pod 0 of job 0 is called JOBSET-REPLICATED-0-0.
    host = f"{jobs['metadata']['name']}-{node['name']}-0-0.{jobs['spec']['network']['subdomain']}"
    assert_torchrun_fits(node["template"]["spec"], host)


def assert_torchrun_fits(job: dict[str, Any], host: str) -> None:
    (container,) = job["template"]["spec"]["containers"]
    assert job["completions"] == job["parallelism"]
    assert f"--nnodes={job['completions']}" in container["args"]
    assert f"--rdzv-endpoint={host}:29500" in container["args"]


def test_numbers_and_ports_of_the_mpi_job_agree() -> None:
    spec = of_kind("mpijob", "MPIJob")["spec"]
    (launcher,) = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    (worker,) = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    slots, workers = spec["slotsPerWorker"], spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert f"-np={slots * workers}" in launcher["args"]
    assert f"--slots-per-host={slots}" in launcher["args"]
    port = worker["readinessProbe"]["tcpSocket"]["port"]
    assert f"-p{port}" in worker["args"]
    assert f"--ssh-port={port}" in launcher["args"]
    assert f"-oHostKey={spec['sshAuthMountPath']}/id_rsa" in worker["args"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, for its kustomize")
@pytest.mark.parametrize("name", JOBS)
def test_an_overlay_changes_image_and_script(name: str, tmp_path: Path) -> None:
    """The overlay of docs/guides/deployment.md."""
    text = (EXAMPLES.parents[1] / "docs/guides/deployment.md").read_text("utf-8")
    overlay = text.partition("```yaml\n")[2].partition("```")[0]
    assert "examples/kubernetes/job\n" in overlay
    copied = tmp_path / "examples/kubernetes"
    shutil.copytree(EXAMPLES, copied)
    mine = tmp_path / "mine"
    mine.mkdir()
    overlay = overlay.replace("examples/kubernetes/job\n", f"examples/kubernetes/{name}\n")
    (mine / "kustomization.yaml").write_text(overlay)
    (mine / "train.py").write_text("print(1)\n")
    done = subprocess.run(
        ["kubectl", "kustomize", mine], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    assert "image: registry.example/me/hvd_order:1" in done.stdout
    assert "image: hvd_order:" not in done.stdout
    assert made["ConfigMap"]["metadata"]["name"] == "train"
    assert made["ConfigMap"]["data"] == {"train.py": "print(1)\n"}
    assert made["PersistentVolumeClaim"]["metadata"]["namespace"] == "training"
