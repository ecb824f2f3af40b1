"""Collects the doctor's findings, as data and as text."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

from hvd_order.tools.doctor import devices, surroundings
from hvd_order.tools.doctor.self_test import SelfTest, clean_environment, run_self_test

__all__ = ["examine", "text_of"]

_PROBE_S = 60.0


def examine(timeout_s: float) -> dict[str, Any]:
    """Collects all findings.

    Args:
        timeout_s: seconds for a self-test.

    Returns:
        JSON-able: ``versions``, ``modules``, ``devices``, ``transports``, ``alias``, ``network``,
        ``environment``, ``self_test`` (by transport), ``problems`` (sentences) and ``healthy``.
    """
    facts = _probe()
    gpu = facts.pop("devices")
    network, problems = surroundings.network()
    problems += surroundings.environment_problems()
    versions = surroundings.versions()
    horovod = None
    if versions["horovod"] != "not installed":
        horovod = _probe("horovod")
    alias = surroundings.alias_facts()
    if alias["variable works"] is False:
        problems.append(
            "HVD_ORDER_ALIAS=1 would have no effect: hvd_order_alias.pth is not in site-packages; "
            "install hvd_order with pip (in a checkout: make build)"
        )
    for name in ("core", "extension", "torch"):
        if not facts[name]["works"]:
            problems.append(f"{name}: {facts[name]['why']}")
    tests = {"torch.distributed": run_self_test(timeout_s)}
    if horovod is not None and horovod["works"]:
        tests["horovod"] = run_self_test(timeout_s, {"HVD_ORDER_TRANSPORT": "horovod"})
    return {
        "versions": versions,
        "modules": facts,
        "devices": {
            "CUDA": devices.cuda_line(facts["torch"], gpu["driver"]),
            "kernels": devices.kernels_line(facts["torch"], gpu["kernels"]),
        },
        "transports": _transports(facts["torch"], horovod),
        "alias": alias,
        "network": network,
        "environment": surroundings.environment(),
        "self_test": {name: dataclasses.asdict(test) for name, test in tests.items()},
        "problems": problems,
        "healthy": all(test.passed for test in tests.values()),
    }


def _probe(*arguments: str) -> dict[str, Any]:
    """What `hvd_order.tools.doctor.torch_facts` prints."""
    command = [sys.executable, "-m", "hvd_order.tools.doctor.torch_facts", *arguments]
    try:
        done = subprocess.run(
            command,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
        facts: dict[str, Any] = json.loads(done.stdout.strip().split("\n")[-1])
        return facts
    except subprocess.TimeoutExpired:
        why = f"importing it took more than {_PROBE_S:g} s"
    except ValueError:
        last = done.stderr.strip().split("\n")[-1]
        why = f"importing it ended Python with code {done.returncode}: {last}"
    broken = {"works": False, "why": why}
    if arguments:
        return broken
    unknown = {"driver": None, "kernels": {"compiled_for": "", "why_not": why}}
    return {"torch": broken, "core": broken, "extension": broken, "devices": unknown}


def _transports(torch: dict[str, Any], horovod: dict[str, Any] | None) -> dict[str, str]:
    """Each transport in a few words."""
    if not torch["works"]:
        found = dict.fromkeys(("gloo", "nccl", "mpi", "ucc"), "no PyTorch")
    else:
        found = {name: "yes" if torch[name] else "not built" for name in ("gloo", "mpi", "ucc")}
        devices = len(torch["devices"])
        found["nccl"] = f"{torch['nccl']}, {devices} devices" if torch["nccl"] else "not built"
    if horovod is None:
        found["horovod"] = "not installed"
    elif not horovod["works"]:
        found["horovod"] = f"installed, cannot be used: {horovod['why']}"
    else:
        found["horovod"] = (
            f"{horovod['version']}, with {', '.join(horovod['built_with']) or 'nothing'}"
        )
    return found


def text_of(report: dict[str, Any]) -> str:
    """Formats the report as text."""
    lines: list[str] = []
    for section in (
        "versions", "modules", "devices", "transports", "alias", "network", "environment",
    ):  # fmt: skip
        lines.append(section)
        values = report[section] or {"": "none of the project's variables is set"}
        lines += [f"  {name:<20} {_value(value)}".rstrip() for name, value in values.items()]
    lines.append("self-test (two ranks: init, allreduce, steps equal to one process)")
    for name, values in report["self_test"].items():
        test = SelfTest(**values)
        lines.append(
            f"  {name:<20} {'passed' if test.passed else 'FAILED'} in {test.seconds:.1f} s"
        )
        if not test.passed:
            lines += [f"  cause: {test.cause}", f"  cure:  {test.cure}", test.output]
    lines.append("problems" if report["problems"] else "no problems")
    lines += [f"  {problem}" for problem in report["problems"]]
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        if value.get("works") is False:
            return f"NO: {value['why']}"
        return ", ".join(
            f"{name} {_value(part)}" for name, part in value.items() if name != "works"
        )
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if value in (True, False, None):
        return {True: "yes", False: "no"}.get(value, "-")
    return str(value)
