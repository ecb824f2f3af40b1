"""The manifests of examples/kubernetes against schemas, and their commands against the parsers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from hvd_order.launch.options import request_from
from hvd_order.tools.cli.main import _parser

jsonschema = pytest.importorskip("jsonschema")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
jobset = pytest.importorskip("kubeflow_trainer_api.models.jobset_v1alpha2_job_set")
trainer = pytest.importorskip("kubeflow_trainer_api.models")
yaml = pytest.importorskip("yaml")

EXAMPLES = Path(__file__).parents[2] / "examples/kubernetes"
VERSIONS = ["1.30", "1.34", "1.37"]
JOBS = ["job", "jobset", "mpijob", "pytorchjob", "trainjob"]

INTEGER, TEXT, ANY = {"type": "integer"}, {"type": "string"}, {"type": "object"}


def only(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


# Schemas of these two operators are in no package. These are the fields beside the pods' and the
# values that the MPI operator takes (kubeflow/mpi-operator, pkg/apis/kubeflow: v2beta1/types.go).
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

# kubeflow/training-operator, docs/api/kubeflow.org_v1_generated.asciidoc.
PYTORCHJOB = only(
    nprocPerNode=TEXT,
    elasticPolicy=only(
        minReplicas=INTEGER, maxReplicas=INTEGER, rdzvBackend=TEXT, rdzvPort=INTEGER,
        rdzvHost=TEXT, rdzvId=TEXT, standalone={"type": "boolean"}, nProcPerNode=INTEGER,
        maxRestarts=INTEGER, rdzvConf={"type": "array"}, metrics={"type": "array"},
    ),
    pytorchReplicaSpecs=only(
        **dict.fromkeys(
            ["Master", "Worker"],
            only(replicas=INTEGER, template=ANY,
                 restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]}),
        )
    ),
    runPolicy=only(
        cleanPodPolicy={"enum": ["None", "Running", "All"]},
        backoffLimit=INTEGER, activeDeadlineSeconds=INTEGER, ttlSecondsAfterFinished=INTEGER,
        suspend={"type": "boolean"}, managedBy=TEXT, schedulingPolicy=ANY,
    ),
)  # fmt: skip


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
    elif document["kind"] == "TrainingRuntime":
        kept = trainer.TrainerV1alpha1TrainingRuntime.from_dict(document)
        assert_holds(kept.to_dict(), document)
        for job in document["spec"]["template"]["spec"]["replicatedJobs"]:
            validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]},
                      "spec": job["template"]["spec"]}, version)  # fmt: skip
    elif document["kind"] == "TrainJob":
        assert_holds(trainer.TrainerV1alpha1TrainJob.from_dict(document).to_dict(), document)
    elif document["kind"] in ("MPIJob", "PyTorchJob"):
        schema, replicas = (MPIJOB, "mpiReplicaSpecs") if document["kind"] == "MPIJob" else (
            PYTORCHJOB, "pytorchReplicaSpecs")  # fmt: skip
        jsonschema.validate(document["spec"], schema)
        for replica in document["spec"][replicas].values():
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
        ("job", "Job", ["spec", "podFailurePolicy", "rules", 0]),
        ("jobset", "JobSet", ["spec", "failurePolicy", "rules", 0]),
        ("mpijob", "MPIJob", ["spec", "runPolicy"]),
        ("pytorchjob", "PyTorchJob", ["spec", "elasticPolicy"]),
        ("trainjob", "TrainingRuntime", ["spec", "template", "spec"]),
        ("trainjob", "TrainJob", ["spec", "trainer"]),
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


def containers(found: Any) -> Iterator[dict[str, Any]]:
    """All that have a command: containers of pods, and a TrainJob's trainer."""
    if isinstance(found, list):
        for each in found:
            yield from containers(each)
    elif isinstance(found, dict):
        if "args" in found:
            yield found
        for value in found.values():
            yield from containers(value)


@pytest.mark.parametrize("name", JOBS)
def test_the_parsers_take_each_command(name: str) -> None:
    programs = set()
    for container in containers(list(documents(name))):
        program, *arguments = container["command"] + container["args"]
        programs.add(program)
        if program == "torchrun":
            parsed = get_args_parser().parse_args(arguments)
            assert parsed.training_script == "/code/train.py"
            assert parsed.training_script_args == []
        elif program == "hvd-order":
            request = request_from(_parser().parse_args(arguments))
            assert request.command == ["python", "/code/train.py"]
            assert request.process_count == 2
        else:
            assert program == "/usr/sbin/sshd"
    assert programs & {"torchrun", "hvd-order"}


def test_the_names_that_operators_look_for() -> None:
    spec = of_kind("pytorchjob", "PyTorchJob")["spec"]
    (container,) = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert spec["pytorchReplicaSpecs"]["Worker"]["replicas"] == spec["elasticPolicy"]["maxReplicas"]
    runtime, job = of_kind("trainjob", "TrainingRuntime"), of_kind("trainjob", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert [one["name"] for one in node["template"]["spec"]["template"]["spec"]["containers"]] == [
        "node"
    ]
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert node["template"]["metadata"]["labels"] == label


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
    overlay += "components: [../examples/kubernetes/kueue]\n"
    (mine / "kustomization.yaml").write_text(overlay)
    (mine / "train.py").write_text("print(1)\n")
    done = subprocess.run(
        ["kubectl", "kustomize", mine], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    queue = {"kueue.x-k8s.io/queue-name": "training"}
    for kind in {"Job", "JobSet", "MPIJob", "PyTorchJob", "TrainJob"} & made.keys():
        assert made[kind]["metadata"]["labels"] == queue
    assert sum(text in done.stdout for text in queue) == 1
    assert "image: registry.example/me/hvd_order:1" in done.stdout
    assert "image: hvd_order:" not in done.stdout
    assert made["ConfigMap"]["metadata"]["name"] == "train"
    assert made["ConfigMap"]["data"] == {"train.py": "print(1)\n"}
    assert made["PersistentVolumeClaim"]["metadata"]["namespace"] == "training"
