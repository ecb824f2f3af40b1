"""What does a host that is always late cost, under each order agreement? See README.md."""

from __future__ import annotations

import argparse

from benchmarks.planning.predicted_steps import Cell, Machine, predicted_s
from benchmarks.runner.records.environment import environment
from benchmarks.runner.records.record import (
    DEFAULT_FOLDER,
    add_out_option,
    settings_of,
    write_record,
)
from benchmarks.runner.workloads.profiles import PROFILES
from hvd_order.base.link.slice_settings import AgreementName

_PAYLOAD_BYTES_PER_S = 0.955 * 1e9 / 8  # of 1 Gbit/s, behind headers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(PROFILES),
                        default=["vgg16", "gpt2_small", "resnet50", "densenet121"])  # fmt: skip
    parser.add_argument("--late", nargs="+", type=float, default=[1.0, 1.05, 1.1, 1.3])
    parser.add_argument(
        "--slice-settings", default="2048 KiB x 2", help="slices, and how many in flight"
    )
    add_out_option(parser)
    options = parser.parse_args()
    found = environment()
    rows = []
    agreements: list[AgreementName] = ["leader", "negotiated"]
    print("2 hosts, 1 Gbit/s, ratio 1; seconds a step\n")
    print("| model | late | local step of that host | " + " | ".join(agreements) + " |")
    print("| --- " * (3 + len(agreements)) + "|")
    for model in options.models:
        wire_s = PROFILES[model]().size_bytes / _PAYLOAD_BYTES_PER_S
        for late in options.late:
            # The optimizer is in the local step: 2 % is about what is measured.
            cell = Cell("", model, 2, wire_s, 1.02 * wire_s * late, 1.0, (), late)
            steps = [
                predicted_s(cell, options.slice_settings, Machine(), True, agreement)
                for agreement in agreements
            ]
            rows.append({"model": model, "late": late, "local_s": cell.local_s,
                         "step_s": dict(zip(agreements, steps, strict=True))})  # fmt: skip
            print(f"| {model} | {late:g} | {cell.local_s:.3f} | "
                  + " | ".join(f"{step:.3f}" for step in steps) + " |")  # fmt: skip
    write_record("simulate", found, settings_of(options), {"rows": rows}, {},
                 options.out or DEFAULT_FOLDER / "simulate-late.json")  # fmt: skip


if __name__ == "__main__":
    main()
