"""The targets of speed and accuracy: the only place that states them."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.results_page.cluster_measures import (
    completion,
    fidelity,
    fifo_jobs_per_s,
    of_optimum,
    over_oasis,
    seconds_a_job,
)
from benchmarks.results_page.figure import Bound
from benchmarks.results_page.measures import (
    CellOf,
    Measure,
    agreement_ratio,
    agreement_share,
    balance_gain,
    cost_ratio,
    device_wait,
    events_per_s,
    failed_gpu_checks,
    language_loop,
    link_share,
    longest_pause,
    node_ratio,
    one_host,
    ordered_over_wire,
    ordered_servers,
    over_optimum,
    overhead,
    prediction_error,
    published_error,
    ratio_over_bounds,
    raw_share,
    restart,
    search_over_best,
    seconds_of,
    step_ratio,
    throughput,
    throughput_error,
    wrong_trials,
)


@dataclass(frozen=True)
class Target:
    """A row of the page.

    Attributes:
        bound: None: the figure is reported, nothing is demanded.
        last_run: date of the last figure in HISTORY.md; empty: never run.
    """

    benchmark: str
    text: str
    measure: Measure
    bound: Bound | None
    last_run: str = "2026-11-22"


_RESNET, _DENSENET = CellOf("resnet50"), CellOf("densenet121")
_OVER = "hvd_order, step / optimum: "
_OF_DDP = "hvd_order / tuned DDP: "
_CLIPPED = (("resnet50", 2, 1.05), ("gpt2_small", 2, 1.05), ("bert_large", 2, 1.05),
            ("densenet121", 2, 1.08), ("resnet50", 4, 1.05), ("gpt2_small", 4, 1.05),
            ("densenet121", 4, 1.08))  # fmt: skip

# What another program found with the volume of a ring (benchmarks/planning/prediction).
_OF_A_RING = {"imagenet": 0.081, "cifar10": 0.099, "deepspeech2": 0.153, "yolov3": 0.36,
              "bert": 0.46, "ncf": 0.61}  # fmt: skip


def _side_by_side(text: str, measure: Measure, limit: float | None, run: str) -> Target:
    return Target("side_by_side", text, measure, None if limit is None else Bound(limit), run)


TARGETS = [
    *(
        _side_by_side(f"{_OVER}{model}, 2 hosts, 1 Gbit/s", over_optimum(CellOf(model)), limit,
                      "2026-11-22")
        for model, limit in (("resnet50", 1.03), ("densenet121", 1.04), ("vgg16", 1.03),
                             ("gpt2_small", 1.03), ("bert_large", 1.03), ("dlrm", 1.03))
    ),
    _side_by_side(f"{_OVER}resnet50, 4 hosts, 1 Gbit/s",
                  over_optimum(CellOf("resnet50", hosts=4)), 1.06, "2026-11-22"),
    _side_by_side(f"{_OVER}resnet50, 8 hosts, 200 Mbit/s",
                  over_optimum(CellOf("resnet50", 8, 200.0)), 1.10, "2026-11-22"),
    _side_by_side(f"{_OVER}resnet50, ratio 0.5",
                  over_optimum(CellOf("resnet50", ratio=0.5)), 1.04, "2026-11-22"),
    _side_by_side(f"{_OVER}resnet50, ratio 2",
                  over_optimum(CellOf("resnet50", ratio=2.0)), 1.04, "2026-11-22"),
    _side_by_side(f"{_OVER}layers that only C++ reads",
                  over_optimum(CellOf("resnet50_by_kernels")), 1.05, "2026-11-23"),
    *(
        _side_by_side(f"{_OVER}{model}, {hosts} hosts, clipped",
                      over_optimum(CellOf(model, hosts, clipped=True)), limit, "")
        for model, hosts, limit in _CLIPPED
    ),
    *(
        _side_by_side(f"{_OF_DDP}{model}, {hosts} hosts, clipped; over the ratio of the bounds",
                      ratio_over_bounds(CellOf(model, hosts, clipped=True), "hvd_order",
                                        "ddp_tuned"), 1.03, "")
        for model, hosts, _ in _CLIPPED
    ),
    *(
        _side_by_side(f"{_OF_DDP}{text}", step_ratio(cell, "hvd_order", "ddp_tuned"), 1.02,
                      "2026-11-22")
        for text, cell in (
            ("resnet50, 2 hosts, 1 Gbit/s", _RESNET),
            ("densenet121, 2 hosts, 1 Gbit/s", _DENSENET),
            ("resnet50, 100 Mbit/s", CellOf("resnet50", 2, 100.0)),
            ("densenet121, 2 Gbit/s", CellOf("densenet121", 2, 2000.0)),
            ("resnet50, ratio 0.25", CellOf("resnet50", ratio=0.25)),
            ("resnet50, ratio 4", CellOf("resnet50", ratio=4.0)),
            ("parallel (control)", CellOf("parallel")),
        )
    ),
    _side_by_side("plan / default of hvd_order: resnet50",
                  step_ratio(_RESNET, "hvd_order_planned", "hvd_order"), 1.0, "2026-11-22"),
    _side_by_side("plan / default of hvd_order: densenet121",
                  step_ratio(_DENSENET, "hvd_order_planned", "hvd_order"), 1.0, "2026-11-22"),
    *(
        _side_by_side(f"{_OF_DDP}{model}, which computes on the network's cores",
                      step_ratio(CellOf(model, ratio=None), "hvd_order", "ddp_tuned"), None,
                      "2026-11-22")
        for model in ("small_cnn", "demo_gpt")
    ),
    _side_by_side(f"TensorFlow, {_OVER}resnet50",
                  over_optimum(CellOf("resnet50", framework="tensorflow")), 1.10, "2026-11-22"),
    _side_by_side("TensorFlow, hvd_order / Horovod: resnet50",
                  step_ratio(CellOf("resnet50", framework="tensorflow"), "hvd_order", "horovod"),
                  0.8, "2026-11-22"),
    _side_by_side("Horovod / hvd_order over Horovod's engine: resnet50",
                  step_ratio(_RESNET, "hvd_order_on_horovod", "horovod"), 1 / 1.2, "2026-11-21"),
    *(
        Target("one_host", f"hvd_order / DDP, {ranks} ranks of one machine: {model}",
               one_host(ranks, model), Bound(1.01), "")
        for model, ranks in (("linear8", 2), ("linear8", 4), ("linear8", 8), ("linear8", 16),
                             ("demo_gpt", 2), ("small_cnn", 2))
    ),
    *(
        Target("sharded", f"{system} / DDP with the same weights, AdamW, clipped, 4 hosts: {text}",
               language_loop(system, quantity), bound, "")
        for system in ("sharded", "sharded, bfloat16")
        for quantity, text, bound in (
            ("seconds", "step", Bound(1.0)),
            ("sent_bytes", "bytes sent", None),
            ("state_bytes", "state on a rank", Bound(0.27)),
        )
    ),
    Target("sharded", "hvd_order with GradScaler / DDP, AdamW, clipped, 4 hosts: step",
           language_loop("hvd_order, scaled", "seconds"), Bound(1.0), ""),
    Target("overhead", "one rank: step / plain optimizer", overhead, Bound(1.01), "2026-11-21"),
    *(
        Target("throughput", f"leader / plain all-reduce, slices of {size:g} MiB",
               throughput(size), Bound(0.95, at_most=False), "2026-11-21")
        for size in (0.5, 1.0, 2.0, 4.0, 8.0)
    ),
    *(
        Target("scheduler_events", f"million events a second, {policy}, {slices:,} slices",
               events_per_s(policy, slices), Bound(1.0, at_most=False), "2026-11-21")
        for policy in ("priority", "planned") for slices in (100, 10_000, 100_000)
    ),
    Target("agreement", "leader / DDP's order, 2 ranks on loopback", agreement_ratio(2), None,
           "2026-11-21"),
    Target("scale", "leader agreement / step, 1,024 simulated ranks, the worst case",
           agreement_share, Bound(0.01), ""),
    *(
        Target("device_wait", f"test device, {text}: step / optimum", device_wait(wait), bound, "")
        for wait, text, bound in (
            ("enqueued", "the host waits until sums are enqueued (L1)", Bound(1.03)),
            ("arrived", "the host waits until sums have arrived (L0)", None),
            ("planned", "planned order, issued ahead (P)", None),
            ("as installed", "L1 with the settings that trials choose", Bound(1.03)),
        )
    ),
    Target("hosts", "slowest link / what TCP can carry, 1 Gbit/s", link_share,
           Bound(0.99, at_most=False), "2026-11-21"),
    Target("simulate", "1,000 steps of BERT-large, leader, s",
           seconds_of("simulate", "leader, 8 equal ranks (the target's case)"), Bound(1.0)),
    *(
        Target("simulate", f"predicted step of {kind}: {text}", prediction_error(kind, worst),
               Bound(limit))
        for kind in ("ddp", "hvd_order")
        for text, worst, limit in (("median error", False, 0.05), ("largest error", True, 0.10))
    ),
    *(
        Target("prediction", f"predicted throughput{of}{', ' * bool(queues)}{queues}: {text} error",
               throughput_error(share, cells, queues), Bound(limit), "")
        for of, cells, queues in (
            ("", "cells", ""),
            (", sync", "cells", "queues of 50 ms"),
            (" of TensorFlow's servers", "strategy_cells", ""),
            (" of TensorFlow's servers", "strategy_cells", "ACKs first"),
        )
        for text, share, limit in (("median", 0.5, 0.05), ("90 %", 0.9, 0.10), ("worst", 1.0, 0.15))
    ),
    *(
        Target("prediction",
               f"step of Pollux' {application}, fitted to 1-2 nodes, on 6 to 16: median error",
               published_error(application, "1-2 -> 6-16", "shared link"), Bound(limit), "")
        for application, limit in _OF_A_RING.items()
    ),
    Target("prediction", "64 workers, 4 servers, 1,000 steps each, s",
           seconds_of("prediction", "64 workers, 1000 steps each"), Bound(10.0), ""),
    Target("planning", "TIC on ResNet-152's graph, s", seconds_of("planning", "tic"), Bound(0.1)),
    Target("planning", "TAC on ResNet-152's graph, s", seconds_of("planning", "tac"), Bound(1.0)),
    Target("planning", "search on ResNet-152's graph, s", seconds_of("planning", "search"),
           Bound(1.0), ""),
    Target("planning", "search / shortest of all orders, random graphs, mean",
           search_over_best("mean"), Bound(1.002), ""),
    Target("planning", "search / shortest of all orders, random graphs, worst",
           search_over_best("worst"), Bound(1.02), ""),
    Target("parameter_server", "in order / as pushes come, resnet50", ordered_servers,
           Bound(0.8)),
    Target("parameter_server", "step in order / busiest line's transfers, resnet50",
           ordered_over_wire, Bound(1.10), ""),
    Target("parameter_server", "raw push and pull / full-duplex bound", raw_share,
           Bound(0.9, at_most=False)),
    Target("parameter_server", "one of four lines at a quarter: even split / balanced",
           balance_gain, Bound(2.9, at_most=False)),
    Target("parameter_server", "longest pause when a server comes, goes or dies, s",
           longest_pause, Bound(2.0)),
    *(
        Target("install", f"into an empty container: {step}, s", seconds_of("install", step), None,
               "")
        for step in ("wheel", "doctor", "two ranks")
    ),
    Target("elastic", "a worker is killed: s to the next step", restart, None, "2026-11-21"),
    Target("elastic", "trials with lost or doubled steps", wrong_trials, Bound(0.0),
           "2026-11-21"),
    *(
        Target("before_after", f"step / step before: {model}",
               step_ratio(CellOf(model), "hvd_order", "before"), Bound(1.01), "")
        for model in ("resnet50", "densenet121")
    ),
    *(
        Target("before_after", f"cost / cost before: {benchmark}", cost_ratio(benchmark),
               Bound(1.01), "")
        for benchmark in ("overhead", "per_parameter", "throughput", "scheduler_events")
    ),
    Target("cluster", "simulated / real mean completion time, six jobs, worst error", fidelity,
           Bound(0.05), ""),
    Target("cluster", "jobs a second, first in, first out", fifo_jobs_per_s,
           Bound(2000, at_most=False), ""),
    Target("cluster", "PD-ORS, 100 machines, 20 slots: s a job", seconds_a_job("rounding", 100),
           Bound(0.5), ""),
    Target("cluster", "PD-ORS / offline optimum, 1,000 small instances, mean", of_optimum, None,
           ""),
    *(
        Target("cluster", f"utility of PD-ORS / OASiS: {cell}", over_oasis(cell), None, "")
        for cell in ("50 machines, 50 jobs", "50 machines, 50 jobs, links within x1")
    ),
    *(
        Target("cluster", f"Pollux' workload 6, mean completion, s: {name}", completion(name),
               None, "")
        for name in ("fifo", "optimus", "tiresias", "ones")
    ),
    Target("gpu", "failed checks", failed_gpu_checks, Bound(0.0), ""),
    Target("nodes", "resnet50, two ranks on one H100 / fastest other system",
           node_ratio("resnet50"), Bound(1.0), ""),
]  # fmt: skip
