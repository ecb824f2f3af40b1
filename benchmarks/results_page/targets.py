"""The targets of speed and accuracy: the only place that states them.

Each is a text, where its figure lies in the result files of a benchmark, and a limit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.results_page.documents import Document
from benchmarks.results_page.figure import Bound, Figure
from benchmarks.results_page.measures import (
    CellOf,
    Find,
    Found,
    Measure,
    balanced,
    failed_gpu_checks,
    largest_error,
    longest_pause,
    median,
    named_right,
    newest,
    over_better_plain,
    over_bounds,
    ratio,
    share_of_bound,
    spread,
    throughput_error,
    value,
)


@dataclass(frozen=True)
class Target:
    """A row of the page.

    Attributes:
        benchmark: whose result files have the figure.
        bound: None: the figure is reported, nothing is demanded.
        cause: why it is missed, where it is.
    """

    benchmark: str
    text: str
    measure: Measure
    bound: Bound | None = None
    cause: str = ""

    def figure(self, documents: Iterable[Document]) -> Figure | None:
        """From the files of any benchmark, the newest first."""
        return self.measure([d for d in documents if d.content["benchmark"] == self.benchmark])


def _at_most(
    benchmark: str, text: str, find: Find, limit: float | None, cause: str = "", **when: Any
) -> Target:
    """The newest figure of runs with these settings."""
    found = partial(_of_runs, find, when) if when else find
    return Target(benchmark, text, newest(found), None if limit is None else Bound(limit), cause)


def _of_runs(find: Find, when: dict[str, Any], document: Document) -> Found:
    for name, wanted in when.items():
        if document.content["settings"].get(name) != wanted:
            raise LookupError(name)
    return find(document)


def _at_least(benchmark: str, text: str, find: Find, limit: float, cause: str = "") -> Target:
    return Target(benchmark, text, newest(find), Bound(limit, at_most=False), cause)


def _cell(text: str, find: Find, limit: float | None, cause: str = "") -> Target:
    return _at_most("side_by_side", text, find, limit, cause)


def _over_optimum(cell: CellOf) -> Find:
    return median("systems/hvd_order/seconds", cell, per="optimum_s")


def _over(cell: CellOf, system: str, other: str) -> Find:
    return ratio(f"systems/{system}/seconds", f"systems/{other}/seconds", cell)


_OVER, _OF_DDP = "hvd_order, step / optimum: ", "hvd_order / tuned DDP: "
_CORES = "Processor time: ranks and their network share two cores (HISTORY.md, *DenseNet-121*)"
_ACKS = (
    "acknowledgments wait behind data in one queue "
    "(benchmarks/planning/prediction/README.md); with a queue of their own it is met"
)
_UNCLIPPED = (
    ("resnet50, 2 hosts, 1 Gbit/s", CellOf("resnet50"), 1.03, ""),
    ("densenet121, 2 hosts, 1 Gbit/s", CellOf("densenet121"), 1.04, _CORES),
    ("vgg16, 2 hosts, 1 Gbit/s", CellOf("vgg16"), 1.03, ""),
    ("gpt2_small, 2 hosts, 1 Gbit/s", CellOf("gpt2_small"), 1.03, ""),
    ("bert_large, 2 hosts, 1 Gbit/s", CellOf("bert_large"), 1.03, ""),
    ("dlrm, 2 hosts, 1 Gbit/s", CellOf("dlrm"), 1.03, ""),
    ("resnet50, 4 hosts, 1 Gbit/s", CellOf("resnet50", hosts=4), 1.06, ""),
    ("resnet50, 8 hosts, 200 Mbit/s", CellOf("resnet50", 8, 200.0), 1.10, ""),
    ("resnet50, ratio 0.5", CellOf("resnet50", ratio=0.5), 1.04, ""),
    ("resnet50, ratio 2", CellOf("resnet50", ratio=2.0), 1.04, ""),
    ("layers that only C++ reads", CellOf("resnet50_by_kernels"), 1.05, ""),
)
_CLIPPED = (("resnet50", 2, 1.05, ""), ("gpt2_small", 2, 1.05, ""), ("bert_large", 2, 1.05, ""),
            ("densenet121", 2, 1.08, _CORES), ("resnet50", 4, 1.05, ""),
            ("gpt2_small", 4, 1.05, ""), ("densenet121", 4, 1.08, _CORES))  # fmt: skip
_AGAINST_DDP = (
    ("resnet50, 2 hosts, 1 Gbit/s", CellOf("resnet50"), 1.02),
    ("densenet121, 2 hosts, 1 Gbit/s", CellOf("densenet121"), 1.02),
    ("resnet50, 100 Mbit/s", CellOf("resnet50", 2, 100.0), 1.02),
    ("densenet121, 2 Gbit/s", CellOf("densenet121", 2, 2000.0), 1.02),
    ("resnet50, ratio 0.25", CellOf("resnet50", ratio=0.25), 1.02),
    ("resnet50, ratio 4", CellOf("resnet50", ratio=4.0), 1.02),
    ("parallel (control)", CellOf("parallel"), 1.02),
    ("small_cnn, which computes on the network's cores", CellOf("small_cnn", ratio=None), None),
    ("demo_gpt, which computes on the network's cores", CellOf("demo_gpt", ratio=None), None),
)
_TENSORFLOW = CellOf("resnet50", framework="tensorflow")
# What another program found with the volume of a ring (benchmarks/planning/prediction).
_OF_A_RING = {"imagenet": 0.081, "cifar10": 0.099, "deepspeech2": 0.153, "yolov3": 0.36,
              "bert": 0.46, "ncf": 0.61}  # fmt: skip


# ---- what some of them make of a part of the data ----


def _share(system: str, ddp: str, quantity: str, systems: Any) -> float:
    ours, theirs = (systems[name][quantity] for name in (system, ddp))
    return statistics.median(ours) / statistics.median(theirs)


def _with_interval(found: Any) -> Found:
    return found["median"], found["low"], found["high"]


def _added_by_leader(steps: Any) -> float:
    return max(each["added_s"] / each["step_s"] for each in steps
               if each["ranks"] == 1024 and each["agreement"] == "leader")  # fmt: skip


def _slowest(shares: Any) -> float:
    return min(min(each) for each in shares.values())


def _step_error(kind: str, reduce: Callable[[Sequence[float]], float], rows: Any) -> float:
    errors = [abs(each["measured_s"] / each["predicted_s"] - 1)
              for each in rows if each.get("kind") == kind]  # fmt: skip
    if not errors:
        raise LookupError(kind)
    return reduce(errors)


def _over_oasis(worth: Any) -> Found:
    pairs = zip(worth["pd-ors"], worth["oasis"], strict=True)
    return spread([ours / theirs for ours, theirs in pairs], statistics.median)


def _sooner(systems: Any) -> float:
    return float(systems["auto"]["seconds"] / systems["ddp"]["seconds"])


def _mean(values: Any) -> Found:
    return spread(values, statistics.fmean)


# Communication of float32 takes four times as long as computation.
_SLOW, _SLOW_TWO = (CellOf("resnet50", 2, 400.0, 0.25, ranks_per_host=each) for each in (1, 2))
_OWN = (
    "the two halves of a backward pass's last gradients wait for two slices in flight; smaller "
    "slices cost as much in messages (docs/guides/fewer-bytes.md)"
)
_FEWER = (
    ("auto / DDP: resnet50, ratio 0.25, 400 Mbit/s", _over(_SLOW, "auto", "ddp"), 0.30, ""),
    ("auto / DDP with PyTorch's bf16 hook: the same", _over(_SLOW, "auto", "ddp_bf16"), 0.60, ""),
    ("int8 / DDP: the same, two ranks a host", _over(_SLOW_TWO, "int8", "ddp"), 0.30, ""),
    (
        "int8, step / optimum with its bytes: resnet50, ratio 0.25, 400 Mbit/s",
        median("systems/int8/seconds", _SLOW, per="own_optimum_s/int8"),
        1.05,
        _OWN,
    ),
    (
        "auto / hvd_order without codes: resnet50, ratio 1",
        _over(CellOf("resnet50"), "auto", "hvd_order"),
        1.01,
        "",
    ),
)


# ---- the targets ----

_SIDE_BY_SIDE = [
    *(_cell(_OVER + text, _over_optimum(cell), limit, why)
      for text, cell, limit, why in _UNCLIPPED),
    *(
        _cell(f"{_OVER}{model}, {hosts} hosts, clipped",
              _over_optimum(CellOf(model, hosts, clipped=True)), limit, cause)
        for model, hosts, limit, cause in _CLIPPED
    ),
    *(
        _cell(f"{_OF_DDP}{model}, {hosts} hosts, clipped; over the ratio of the bounds",
              over_bounds("systems/hvd_order/seconds", "systems/ddp_tuned/seconds",
                          CellOf(model, hosts, clipped=True)), 1.03, cause)
        for model, hosts, _, cause in _CLIPPED
    ),
    *(_cell(_OF_DDP + text, _over(cell, "hvd_order", "ddp_tuned"), limit)
      for text, cell, limit in _AGAINST_DDP),
    *(_cell(f"plan / default of hvd_order: {model}",
            _over(CellOf(model), "hvd_order_planned", "hvd_order"), 1.0)
      for model in ("resnet50", "densenet121")),
    _cell(f"TensorFlow, {_OVER}resnet50", _over_optimum(_TENSORFLOW), 1.10),
    _cell("TensorFlow, hvd_order / Horovod: resnet50", _over(_TENSORFLOW, "hvd_order", "horovod"),
          0.8),
    _cell("Horovod / hvd_order over Horovod's engine: resnet50",
          _over(CellOf("resnet50"), "hvd_order_on_horovod", "horovod"), 1 / 1.2),
    *(_cell(text, find, limit, cause) for text, find, limit, cause in _FEWER),
    *(_cell(f"step / step before: {model}", _over(CellOf(model), "hvd_order", "before"), 1.01)
      for model in ("resnet50", "densenet121")),
]  # fmt: skip

_TORCH = [
    _at_least("slow_ranks", "slow ranks and links named right within 40 steps, share",
              value("runs", named_right), 1.0),
    *(
        _at_most("one_host", f"hvd_order / DDP, {ranks} ranks of one machine: {model}",
                 ratio(f"rows/ranks={ranks}/systems/hvd_order/seconds",
                       f"rows/ranks={ranks}/systems/ddp/seconds", by_turn=True), 1.01,
                 model=model)
        for model, ranks in (("linear8", 2), ("linear8", 4), ("linear8", 8), ("linear8", 16),
                             ("demo_gpt", 2), ("small_cnn", 2))
    ),
    *(
        _at_most("sharded",
                 f"{system} / DDP with the same weights, AdamW, clipped, 4 hosts: {text}", find,
                 limit)
        for system, ddp in (("sharded", "ddp"), ("sharded, bfloat16", "ddp, bfloat16"))
        for text, find, limit in (
            ("step", ratio(f"systems/{system}/seconds", f"systems/{ddp}/seconds"), 1.0),
            ("bytes sent", value("systems", partial(_share, system, ddp, "sent_bytes")), None),
            ("state on a rank", value("systems", partial(_share, system, ddp, "state_bytes")),
             0.27),
        )
    ),
    _at_most("sharded", "hvd_order with GradScaler / DDP, AdamW, clipped, 4 hosts: step",
             ratio("systems/hvd_order, scaled/seconds", "systems/ddp/seconds"), 1.0),
    _at_most("overhead", "one rank: step / plain optimizer",
             ratio("seconds/hvd_order", "seconds/plain"), 1.01),
    _at_most("time_to_loss", "auto / DDP: time to a loss, ratio of communication 4",
             value("summary/systems", _sooner), 1 / 3),
    _at_most("nodes", "resnet50, two ranks on one H100 / fastest other system",
             value("summary/rows/model=resnet50/against/ratio", _with_interval), 1.0),
]  # fmt: skip


_ENGINE = [
    *(
        _at_least("throughput", f"leader / plain all-reduce, slices of {size:g} MiB",
                  value(f"results/slice_mib={size}/seconds", over_better_plain), 0.95)
        for size in (0.5, 1.0, 2.0, 4.0, 8.0)
    ),
    *(
        _at_least("scheduler_events", f"million events a second, {policy}, {slices:,} slices",
                  median(f"rows/policy={policy},slices={slices}/rates"), 1.0)
        for policy in ("priority", "planned") for slices in (100, 10_000, 100_000)
    ),
    _at_most("scale", "leader agreement / step, 1,024 simulated ranks, the worst case",
             value("steps", _added_by_leader), 0.01),
    *(
        _at_most("device_wait", f"test device, {text}: step / optimum",
                 ratio(f"seconds/{wait}", "optimum_s"), limit)
        for wait, text, limit in (
            ("enqueued", "the host waits until sums are enqueued (L1)", 1.03),
            ("arrived", "the host waits until sums have arrived (L0)", None),
            ("planned", "planned order, issued ahead (P)", None),
            ("as installed", "L1 with the settings that trials choose", 1.03),
        )
    ),
    _at_least("hosts", "slowest link / what TCP can carry, 1 Gbit/s",
              value("summary/share_of_bound", _slowest), 0.99),
    *(
        _at_most("before_after", f"cost / cost before: {benchmark}",
                 ratio(f"costs/{benchmark}/now", f"costs/{benchmark}/before"), 1.01)
        for benchmark in ("overhead", "per_parameter", "throughput", "scheduler_events")
    ),
    Target("gpu", "missed limits and failed checks on a GPU", failed_gpu_checks, Bound(0.0),
           "See benchmarks/engine/gpu/README.md, *Seen on an H100*"),
]  # fmt: skip


_PLANNING = [
    _at_most("simulate", "1,000 steps of BERT-large, leader, s",
             median("seconds/leader, 8 equal ranks (the target's case)"), 1.0),
    *(
        _at_most("simulate", f"predicted step of {kind}: {text}",
                 value("rows", partial(_step_error, kind, summary)), limit)
        for kind in ("ddp", "hvd_order")
        for text, summary, limit in (("median error", statistics.median, 0.05),
                                     ("largest error", max, 0.10))
    ),
    *(
        Target("prediction", f"predicted throughput{of}{', ' * bool(queues)}{queues}: {text} error",
               throughput_error(share, cells, queues), Bound(limit),
               _ACKS if cells == "strategy_cells" else "")
        for of, cells, queues in (
            ("", "cells", ""),
            (", sync", "cells", "queues of 50 ms"),
            (" of TensorFlow's servers", "strategy_cells", ""),
            (" of TensorFlow's servers", "strategy_cells", "ACKs first"),
        )
        for text, share, limit in (("median", 0.5, 0.05), ("90 %", 0.9, 0.10), ("worst", 1.0, 0.15))
    ),
    *(
        _at_most("prediction",
                 f"step of Pollux' {application}, fitted to 1-2 nodes, on 6 to 16: median error",
                 value(f"published/{application}/1-2 -> 6-16/shared link", statistics.median),
                 limit)
        for application, limit in _OF_A_RING.items()
    ),
    _at_most("prediction", "64 workers, 4 servers, 1,000 steps each, s",
             median("seconds/64 workers, 1000 steps each"), 10.0),
    *(_at_most("planning", f"{name} on ResNet-152's graph, s", median(f"seconds/{key}"), limit)
      for name, key, limit in (("TIC", "tic", 0.1), ("TAC", "tac", 1.0),
                               ("search", "search", 1.0))),
    *(_at_most("planning", f"search / shortest of all orders, random graphs, {text}",
               value("over_best/search", summary), limit)
      for text, summary, limit in (("mean", statistics.mean, 1.002), ("worst", max, 1.02))),
]  # fmt: skip

_SERVERS = [
    _at_most("parameter_server", "in order / as pushes come, resnet50",
             ratio("ordered/seconds/in order", "ordered/seconds/as it comes"), 0.8),
    _at_most("parameter_server", "step in order / busiest line's transfers, resnet50",
             median("ordered/seconds/in order", per="ordered/wire_s",), 1.10),
    _at_least("parameter_server", "raw push and pull / full-duplex bound",
              value("raw", share_of_bound), 0.9),
    _at_least("parameter_server", "one of four lines at a quarter: even split / balanced",
              value("straggler/densenet121, slow line", balanced), 2.9),
    _at_most("parameter_server", "longest pause when a server comes, goes or dies, s",
             value("elastic", longest_pause), 2.0),
]  # fmt: skip


_CLUSTER = [
    _at_most("cluster", "simulated / real mean completion time, six jobs, worst error",
             value("runs", largest_error), 0.05, scale=1.0),
    _at_least("cluster", "jobs a second, first in, first out",
              value("fifo, 100000 jobs/seconds", lambda seconds: 100_000 / seconds), 2000),
    _at_most("cluster", "PD-ORS, 100 machines, 20 slots: s a job",
             value("pd-ors, rounding, 100 machines/seconds_a_job"), 0.5),
    _at_most("cluster", "PD-ORS / offline optimum, 1,000 small instances, mean",
             value("worth over the optimum", statistics.fmean), None),
    *(
        _at_most("cluster", f"utility of PD-ORS / OASiS: {cell}",
                 value(f"utility/{cell}", _over_oasis), None)
        for cell in ("50 machines, 50 jobs", "50 machines, 50 jobs, links within x1")
    ),
    *(
        _at_most("cluster", f"Pollux' workload 6, mean completion, s: {policy}",
                 value(f"{policy}/completion_mean_s", _mean), None)
        for policy in ("fifo", "optimus", "tiresias", "ones")
    ),
    *(_at_most("install", f"into an empty container: {step}, s", median(f"seconds/{step}"), None)
      for step in ("wheel", "doctor", "two ranks")),
]  # fmt: skip


TARGETS = [*_SIDE_BY_SIDE, *_TORCH, *_ENGINE, *_PLANNING, *_SERVERS, *_CLUSTER]
