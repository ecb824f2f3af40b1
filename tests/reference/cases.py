"""What is asked of both libraries: one case, one call of one collective on known numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch

__all__ = ["CASES", "GROUPED", "REDUCTIONS", "Case", "inputs", "members", "splits_of"]

Shape = tuple[int, ...]

REDUCTIONS = {"allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter"}
GROUPED = {"grouped_allreduce", "grouped_allgather", "grouped_reducescatter"}
FLOATS = ["float16", "float32", "float64"]
INTEGERS = ["uint8", "int8", "int32", "int64"]
DTYPES = [*INTEGERS, *FLOATS, "bfloat16", "bool"]
OPS = ["Average", "Sum", "Min", "Max", "Product"]
FORMS = ["sync", "async", "in_place", "in_place_async"]
SHAPES: list[Shape] = [(), (1,), (0,), (3, 5), (2, 3, 4), (0, 3), (65537,)]
SETS = ["all_but_last", "all_but_first"]
GROUP: tuple[Shape, ...] = ((2, 3), (5,), (4, 1, 2))


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        collective: name of the function, without what the form adds.
        form: sync, async, in_place, in_place_async; or gradient: the result is the gradient of
            the sum of the output times one more than the caller's place.
        dtype: of the tensors, in torch's spelling.
        shapes: of the tensors on the first member; one, unless the function is grouped.
        op: for reductions.
        members: who calls: all ranks, all_but_last, all_but_first.
        rows: how the first dimension varies by place: even, uneven, none_on_first.
        splits: of alltoall: none, list, int32 or int64 (tensors).
        root: of broadcast, first or last of the members.
        compression: hvd.Compression's.
        layout: contiguous or strided in memory.
    """

    collective: str
    form: str = "sync"
    dtype: str = "float32"
    shapes: tuple[Shape, ...] = ((17,),)
    op: str = "Average"
    prescale: float = 1.0
    postscale: float = 1.0
    members: str = "all"
    rows: str = "even"
    splits: str = "none"
    root: str = "first"
    compression: str = "none"
    layout: str = "contiguous"

    @property
    def id(self) -> str:
        """Name, and what is not as usual: ``allreduce-Sum-int32-3x5``."""
        parts = [self.collective]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name == "op" and self.collective in REDUCTIONS | {"sparse_allreduce"}:
                parts.append(value)
            elif value != field.default:
                parts.append(_word(field.name, value))
        return "-".join(parts)


def _word(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return "+".join("x".join(map(str, shape)) or "scalar" for shape in value)
    return str(value) if name in ("form", "dtype", "members") else f"{name}={value}"


def members(case: Case, size: int) -> list[int]:
    """The ranks that call, ascending, in a job of `size`."""
    first = 1 if case.members == "all_but_first" else 0
    return list(range(first, size - 1 if case.members == "all_but_last" else size))


def splits_of(case: Case, place: int, size: int) -> list[int]:
    """How many rows the member at `place` sends to each of `size` members."""
    if case.rows == "even":
        return [2] * size
    if case.rows == "none_on_first":
        return [0 if place == 0 else to + 1 for to in range(size)]
    return [(place + 2 * to) % 4 for to in range(size)]


def inputs(case: Case, place: int, size: int) -> list[torch.Tensor]:
    """The tensors of the member at `place` of `size`; exact in every dtype, and so are sums."""
    return [_values(case, shape, place, size, index) for index, shape in enumerate(case.shapes)]


def _values(case: Case, shape: Shape, place: int, size: int, index: int) -> torch.Tensor:
    if case.collective == "alltoall" and shape:
        shape = (sum(splits_of(case, place, size)), *shape[1:])
    elif case.rows == "uneven":
        shape = (shape[0] + place, *shape[1:])
    elif case.rows == "none_on_first" and place == 0:
        shape = (0, *shape[1:])
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * (place + 2) + 3 * place + index) % 5
    dtype: torch.dtype = getattr(torch, case.dtype)
    if dtype.is_floating_point:
        values = (numbers - 2).to(dtype) / 2
    elif dtype is torch.bool:
        values = numbers > 1
    else:
        values = (numbers if dtype is torch.uint8 else numbers - 2).to(dtype)
    values = values.reshape(shape)
    if case.layout == "strided":
        values = torch.stack([values, values], dim=-1)[..., 0]
    if case.collective == "sparse_allreduce":
        values[place % shape[0]] = 0
        return values.to_sparse(1)
    return values


