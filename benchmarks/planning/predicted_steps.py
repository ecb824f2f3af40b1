"""Predicts the cells of the side-by-side benchmark and sets them beside what was measured.

A cell's own wire time and local step go in, and what the machine was measured to do (``Machine``);
the step times of DDP and of hvd_order come out. See README.md.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.records.environment import ROOT
from benchmarks.runner.workloads.profiles import PROFILES, Layer, Profile
from hvd_order.planning.bounds.bound import chain_optimum_s
from hvd_order.planning.predict.simulate import (
    AllReduceScenario,
    StepWorkload,
    TransferSchedule,
    ddp,
    simulate,
)

_MIB = 2**20
_WIRE_CHUNK_BYTES = 8 * _MIB  # of the benchmark's saturated all-reduce


_PREDICTED = re.compile(r"(?:(\d+) KiB x (\d+)(?:, (\w+))?(?:, leader)?|[\d.]+ MiB)$")
"""Settings that are predicted: of DDP, and of hvd_order with *leader* agreement and overlap."""


@dataclass(frozen=True)
class Machine:
    """What a cell does not say about the emulated hosts; all from one of their runs.

    Attributes:
        latency_s: an all-reduce of next to nothing between 2 hosts.
        slice_cost_s: what a slice costs beside its bytes.
        control_latency_s: a message of the agreement.
        lanes: threads of a Gloo process group.
        update_s_per_byte: of SGD; a local step's end until the next one's first layer.
        ddp_hook_s_per_byte: DDP copies in backward: its gaps between layers less the local step's.
        hook_s: a hook of hvd_order, for one parameter (HISTORY.md: 36 us on average).
        core_wait_s: of the training thread before each layer under hvd_order, whose transfers go on
            all the time: two ranks, their Gloo threads and the kernel share two cores (HISTORY.md:
            14 to 18 ms a step for 2 x 121 layers, where the local step waits for 1 to 3 ms).
    """

    latency_s: float = 0.5e-3
    slice_cost_s: float = 0.3e-3
    control_latency_s: float = 0.3e-3
    lanes: int = 2
    update_s_per_byte: float = 0.17e-9
    ddp_hook_s_per_byte: float = 0.25e-9
    hook_s: float = 36e-6
    core_wait_s: float = 14e-3 / 242


@dataclass(frozen=True)
class Cell:
    """One model on some hosts.

    Attributes:
        local_s: of the slowest rank.
        measured: (system, what it chose, seconds a step); see `predicted_s` for the choices.
        late: the last rank's layers take so many times as long as the others'.
    """

    source: str
    model: str
    hosts: int
    wire_s: float
    local_s: float
    ratio: float
    measured: tuple[tuple[str, str, float], ...]
    late: float = 1.0


def cells_of_json(path: Path) -> Iterator[Cell]:
    """Of a result file of `hvd-order bench`."""
    document = json.loads(path.read_text("utf-8"))
    if document["settings"]["framework"] != "torch":
        return  # what `Machine` says was measured with PyTorch
    for cell in document["raw"]["cells"]:
        setting = cell["setting"]
        if setting["model"] not in PROFILES or setting["ratio"] is None:
            continue
        if setting.get("clip") is not None:
            continue  # what `Machine` says was measured without clipping
        measured = []
        for name, system in cell["systems"].items():
            if _PREDICTED.match(system["note"]):
                measured.append((name, system["note"], statistics.median(system["seconds"])))
            elif "KiB" in system["note"]:
                print(f"left out: {path.stem}, {setting['model']}, {name}, {system['note']}")
        local_s = statistics.median(cell["systems"]["local"]["seconds"])
        yield Cell(path.stem, setting["model"], setting["hosts"], cell["wire_s"], local_s,
                   setting["ratio"], tuple(measured), setting.get("late", 1.0))  # fmt: skip


def _scaled(cell: Cell, machine: Machine) -> Profile:
    """The profile on a device with the cell's local step, less the update.

    What the local step takes more than its layers sleep is spread over these evenly: the sleeps'
    overshoot and autograd cost the same in a short layer as in a long one.
    """
    profile = PROFILES[cell.model]().scaled_to(cell.ratio * cell.wire_s)
    update_s = machine.update_s_per_byte * profile.size_bytes
    extra_s = (cell.local_s / cell.late - update_s - profile.compute_s) / (2 * len(profile.layers))
    return Profile(
        profile.name,
        tuple(
            replace(
                layer,
                forward_s=max(layer.forward_s + extra_s, 0.0),
                backward_s=max(layer.backward_s + extra_s, 0.0),
            )
            for layer in profile.layers
        ),
    )


def _workload(profile: Profile, machine: Machine, is_ddp: bool) -> StepWorkload:
    def hook_s(layer: Layer) -> float:
        if is_ddp:
            return machine.ddp_hook_s_per_byte * layer.size_bytes
        return machine.hook_s * len(layer.tensors) + machine.core_wait_s

    layers = profile.layers
    wait_s = 0.0 if is_ddp else machine.core_wait_s
    return StepWorkload.chain(
        [layer.name for layer in layers],
        [layer.forward_s + wait_s for layer in layers],
        [layer.backward_s + hook_s(layer) for layer in layers],
        [[4 * tensor for tensor in layer.tensors] for layer in layers],
        machine.update_s_per_byte,
    )


def predicted_s(cell: Cell, note: str, machine: Machine) -> float:
    """Step time of a system that chose ``note``, as the slowest rank has it.

    Args:
        note: "25 MiB" is DDP with such buckets; "2032 KiB x 2[, priority]" is hvd_order with such
            slices and credit for so many of them.
    """
    profile = _scaled(cell, machine)
    # The wire time holds the cost of its chunks.
    chunks = profile.size_bytes / _WIRE_CHUNK_BYTES
    per_byte = (cell.wire_s - chunks * machine.slice_cost_s) / profile.size_bytes
    hops = 2 * (cell.hosts - 1) / 2  # latency of a ring, in those of a ring of two
    link = AllReduceScenario(
        machine.latency_s * hops, per_byte, machine.slice_cost_s, lanes=machine.lanes
    )
    if " x " not in note:
        bucket = int(float(note.removesuffix(" MiB")) * _MIB)
        # The benchmark names the bucket size, so the first bucket is as large as the others.
        work, schedule = ddp(_workload(profile, machine, True), bucket, bucket)
    else:
        found = _PREDICTED.match(note)
        assert found is not None
        size, count, policy = found.groups()
        slice_bytes = int(size) * 1024
        work = _workload(profile, machine, False)
        credit_bytes = int(count) * slice_bytes
        schedule = TransferSchedule(
            slice_bytes,
            credit_bytes,
            policy or "priority",
            control_latency_s=machine.control_latency_s,
            # As hvd_order.base.link.slice_settings.reservation_lead_s.
            reservation_lead_s=0.75 * credit_bytes * per_byte if policy != "arrival" else 0.0,
        )
    ranks = [1.0] * (cell.hosts - 1) + [cell.late]
    return simulate(work, link, schedule, ranks=ranks, steps=12).steady_s


def _fluid_s(cell: Cell) -> float:
    """The optimum of the cell, from the profile alone."""
    profile = PROFILES[cell.model]().scaled_to(cell.local_s)
    return chain_optimum_s(
        [layer.forward_s for layer in profile.layers],
        [layer.backward_s for layer in profile.layers],
        [cell.wire_s * layer.size_bytes / profile.size_bytes for layer in profile.layers],
    )


def measure(options: argparse.Namespace) -> Answer:
    rows = [row for path in options.files for cell in cells_of_json(path)
            for row in _rows(cell)]  # fmt: skip
    for row in rows:
        print(f"{row['source']}, {row['model']}, {row['system']}, {row['note']}: measured "
              f"{row['measured_s']:.3f}, predicted {row['predicted_s']:.3f}")  # fmt: skip
    summary = {}
    for kind in ("ddp", "hvd_order"):
        errors = [abs(row["measured_s"] / row["predicted_s"] - 1) for row in rows
                  if row["kind"] == kind]  # fmt: skip
        if errors:
            summary[kind] = {"median": statistics.median(errors), "worst": max(errors)}
            print(f"{kind}: off by {100 * statistics.median(errors):.1f} % in the median, "
                  f"{100 * max(errors):.1f} % at worst, {len(errors)} cells")  # fmt: skip
    settings = {"files": [path.name for path in options.files]}
    return Answer({"rows": rows}, {"errors": summary}, settings, name="simulate-predict")


def _rows(cell: Cell) -> Iterator[dict[str, Any]]:
    """Measured and predicted step of each system of a cell."""
    for system, note, measured_s in cell.measured:
        yield {
            "source": cell.source, "model": cell.model, "hosts": cell.hosts, "ratio": cell.ratio,
            "wire_s": cell.wire_s, "local_s": cell.local_s, "fluid_s": _fluid_s(cell),
            "system": system, "note": note, "kind": "hvd_order" if " x " in note else "ddp",
            "measured_s": measured_s, "predicted_s": predicted_s(cell, note, Machine()),
        }  # fmt: skip


if __name__ == "__main__":
    sys.exit(ask(
        "simulate", __doc__, measure,
        option("files", sorted((ROOT / "benchmarks/results").glob("side_by_side*.json")),
               "result files of `hvd-order bench` (default: those of benchmarks/results)",
               type=Path, nargs="*"),
        quick={},
    ))  # fmt: skip
