"""Containers of podman for the pods of a manifest, with its command, variables and volumes."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.ranks import REPOSITORY
from helpers.training import elastic_training

__all__ = ["assert_trained_right", "command_of", "manifest", "options_of"]

TRAINER = 10001  # the user of the images; a commit is read only from a folder of its own


def manifest(name: str) -> dict[str, dict[str, Any]]:
    """The documents of examples/kubernetes/NAME/NAME.yaml by kind."""
    text = (REPOSITORY / f"examples/kubernetes/{name}/{name}.yaml").read_text("utf-8")
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def options_of(pod: Mapping[str, Any], folders: Mapping[str, Path]) -> list[str]:
    """Options of `podman run` for the only container of a pod.

    Args:
        pod: the pod's ``spec``.
        folders: by the name of a volume, what it is here; other volumes are empty.
    """
    (container,) = pod["containers"]
    security = container["securityContext"]
    options = ["--user", str(pod["securityContext"]["runAsUser"])]
    if security["readOnlyRootFilesystem"]:
        options += ["--read-only"]
    if not security["allowPrivilegeEscalation"]:
        options += ["--security-opt=no-new-privileges"]
    options += [f"--cap-drop={each}" for each in security["capabilities"]["drop"]]
    for variable in container.get("env", ()):
        options += ["--env", f"{variable['name']}={variable['value']}"]
    for mount in container["volumeMounts"]:
        place = mount["mountPath"]
        if (folder := folders.get(mount["name"])) is not None:
            options += ["-v", f"{folder}:{place}{':ro' if mount.get('readOnly') else ''}"]
        elif place != "/dev/shm":  # a container has one
            options += ["--tmpfs", place]
    return options


def command_of(pod: Mapping[str, Any]) -> list[str]:
    """Command and arguments of the only container of a pod."""
    (container,) = pod["containers"]
    return [*container["command"], *container["args"]]


def assert_trained_right(said: str, steps: int) -> None:
    """Every loss and the last weights that pods said are those of training without a break."""
    losses, weights = elastic_training.reference(steps)
    done = re.findall(r"step (\d+) loss (\S+) at", said)
    assert {int(step) for step, _ in done} == set(range(steps))
    for step, loss in done:
        assert float(loss) == pytest.approx(losses[int(step)], rel=1e-9)
    (ended,) = re.findall(r"weights (\[.*\])", said)
    assert ast.literal_eval(ended) == pytest.approx(weights, rel=1e-9)