def _allreduces() -> Iterator[Case]:
    for op in OPS:
        for dtype in DTYPES:
            yield Case("allreduce", dtype=dtype, op=op)
    for form in FORMS:
        for index, shape in enumerate(SHAPES):
            yield Case("allreduce", form, shapes=(shape,), op=OPS[index % 2])
        yield Case("allreduce", form, "int64", shapes=((3, 5),), op="Sum")
        for group in SETS:
            yield Case("allreduce", form, members=group, op="Sum")
        for op in OPS:
            yield Case("grouped_allreduce", form, shapes=GROUP, op=op)
    yield Case("allreduce", shapes=((1_000_003,),), op="Sum")
    yield Case("allreduce", "in_place", shapes=((1_000_003,),))
    for dtype in [*FLOATS, "int32", "int64"]:
        for op, prescale, postscale in [
            ("Sum", 0.5, 1.0), ("Sum", 1.0, 1.5), ("Sum", 2.0, 0.25), ("Average", 1.0, 2.5),
            ("Average", 1.5, 1.0), ("Max", -1.0, 1.5),
        ]:  # fmt: skip
            yield Case("allreduce", dtype=dtype, op=op, prescale=prescale, postscale=postscale)
    for dtype in DTYPES:
        yield Case("grouped_allreduce", dtype=dtype, shapes=((3,), (2, 2)), op="Sum")
    for group in SETS:
        yield Case("grouped_allreduce", shapes=GROUP, members=group)
    yield Case("grouped_allreduce", shapes=GROUP, op="Sum", prescale=0.5, postscale=3.0)
    yield Case("grouped_allreduce", "in_place", "int32", GROUP, "Average", postscale=2.5)
    yield Case("allreduce", compression="fp16")
    yield Case("allreduce", dtype="float64", compression="fp16", op="Sum")
    yield Case("grouped_allreduce", shapes=GROUP, compression="fp16")
    for form in FORMS:
        yield Case("allreduce", form, shapes=((3, 5),), layout="strided")
    for op in ("Sum", "Average"):
        for group in ("all", "all_but_last"):
            yield Case("allreduce", "gradient", op=op, members=group)
        yield Case("allreduce", "gradient", op=op, prescale=2.0, postscale=0.25)
        yield Case("grouped_allreduce", "gradient", shapes=GROUP, op=op)
        yield Case("sparse_allreduce", shapes=((5, 2),), op=op)
        yield Case("sparse_allreduce", shapes=((4,),), op=op, members="all_but_first")
    yield Case("allreduce", "gradient", shapes=((),))


