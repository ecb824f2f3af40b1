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

from benchmarks.runner.question import Answer, ask, option
from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.orders.search import pull_step_s, search
from hvd_order.planning.orders.tac import tac
from hvd_order.planning.orders.tic import tic

_LINK = LinkModel(1e-3, 1e-4, 1e-9)


_ORDERS = (("tic", tic), ("tac", tac), ("search", search))


def measure(options: argparse.Namespace) -> Answer:
    seconds: dict[str, list[float]] = {"tic": [], "tac": [], "search": []}
    for _ in range(options.rounds):
        for name, order in _ORDERS:
            graph = graphs.resnet_152()  # a fresh one: a graph remembers what an op needs
            begin = time.process_time()
            order(graph, _LINK)
            seconds[name].append(time.process_time() - begin)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = _over_best(options.graphs)
    gains = {
        name: {"mean": statistics.mean(values), "worst": max(values)}
        for name, values in ratios.items()
    }
    for name, gain in gains.items():
        print(f"{name}: {medians[name]:.3f} s; step / shortest, mean {gain['mean']:.4f}, worst "
              f"{gain['worst']:.3f}")  # fmt: skip
    return Answer(
        {"seconds": seconds, "over_best": ratios}, {"seconds": medians, "over_best": gains}
    )


def _over_best(count: int) -> dict[str, list[float]]:
    """Steps over the shortest of all orders, on random graphs of 3 to 6 pulls."""
    pick = random.Random(1)
    link = LinkModel(0.0, 0.0, 1.0)
    ratios: dict[str, list[float]] = {"tic": [], "tac": [], "search": []}
    for number in range(count):
        transfers = 3 + number % 4
        graph = graphs.random_graph(pick, transfers, 3 * transfers)
        orders = permutations(range(transfers))
        best_s = min(pull_step_s(graph, order, link) for order in orders)
        for name, order_by in _ORDERS:
            order = pull_order(graph, order_by(graph, link), pick)
            ratios[name].append(pull_step_s(graph, order, link) / best_s)
    return ratios


if __name__ == "__main__":
    sys.exit(ask(
        "planning", __doc__, measure,
        option("--rounds", 15),
        option("--graphs", 120, "random graphs of 3 to 6 pulls"),
        quick={"rounds": 1, "graphs": 4},
    ))  # fmt: skip
