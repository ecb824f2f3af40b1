"""The manifests of examples/kubernetes against Kubernetes' own schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

kubernetes_validate = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")

MANIFEST = Path(__file__).parents[2] / "examples/kubernetes/job.yaml"
VERSIONS = ["1.30", "1.34", "1.37"]


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text("utf-8")))


@pytest.mark.parametrize("version", VERSIONS)
def test_each_document_fits_the_schema(version: str) -> None:
    for document in documents():
        kubernetes_validate.validate(document, version, strict=True)


def test_a_field_that_does_not_exist_is_found() -> None:
    job = next(one for one in documents() if one["kind"] == "Job")
    job["spec"]["completionModus"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)


def test_names_and_numbers_agree() -> None:
    service, job, _ = documents()
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    arguments = pod["containers"][0]["args"]
    assert f"--nnodes={job['spec']['completions']}" in arguments
    # Pod 0 of an indexed Job is called NAME-0, in the domain of its Service.
    rendezvous = f"{job['metadata']['name']}-0.{service['metadata']['name']}:29500"
    assert f"--rdzv-endpoint={rendezvous}" in arguments
