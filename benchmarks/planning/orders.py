"""How long do TIC, TAC and the search take, and what does the search gain? See README.md."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from itertools import permutations
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from helpers.oracles import graphs
from helpers.oracles.sent import pull_order

from benchmarks.runner.records.environment import started
from benchmarks.runner.records.record import add_out_option, settings_of, write_record
from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.orders.search import pull_step_s, search
from hvd_order.planning.orders.tac import tac
from hvd_order.planning.orders.tic import tic

_LINK = LinkModel(1e-3, 1e-4, 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--graphs", type=int, default=120, help="random graphs of 3 to 6 pulls")
    add_out_option(parser)
    options = parser.parse_args()
    found = started()
    seconds: dict[str, list[float]] = {"tic": [], "tac": [], "search": []}
    for _ in range(options.rounds):
        for name, order in (("tic", tic), ("tac", tac), ("search", search)):
            graph = graphs.resnet_152()  # a fresh one: a graph remembers what an op needs
            begin = time.process_time()
            order(graph, _LINK)
            seconds[name].append(time.process_time() - begin)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = _over_best(options.graphs)
    for name, values in seconds.items():
        print(f"{name}: {medians[name]:.3f} s ({min(values):.3f}-{max(values):.3f})")
    gains = {
        name: {"mean": statistics.mean(values), "worst": max(values)}
        for name, values in ratios.items()
    }
    for name, gain in gains.items():
        print(f"{name}: step / shortest, mean {gain['mean']:.4f}, worst {gain['worst']:.3f}")
    write_record("planning", found, settings_of(options),
                 {"seconds": seconds, "over_best": ratios},
                 {"seconds": medians, "over_best": gains}, options.out)  # fmt: skip


def _over_best(graphs: int) -> dict[str, list[float]]:
    """Steps over the shortest of all orders, on random graphs of 3 to 6 pulls."""
    pick = random.Random(1)
    link = LinkModel(0.0, 0.0, 1.0)
    ratios: dict[str, list[float]] = {"tic": [], "tac": [], "search": []}
    for number in range(graphs):
        transfers = 3 + number % 4
        graph = graphs.random_graph(pick, transfers, 3 * transfers)
        orders = permutations(range(transfers))
        best_s = min(pull_step_s(graph, order, link) for order in orders)
        for name, order_by in (("tic", tic), ("tac", tac), ("search", search)):
            order = pull_order(graph, order_by(graph, link), pick)
            ratios[name].append(pull_step_s(graph, order, link) / best_s)
    return ratios


if __name__ == "__main__":
    main()
