"""Collectives on arrays: numpy's and another library's, by the protocol alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
from helpers.environments.other_arrays import Copied, Modern, Old
from helpers.on_ranks import on_ranks
from helpers.ranks import RankPool, run_script

import hvd_order.array as hvd
from hvd_order.base.errors import InvalidUsage, ModelMismatch

DTYPES = ["i1", "u1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]
SHAPES: list[tuple[int, ...]] = [(), (0, 3), (17,), (2, 3, 4), (5003,)]
SIZES = [1, 3]

NpArray = np.ndarray[Any, Any]


def values(rank: int, dtype: str, shape: tuple[int, ...]) -> NpArray:
    count = int(np.prod(shape))
    return ((np.arange(count) % 3) + rank + 1).reshape(shape).astype(dtype)


def same(got: object, wanted: NpArray) -> None:
    assert type(got) is np.ndarray
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert np.array_equal(got, wanted)
    assert got.flags.writeable


# ---- every collective ----


@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_allreduce_of_every_dtype_shape_and_op() -> None:
    rank, size = hvd.rank(), hvd.size()
    checked = 0
    for dtype in DTYPES:
        for shape in SHAPES:
            parts = np.stack([values(by, dtype, shape).astype("c16") for by in range(size)])
            array = values(rank, dtype, shape)
            mean = parts.sum(0) / size
            if dtype[0] in "iu":
                mean = np.trunc(mean.real)
            wanted = {hvd.Sum: parts.sum(0), hvd.Average: mean}
            if dtype[0] != "c":
                real = parts.real
                wanted |= {hvd.Min: real.min(0), hvd.Max: real.max(0), hvd.Product: real.prod(0)}
            for op, value in wanted.items():
                got = hvd.allreduce(array, op=op)
                real_value = value if dtype[0] == "c" else np.asarray(value).real
                np.testing.assert_allclose(got, real_value, rtol=2e-3 if dtype == "f2" else 1e-6)
                assert (got.dtype, got.shape) == (np.dtype(dtype), shape)
                assert np.array_equal(array, values(rank, dtype, shape))
                checked += 1
    truth = hvd.allreduce(np.array([rank == 0, False]), op=hvd.Max)
    same(truth, np.array([True, False]))
    got = hvd.allreduce(np.full(3, 2.0), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    same(got, np.full(3, 3.0 * size))
    assert checked == (8 * 5 + 2 * 2) * len(SHAPES)


@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_allgather_broadcast_alltoall_and_reducescatter() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in [*DTYPES, "?", "u4"]:
        for other in [(), (3,), (2, 2), (0,)]:
            everyone = [values(by, dtype, (by, *other)) for by in range(size)]
            same(hvd.allgather(everyone[rank]), np.concatenate(everyone))
            same(hvd.broadcast(values(rank, dtype, (4, *other)), size - 1),
                 values(size - 1, dtype, (4, *other)))  # fmt: skip
            sent = [values(rank, dtype, (rank + to, *other)) for to in range(size)]
            came = [values(by, dtype, (by + rank, *other)) for by in range(size)]
            splits = [rank + to for to in range(size)]
            for given, kind in [(splits, "i4"), (np.array(splits), "i8")]:
                rows, received = hvd.alltoall(np.concatenate(sent), given)
                same(rows, np.concatenate(came))
                same(received, np.array([by + rank for by in range(size)], dtype=kind))
    same(hvd.alltoall(np.arange(size) + 10 * rank), rank + 10 * np.arange(size))
    same(hvd.allgather(np.array(rank)), np.arange(size))
    rows = np.arange(2.0 * size + 1)
    mine = np.array_split(rows, size)[rank]
    same(hvd.reducescatter(rows, op=hvd.Sum), size * mine)
    same(hvd.reducescatter(rows, prescale_factor=2.0, postscale_factor=0.5), mine)


@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_handles() -> None:
    rank, size = hvd.rank(), hvd.size()
    array = np.full(5, rank + 1.0)
    total = np.full(5, size * (size + 1) / 2)
    handles = {
        "allreduce": hvd.allreduce_async(array, op=hvd.Sum, name="a"),
        "allgather": hvd.allgather_async(array[:1], name="a"),
        "broadcast": hvd.broadcast_async(array, 0, name="a"),
        "alltoall": hvd.alltoall_async(np.arange(size), name="a"),
        "reducescatter": hvd.reducescatter_async(np.ones(size), name="a"),
    }
    array[:] = -1.0  # it was read at once
    results = {what: hvd.synchronize(handle) for what, handle in handles.items()}
    same(results["allreduce"], total)
    same(results["allgather"], np.arange(1.0, size + 1))
    same(results["broadcast"], np.ones(5))
    same(results["alltoall"][0], np.full(size, rank))
    same(results["alltoall"][1], np.ones(size, dtype="i4"))
    same(results["reducescatter"], np.ones(1))
    assert hvd.synchronize(handles["allreduce"]) is None
    with pytest.raises(ValueError, match="was not created or has been cleared"):
        hvd.poll(handles["allreduce"])
    handle = hvd.allreduce_async(array)
    while not hvd.poll(handle):
        pass
    same(hvd.synchronize(handle), array)


@on_ranks(3)
def test_process_sets() -> None:
    pair = hvd.add_process_set([0, 2])
    if pair.included():
        mean = hvd.allreduce(np.array([float(hvd.rank())]), process_set=pair)
        assert mean.tolist() == [1.0]
    else:
        with pytest.raises(ValueError, match="only members may call"):
            hvd.allreduce(np.ones(1), process_set=pair)
    hvd.remove_process_set(pair)


# ---- whose memory ----


@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_in_place_is_in_the_arrays_own_memory() -> None:
    rank, size = hvd.rank(), hvd.size()
    for layout in ("contiguous", "transposed", "strided"):
        memory = np.full((4, 6), float(rank))
        array = {"contiguous": memory, "transposed": memory.T, "strided": memory[:, ::2]}[layout]
        address = array.ctypes.data
        assert hvd.allreduce_(array, op=hvd.Sum) is array
        assert (array == sum(range(size))).all()
        array[...] = rank
        assert hvd.synchronize(hvd.broadcast_async_(array, size - 1)) is array
        assert (array == size - 1).all()
        assert array.ctypes.data == address
        untouched = memory[:, 1::2] if layout == "strided" else np.zeros(0)
        assert (untouched == rank).all()
    scalar = np.array(float(rank))
    assert hvd.broadcast_(scalar, size - 1) is scalar
    assert scalar == size - 1


@on_ranks(2)
def test_arrays_that_cannot_be_shared_are_copied() -> None:
    """Arrays that torch has no words for are copied; their memory is left alone."""
    array = np.arange(12.0) + hvd.rank()
    frozen = array.copy()
    frozen.flags.writeable = False
    record = np.zeros(12, dtype=[("tag", "i1"), ("value", "f8")])
    record["value"] = array
    wanted = (np.arange(12.0) * 2 + 1).tolist()
    for one in (frozen, array[::-1][::-1], array.astype(">f8"), record["value"]):
        got = hvd.allreduce(one, op=hvd.Sum)
        assert (got.tolist(), got.dtype) == (wanted, one.dtype)
    assert hvd.allreduce(array[::-1], op=hvd.Sum).tolist() == wanted[::-1]
    assert array.tolist() == frozen.tolist()
    both = hvd.alltoall(array.astype(">f8"), [5, 7])
    assert isinstance(both, tuple)
    assert both[1].tolist() == [5 + 2 * hvd.rank()] * 2
    loss = hvd.allreduce(np.float32(hvd.rank()))
    assert (loss.shape, loss.dtype, float(loss)) == ((), np.float32, 0.5)


def body_refused() -> dict[str, str]:
    frozen = np.ones(3)
    frozen.flags.writeable = False
    in_place = {
        "frozen": frozen,
        "backwards": np.ones(3)[::-1],
        "byte order": np.ones(3, dtype=">f4"),
        "scalar": np.float32(1),
        "copied": Copied(np.ones(3)),
    }
    any_way = {
        "mask": np.ma.masked_array([1.0, 2.0], [False, True]),
        "text": np.array(["a"]),
        "long double": np.ones(2, dtype=np.longdouble),
        "list": [1.0],
        "number": 1.0,
        "other backwards": Modern(np.ones(3)[::-1]),
    }
    same(hvd.allreduce(Copied(np.ones(3))).values, np.ones(3))
    messages = {}
    for name, array in {**in_place, **any_way}.items():
        functions: list[Any] = [hvd.allreduce_, lambda one: hvd.broadcast_async_(one, 0)]
        if name in any_way:
            functions += [hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter]
        for function in functions:
            with pytest.raises(InvalidUsage) as caught:
                function(array)
            messages[name] = str(caught.value)
    return messages


def test_what_cannot_be_exchanged_is_refused_and_says_why(two_ranks: RankPool) -> None:
    messages, _ = two_ranks.run(body_refused)
    for name, words in {
        "frozen": "numpy.ndarray cannot be written in place: it is read-only; use the function",
        "backwards": "negative strides",
        "byte order": "native byte order",
        "scalar": "numpy.float32 cannot be written in place: it is a number",
        "copied": "Copied cannot be written in place: it is read-only",
        "mask": "its mask would be lost",
        "text": "numpy.ndarray cannot be exchanged",
        "long double": "numpy.ndarray cannot be exchanged",
        "list": "got list; write numpy.asarray",
        "number": "got float",
        "other backwards": "negative strides",
    }.items():
        assert words in messages[name], name


# ---- other libraries ----


@pytest.mark.parametrize("kind", [Modern, Old])
@on_ranks(2)
def test_arrays_of_another_library(kind: type[Modern]) -> None:
    rank = hvd.rank()
    for dtype in DTYPES:
        array = kind(np.array([1, 2, rank], dtype=dtype))
        total = hvd.allreduce(array, op=hvd.Sum)
        assert type(total) is Modern  # the module's from_dlpack made it
        same(total.values, np.array([2, 4, 1], dtype=dtype))
        gathered = hvd.allgather(array)
        same(gathered.values, np.array([1, 2, 0, 1, 2, 1], dtype=dtype))
        assert hvd.broadcast_(array, 1) is array
        same(array.values, np.array([1, 2, 1], dtype=dtype))
        rows, received = hvd.alltoall(array, kind(np.array([1, 2])))
        assert rows.values.tolist() == [[1, 1], [2, 1, 2, 1]][rank]
        same(received.values, np.array([rank + 1] * 2))
        same(hvd.reducescatter(array).values, np.array([[1, 2], [1]][rank], dtype=dtype))
    frozen = np.ones(2)
    frozen.flags.writeable = False
    same(hvd.allreduce(Modern(frozen)).values, np.ones(2))
    with pytest.raises(InvalidUsage, match="read-only"):
        hvd.allreduce_(Modern(frozen))


@on_ranks(2)
def test_a_library_without_from_dlpack() -> None:
    class Lonely(Modern):
        pass

    Lonely.__module__ = "nowhere.at_all"
    with pytest.raises(InvalidUsage, match=r"no from_dlpack in the module of nowhere\.at_all"):
        hvd.allreduce(Lonely(np.ones(2)))


# ---- mistakes, and the way in ----


@on_ranks(2)
def test_mistakes_raise_as_for_tensors() -> None:
    rank = hvd.rank()
    with pytest.raises(ModelMismatch) as caught:
        hvd.allreduce(np.ones(2 + rank), name="weights")
    with pytest.raises(ModelMismatch):
        hvd.allreduce(np.ones(2, dtype=["f4", "f8"][rank]))
    for mistake in (
        lambda: hvd.allreduce(np.ones(2), op=17),
        lambda: hvd.allreduce(np.array([True])),
        lambda: hvd.broadcast(np.ones(2), 2),
        lambda: hvd.alltoall(np.ones(3)),
        lambda: hvd.reducescatter(np.array(1.0)),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            mistake()
    same(hvd.allreduce(np.ones(2)), np.ones(2))
    message = str(caught.value)
    assert "allreduce.weights float64 [2]" in message
    assert "allreduce.weights float64 [3]" in message


def test_a_program_without_a_framework() -> None:
    program = """
        import numpy as np
        import hvd_order.array as hvd

        hvd.init()
        mean = hvd.allreduce(np.full(3, float(hvd.rank())))
        print(hvd.rank(), hvd.size(), mean.tolist(), hvd.broadcast_object({"a": hvd.rank()}))
        hvd.shutdown()
    """
    for done in run_script(2, program):
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == f"{done.rank} 2 [0.5, 0.5, 0.5] {{'a': 0}}"


def test_without_pytorch_the_first_use_says_what_to_install() -> None:
    program = """
        import sys
        sys.modules["torch"] = None
        import importlib.util
        importlib.util.find_spec = lambda name, real=importlib.util.find_spec: (
            None if name == "torch" else real(name))
        import hvd_order.array as hvd
        hvd.init()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert "ImportError: hvd_order.array moves arrays with PyTorch" in done.stderr
    assert "pip install torch" in done.stderr


def test_names() -> None:
    assert set(hvd.__all__) <= set(dir(hvd))
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    with pytest.raises(AttributeError, match="no attribute 'sum'"):
        hvd.sum  # noqa: B018
