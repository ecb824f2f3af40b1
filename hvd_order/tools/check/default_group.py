"""HVD7xx: libraries that look for torch.distributed's default process group.

`hvd.init()` makes none, and these libraries then compute on each rank alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from hvd_order.tools.check.ranks import Ranks
from hvd_order.tools.check.rules import Finding, finding
from hvd_order.tools.check.script import Script, argument, text_of

__all__ = ["check_default_group"]

_MAKES_GROUP = re.compile(r"init_process_group|init_distributed|^(Accelerator|PartialState)$")
_METRIC = re.compile(r"^torchmetrics\.(?!.*functional).*\b[A-Z]\w*$")
_CONTAINER = re.compile(r"\.(MetricCollection|MetricTracker)$")
_NORM = re.compile(r"^torch\.nn\.(modules\.batchnorm\.)?SyncBatchNorm(\.convert_sync_batchnorm)?$")
_SAMPLER = re.compile(r"^torch\.utils\.data\.(distributed\.)?DistributedSampler$")
_OWN_EXCHANGE = ("dist_sync_fn", "sync_on_compute", "distributed_available_fn")
_AVERAGES = re.compile(r"^hvd\.(allreduce|allgather|grouped_all)")


def check_default_group(script: Script, program: Sequence[Script], ranks: Ranks) -> set[Finding]:
    """HVD701 to HVD703 of `script`, a file of `program`."""
    if any(_MAKES_GROUP.search(name) for one in program for name in one.called_names):
        return set()
    if not any(one.calls_of("hvd.init") for one in program):
        return set()
    found: set[Finding] = set()
    alone = ranks.calls_of_some()
    metrics = [call for call in script.calls if _is_metric(call, script) and call not in alone]
    if metrics and not any(_averages_metrics(one) for one in program) and _on_all(script, alone):
        found.add(finding(script.path, metrics[0], "HVD701"))
    for call in script.calls:
        meaning = script.called(call)
        if _NORM.match(meaning):
            found.add(finding(script.path, call, "HVD702"))
        elif _SAMPLER.match(meaning) and not _names_rank(call):
            found.add(finding(script.path, call, "HVD703"))
    return found


def _is_metric(call: ast.Call, script: Script) -> bool:
    meaning = script.called(call)
    return (
        bool(_METRIC.match(meaning))
        and not _CONTAINER.search(meaning)
        and all(argument(call, None, name) is None for name in _OWN_EXCHANGE)
    )


def _on_all(script: Script, alone: set[ast.Call]) -> bool:
    """Whether every rank computes a metric, here or in another file."""
    computed = [
        call
        for call in script.calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "compute"
    ]
    return not computed or any(call not in alone for call in computed)


def _averages_metrics(script: Script) -> bool:
    """Whether what ``compute()`` returns, or a metric's state, goes through a collective."""
    computed = script.names_from(lambda node: ".compute()" in ast.unparse(node))
    return any(
        ".compute()" in text_of(call) or script.mentions(call, computed)
        for call in script.calls
        if _AVERAGES.match(script.called(call))
    )


def _names_rank(call: ast.Call) -> bool:
    starred = any(isinstance(value, ast.Starred) for value in call.args)
    options = any(keyword.arg is None for keyword in call.keywords)
    return starred or options or (
        argument(call, 1, "num_replicas") is not None and argument(call, 2, "rank") is not None
    )  # fmt: skip
