"""How long do TIC and TAC take on a large graph? See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.environment import describe, environment
from common.record import add_out_option, settings_of, write_record

from hvd_order.plan.graph import synthetic
from hvd_order.plan.link.link_model import LinkModel
from hvd_order.plan.orders.tac import tac
from hvd_order.plan.orders.tic import tic

_LINK = LinkModel(1e-3, 1e-4, 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    add_out_option(parser)
    options = parser.parse_args()
    found = environment()
    print(describe(found) + "\n")
    seconds: dict[str, list[float]] = {"tic": [], "tac": []}
    for _ in range(options.rounds):
        for name, order in (("tic", tic), ("tac", tac)):
            graph = synthetic.resnet_152()  # a fresh one: a graph remembers what an op needs
            begin = time.process_time()
            order(graph, _LINK)
            seconds[name].append(time.process_time() - begin)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name}: {medians[name]:.3f} s ({min(values):.3f}-{max(values):.3f})")
    write_record("planning", found, settings_of(options), {"seconds": seconds},
                 {"seconds": medians}, options.out)  # fmt: skip


if __name__ == "__main__":
    main()