def _gathers() -> Iterator[Case]:
    for dtype in [*DTYPES, "int16"]:
        yield Case("allgather", dtype=dtype, rows="uneven")
        yield Case("broadcast", dtype=dtype, root="last")
    for form in ("sync", "async"):
        for shape in SHAPES[1:]:
            yield Case("allgather", form, shapes=(shape,))
        for rows in ("uneven", "none_on_first"):
            yield Case("allgather", form, shapes=((2, 3),), rows=rows)
            for group in SETS:
                yield Case("allgather", form, shapes=((2, 3),), rows=rows, members=group)
        for rows in ("even", "uneven", "none_on_first"):
            yield Case("grouped_allgather", form, shapes=GROUP, rows=rows)
    for form in ("sync", "async"):
        yield Case("allgather", form, shapes=((),))
    yield Case("allgather", shapes=((3, 5),), layout="strided")
    yield Case("grouped_allgather", shapes=GROUP, members="all_but_last", rows="uneven")
    for rows in ("even", "uneven", "none_on_first"):
        yield Case("allgather", "gradient", shapes=((2, 3),), rows=rows)
    yield Case("allgather", "gradient", shapes=((2, 3),), rows="uneven", members="all_but_last")
    yield Case("grouped_allgather", "gradient", shapes=GROUP, rows="uneven")
    for form in FORMS:
        for root in ("first", "last"):
            for shape in ((), (0, 3), (3, 5)):
                yield Case("broadcast", form, shapes=(shape,), root=root)
        for group in SETS:
            yield Case("broadcast", form, members=group, root="last")
        yield Case("broadcast", form, shapes=((3, 5),), layout="strided")
    for root in ("first", "last"):
        yield Case("broadcast", "gradient", root=root)
        yield Case("broadcast", "gradient", root=root, members="all_but_last")


def _scatters() -> Iterator[Case]:
    for dtype in [*DTYPES, "int16"]:
        yield Case("alltoall", dtype=dtype, rows="uneven", splits="list")
    for form in ("sync", "async"):
        for shape in ((1,), (1, 3), (1, 2, 2), (1, 0)):
            yield Case("alltoall", form, shapes=(shape,))
            yield Case("alltoall", form, shapes=(shape,), rows="none_on_first", splits="int32")
        yield Case("alltoall", form, shapes=((1, 3),), rows="uneven", splits="int64")
        for group in SETS:
            yield Case("alltoall", form, rows="uneven", splits="int32", members=group)
        yield Case("reducescatter", form, shapes=((12, 2),), op="Sum")
        for group in SETS:
            yield Case("reducescatter", form, shapes=((7, 2),), members=group)
        for op in ("Sum", "Average"):
            yield Case("grouped_reducescatter", form, shapes=((7, 2), (6,), (3, 1, 2)), op=op)
    yield Case("alltoall", shapes=((1, 3),), layout="strided")
    yield Case("alltoall", "gradient", shapes=((1, 3),))
    yield Case("alltoall", "gradient", shapes=((1, 3),), rows="uneven", splits="list")
    yield Case("alltoall", "gradient", rows="uneven", splits="int32", members="all_but_last")
    for op in OPS:
        for dtype in DTYPES:
            if dtype != "bool" or op == "Average":
                yield Case("reducescatter", dtype=dtype, op=op, shapes=((7, 2),))
    for shape in ((1,), (2, 3), (0,), (0, 3), (6, 0), (65537,)):
        yield Case("reducescatter", shapes=(shape,), op="Sum")
    for prescale, postscale in ((0.5, 1.0), (1.0, 2.5)):
        for dtype in ("float32", "float16", "int32"):
            yield Case("reducescatter", dtype=dtype, shapes=((7, 2),),
                       prescale=prescale, postscale=postscale)  # fmt: skip
    yield Case("reducescatter", shapes=((7, 2),), compression="fp16")
    yield Case("reducescatter", shapes=((7, 2),), layout="strided")
    for op in ("Sum", "Average"):
        yield Case("reducescatter", "gradient", shapes=((7, 2),), op=op)
        yield Case("reducescatter", "gradient", shapes=((7, 2),), op=op, prescale=0.5)
        yield Case("grouped_reducescatter", "gradient", shapes=((7, 2), (6,)), op=op)


# Those of all ranks first, then set by set, and no gradients on the second set: Horovod numbers
# requests without a name (backward passes make such) by a counter of the process, so they never
# meet on ranks of which one has made more requests than another.
CASES: Sequence[Case] = sorted(
    [*_allreduces(), *_gathers(), *_scatters()],
    key=lambda case: ["all", *SETS].index(case.members),
)
assert len({case.id for case in CASES}) == len(CASES), "two cases have one name"
