"""Horovod's names and signatures, as its 0.28.1 has them."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import hvd_order.torch as hvd
from hvd_order.compat.horovod.common import util

_SET = "process_set=global_process_set"
_SCALES = "prescale_factor=1.0, postscale_factor=1.0"
_REDUCE = f"tensor, average=None, name=None, op=None, {_SCALES}, {_SET}"
_COMPRESSED = _REDUCE.replace("name=None, ", "name=None, compression=Compression.none, ")
_SCATTER = f"tensor, name=None, compression=Compression.none, op=Average, {_SET}, {_SCALES}"
_SCATTER_ASYNC = _SCATTER.replace("compression=Compression.none, ", "")
_BROADCAST = f"tensor, root_rank, name=None, {_SET}"
SIGNATURES = {
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=Compression.none, "
        "backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, "
        f"num_groups=0, groups=None, sparse_as_dense=False, {_SET}"
    ),
    "add_process_set": "process_set",
    "allgather": f"tensor, name=None, {_SET}",
    "allgather_object": "obj, name=None",
    "allreduce": _COMPRESSED,
    "allreduce_": _REDUCE,
    "allreduce_async": _REDUCE,
    "allreduce_async_": _REDUCE,
    "alltoall": f"tensor, splits=None, name=None, {_SET}",
    "alltoall_async": f"tensor, splits=None, name=None, {_SET}",
    "allgather_async": f"tensor, name=None, {_SET}",
    "barrier": _SET,
    "broadcast": _BROADCAST,
    "broadcast_": _BROADCAST,
    "broadcast_async": _BROADCAST,
    "broadcast_async_": _BROADCAST,
    "broadcast_object": f"obj, root_rank=0, name=None, {_SET}",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_parameters": "params, root_rank",
    "grouped_allgather": f"tensors, name=None, {_SET}",
    "grouped_allgather_async": f"tensors, name=None, {_SET}",
    "grouped_allreduce": _COMPRESSED.replace("tensor", "tensors"),
    "grouped_allreduce_": _REDUCE.replace("tensor", "tensors"),
    "grouped_allreduce_async": _REDUCE.replace("tensor", "tensors"),
    "grouped_allreduce_async_": _REDUCE.replace("tensor", "tensors"),
    "grouped_reducescatter": _SCATTER.replace("tensor", "tensors"),
    "grouped_reducescatter_async": _SCATTER_ASYNC.replace("tensor", "tensors"),
    "join": "device=-1",
    "poll": "handle",
    "reducescatter": _SCATTER,
    "reducescatter_async": _SCATTER_ASYNC,
    "remove_process_set": "process_set",
    "sparse_allreduce_async": f"tensor, name, op, {_SET}",
    "synchronize": "handle",
}
"""Of every function of horovod.torch that has arguments."""
OTHER_NAMES = {
    "Adasum", "Average", "Compression", "HorovodInternalError", "Max", "Min", "ProcessSet",
    "Product", "SyncBatchNorm", "Sum", "ccl_built", "cross_rank", "cross_size", "cuda_built",
    "ddl_built", "elastic", "global_process_set", "gloo_built", "gloo_enabled", "init",
    "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "rocm_built", "shutdown", "size",
    "start_timeline", "stop_timeline",
}  # fmt: skip
ROOT = Path(__file__).parents[3]


def arguments(signature: inspect.Signature) -> list[tuple[str, object]]:
    return [(p.name, p.default) for p in signature.parameters.values()]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_horovods(name: str) -> None:
    theirs = arguments(inspect.signature(eval(f"lambda {SIGNATURES[name]}: 0", vars(hvd))))
    ours = arguments(inspect.signature(getattr(hvd, name)))
    assert ours[: len(theirs)] == theirs
    assert all(default is not inspect.Parameter.empty for _, default in ours[len(theirs) :])


def test_no_name_is_missing() -> None:
    missing = {name for name in {*SIGNATURES, *OTHER_NAMES} if not hasattr(hvd, name)}
    assert missing == set()


def test_the_table_in_the_documents_is_complete() -> None:
    names, _, _ = (ROOT / "docs/horovod.md").read_text().partition("\n## ")
    table = re.findall(r"^\| (`.*?) \| (.*?) \|", names, re.M)
    state = {name: word for cell, word in table for name in re.findall(r"`(\w+)`", cell)}
    stems = {
        name for name in {*SIGNATURES, *OTHER_NAMES} if not name.endswith(("_built", "_enabled"))
    }
    assert stems <= set(state)
    assert {state[name] for name in stems} <= {"same", "better"}


@pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make horovod"
)
def test_the_record_is_right() -> None:
    spec = importlib.util.find_spec("horovod")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    found = {}
    for name in ("torch/mpi_ops.py", "torch/functions.py", "torch/optimizer.py",
                 "common/process_sets.py"):  # fmt: skip
        for node in ast.parse((package / name).read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name in SIGNATURES:
                for argument in node.args.args:
                    argument.annotation = None
                found[node.name] = ast.unparse(node.args)
    assert found == SIGNATURES


def test_lists_are_split_and_ranks_counted_as_in_horovod() -> None:
    assert util.split_list(list("abcdefgh"), 3) == [list("abc"), list("def"), list("gh")]
    assert util.split_list([1, 2], 3) == [[1], [2], []]
    assert [n for n in range(-1, 10) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
