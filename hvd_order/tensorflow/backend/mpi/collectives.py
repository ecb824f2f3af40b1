"""Single collectives of a process set over MPI, carried out one after the other.

MPI matches collectives by their order. So before each collective the members exchange its
description, and all raise if the descriptions differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_order.base.errors import ModelMismatch
from hvd_order.base.reduce_op import Adasum, Average, Max, Min, Product, Sum
from hvd_order.tensorflow.backend.interface import Collective
from hvd_order.tensorflow.backend.mpi.arrays import compact, sendable, summing
from hvd_order.tensorflow.backend.mpi.members import Members

__all__ = ["carry_out"]

_OPS = {Min: MPI.MIN, Max: MPI.MAX, Product: MPI.PROD}


def carry_out(members: Members, one: Collective, arrays: Sequence[Any]) -> list[Any]:
    """Runs a collective and returns its results as new arrays.

    Raises:
        ModelMismatch: the ranks call different collectives, or with tensors that do not fit.
        HorovodInternalError: a rank is late, or MPI failed.
        NotImplementedError: Adasum.
    """
    what = f"{one.kind} {one.name or ''}".rstrip()
    if one.op == Adasum and one.kind in ("allreduce", "reducescatter"):
        raise NotImplementedError("hvd.Adasum over MPI; install PyTorch: pip install torch")
    described = (dataclasses.replace(one, name=one.name or ""), [a.dtype.name for a in arrays])
    told = members.gather((described, [tuple(array.shape) for array in arrays]), what)
    shapes = [each[1] for each in told]
    _check(members, told, what)
    if one.kind == "barrier":
        return []
    if one.kind == "alltoall":
        return _alltoall(members, arrays[0], arrays[1] if len(arrays) > 1 else None, what)
    results = []
    for i, array in enumerate(arrays):
        lengths = [each[i][0] if each[i] else 1 for each in shapes]
        results.append(_one(members, one, array, lengths, what))
    return results


def _one(members: Members, one: Collective, array: Any, lengths: list[int], what: str) -> Any:
    if one.kind == "allreduce":
        return _reduced(members, one, array, what)
    if one.kind == "broadcast":
        result = compact(array).copy()
        root = members.ranks.index(one.root_rank)
        members.finish(members.comm.Ibcast(sendable(result), root), what)
        return result
    if one.kind == "allgather":
        mine = compact(array if array.ndim else array[None])
        result = np.zeros((sum(lengths), *mine.shape[1:]), mine.dtype)
        row = int(np.prod(mine.shape[1:], dtype=np.int64))
        _gatherv(members, mine, result, [length * row for length in lengths], what)
        return result
    assert one.kind == "reducescatter"
    if array.ndim == 0:
        raise ModelMismatch(f"{what}: a tensor without dimensions has no rows to scatter")
    total = _reduced(members, one, array, what)
    rows, more = divmod(array.shape[0], members.size)
    begin = rows * members.rank + min(members.rank, more)
    return total[begin : begin + rows + (members.rank < more)].copy()


def _reduced(members: Members, one: Collective, array: Any, what: str) -> Any:
    result = _scaled(compact(array).copy(), one.prescale_factor)
    if result.dtype == np.bool_:
        raise ModelMismatch(f"{what}: booleans cannot be reduced; cast them first")
    if one.op in (Sum, Average):
        operator = summing(result.dtype)
    else:
        operator = _OPS[one.op]
        if result.dtype.itemsize == 2 and result.dtype.kind not in "iu":
            # Exact: 16-bit floats are 32-bit ones with fewer bits.
            wide = result.astype(np.float32)
            members.finish(members.comm.Iallreduce(MPI.IN_PLACE, wide, operator), what)
            return _scaled(wide.astype(result.dtype), one.postscale_factor)
    members.finish(members.comm.Iallreduce(MPI.IN_PLACE, sendable(result), operator), what)
    factor = one.postscale_factor / (members.size if one.op == Average else 1)
    return _scaled(result, factor)


def _scaled(array: Any, factor: float) -> Any:
    return array if factor == 1.0 else np.asarray(array * factor).astype(array.dtype)


def _gatherv(members: Members, mine: Any, into: Any, counts: list[int], what: str) -> None:
    if mine.dtype == np.bool_:
        mine, into = mine.view(np.uint8), into.view(np.uint8)
    target = sendable(into)
    parts = [target[0], counts, None, target[1]] if isinstance(target, list) else [target, counts]
    members.finish(members.comm.Iallgatherv(sendable(mine), parts), what)


def _alltoall(members: Members, array: Any, splits: Any, what: str) -> list[Any]:
    """Rows received from all members, and the number of rows from each."""
    rows = array.shape[0]
    if splits is None:
        if rows % members.size:
            raise ModelMismatch(
                f"{what}: {rows} rows cannot be dealt out evenly to {members.size} ranks; give "
                "splits"
            )
        splits = np.full(members.size, rows // members.size)
    sent = [int(split) for split in splits]
    received = [each[members.rank] for each in members.gather(sent, what)]
    row = int(np.prod(array.shape[1:], dtype=np.int64)) * array.dtype.itemsize
    mine = compact(array).reshape(-1).view(np.uint8)
    result = np.zeros((sum(received), *array.shape[1:]), array.dtype)
    members.finish(
        members.comm.Ialltoallv(
            [mine, [count * row for count in sent], None, MPI.BYTE],
            [
                result.reshape(-1).view(np.uint8),
                [count * row for count in received],
                None,
                MPI.BYTE,
            ],
        ),
        what,
    )
    return [result, np.array(received, np.int32)]


def _check(members: Members, told: list[Any], what: str) -> None:
    """Raises ModelMismatch unless all members call the same collective with matching tensors."""
    first, shapes = told[0]
    for rank, (other, other_shapes) in zip(members.ranks[1:], told[1:], strict=True):
        if other != first:
            raise ModelMismatch(
                f"{what}: rank {members.ranks[0]} calls {_text(first)}, rank {rank} "
                f"{_text(other)}; over MPI all ranks have to call them in the same order"
            )
        rows_may_differ = first[0].kind in ("allgather", "alltoall")
        for mine, theirs in zip(shapes, other_shapes, strict=True):
            cut = 1 if rows_may_differ else 0
            if len(mine) != len(theirs) or mine[cut:] != theirs[cut:]:
                raise ModelMismatch(
                    f"{what}: the shape is {list(mine)} on rank {members.ranks[0]}, "
                    f"{list(theirs)} on rank {rank}"
                )


def _text(described: Any) -> str:
    collective, dtypes = described
    name = f" '{collective.name}'" if collective.name else ""
    return f"{collective.kind}{name} of {', '.join(dtypes) or 'nothing'}"
