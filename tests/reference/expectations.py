"""What the cases must give, computed in double precision by numpy, without either library."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from reference.cases import REDUCTIONS, Case, inputs, splits_of

__all__ = ["expected", "refused"]

Numbers = np.ndarray[Any, Any]


def refused(case: Case) -> bool:
    """Whether the call has no meaning, and must raise ValueError."""
    return case.dtype == "bool" and case.op == "Average" and case.collective in REDUCTIONS


def expected(case: Case, size: int) -> list[list[torch.Tensor]]:
    """The tensors that each of `size` members gets, by place."""
    given = [inputs(case, place, size) for place in range(size)]
    per_tensor = [
        _gradients(case, one, size) if case.form == "gradient" else _results(case, one, size)
        for one in zip(*given, strict=True)
    ]
    dtype = getattr(torch, case.dtype)
    answers = [
        [torch.tensor(tensor[place]).to(dtype) for tensor in per_tensor] for place in range(size)
    ]
    if case.collective == "alltoall" and case.form != "gradient":
        received = [[splits_of(case, by, size)[place] for by in range(size)]
                    for place in range(size)]  # fmt: skip
        kind = torch.int64 if case.splits == "int64" else torch.int32
        for answer, counts in zip(answers, received, strict=True):
            if case.splits != "none" or case.form == "async":
                answer.append(torch.tensor(counts, dtype=kind))
    return answers


def _results(case: Case, tensors: tuple[torch.Tensor, ...], size: int) -> list[Numbers]:
    """What each member gets for one tensor of the group."""
    parts = [tensor.to_dense().to(torch.float64).numpy() for tensor in tensors]
    whole = not tensors[0].is_floating_point()
    if case.collective in REDUCTIONS | {"sparse_allreduce"}:
        reduced = _reduce(case, parts, whole)
        if "reducescatter" not in case.collective:
            return [reduced] * size
        return np.array_split(reduced, size)  # the first members have one more
    if "allgather" in case.collective:
        return [np.concatenate([np.atleast_1d(part) for part in parts])] * size
    if case.collective == "broadcast":
        return [parts[0 if case.root == "first" else -1]] * size
    sent = [_split(part, case, by, size) for by, part in enumerate(parts)]
    return [np.concatenate([sent[by][to] for by in range(size)]) for to in range(size)]


def _reduce(case: Case, parts: list[Numbers], whole: bool) -> Numbers:
    """Integers are cut towards zero after each scaling; averaging is part of the second."""
    stacked = np.stack(parts)
    size = len(parts)
    scaled = _scale(stacked, case.prescale, whole)
    reduced: Numbers = {
        "Average": np.sum, "Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod,
    }[case.op](scaled, axis=0)  # fmt: skip
    divisor = size if case.op == "Average" else 1
    return _scale(reduced, case.postscale / divisor, whole)


def _scale(numbers: Numbers, factor: float, whole: bool) -> Numbers:
    product = numbers * factor
    # A sum that the ranks divide may come out a little below the whole number.
    return np.asarray(np.trunc(np.round(product, 9)) if whole else product)


def _split(rows: Numbers, case: Case, place: int, size: int) -> list[Numbers]:
    return np.split(rows, np.cumsum(splits_of(case, place, size))[:-1])


def _gradients(case: Case, tensors: tuple[torch.Tensor, ...], size: int) -> list[Numbers]:
    """Gradients of sum(output) * (place + 1), as Horovod defines them."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    weights = np.arange(size) + 1.0
    factor = case.prescale * case.postscale
    if "allreduce" in case.collective:
        total = weights.sum() if case.op == "Sum" else weights.mean()
        return [np.full(shape, total * factor) for shape in shapes]
    if "allgather" in case.collective:
        return [np.full(shape, weights.mean()) for shape in shapes]
    if case.collective == "broadcast":
        root = 0 if case.root == "first" else size - 1
        return [np.full(shape, weights.mean() if place == root else 0.0)
                for place, shape in enumerate(shapes)]  # fmt: skip
    if case.collective == "alltoall":
        ones = [_split(np.ones(shape), case, by, size) for by, shape in enumerate(shapes)]
        return [np.concatenate([part * weights[to] for to, part in enumerate(sent)])
                for sent in ones]  # fmt: skip
    parts = np.array_split(np.ones(shapes[0]), size)
    if case.op == "Sum":
        factor *= size
    joined = np.concatenate([part * weights[to] * factor for to, part in enumerate(parts)])
    return [joined] * size
