"""Wrong calls: what raises in both libraries, and of which class the exception is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["BEFORE_INIT", "MISTAKES", "Mistake", "Setting"]

WAIT_S = 20.0


@dataclass(frozen=True)
class Setting:
    """Where a mistake is made: the library, this rank among `size`, its sets, a common folder."""

    hvd: Any
    rank: int
    size: int
    sets: dict[str, Any]
    folder: Path

    @property
    def odd(self) -> bool:
        """Whether this is the rank that differs from the others."""
        return self.rank == self.size - 1


@dataclass(frozen=True)
class Mistake:
    """A wrong call.

    Attributes:
        call: makes it; may return what a case returns.
        raises: class that the exception has or inherits from, on every rank that raises;
            None: nothing is wrong.
        ranks: who raises: all, 0, or all but 0. What concerns some only comes last, after the
            cases on process sets.
    """

    call: Callable[[Setting], Any]
    raises: str | None
    ranks: str = "all"


MISMATCH = "HorovodInternalError"
MISTAKES: dict[str, Mistake] = {}


def _wrong(
    raises: str | None, ranks: str = "all"
) -> Callable[[Callable[[Setting], Any]], Callable[[Setting], Any]]:
    def register(function: Callable[[Setting], Any]) -> Callable[[Setting], Any]:
        MISTAKES[function.__name__] = Mistake(function, raises, ranks)
        return function

    return register


def _add(name: str, raises: str | None, call: Callable[[Setting], Any]) -> None:
    MISTAKES[name] = Mistake(call, raises)


# ---- ranks that disagree ----

_CALLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "allreduce": lambda hvd, tensor: hvd.allreduce(tensor, name="mismatch"),
    "allreduce_in_place": lambda hvd, tensor: hvd.allreduce_(tensor, name="mismatch"),
    "grouped_allreduce": lambda hvd, tensor: hvd.grouped_allreduce(
        [torch.ones(2), tensor], name="mismatch"
    ),
    "allgather": lambda hvd, tensor: hvd.allgather(tensor, name="mismatch"),
    "broadcast": lambda hvd, tensor: hvd.broadcast(tensor, 0, name="mismatch"),
    "alltoall": lambda hvd, tensor: hvd.alltoall(tensor, name="mismatch"),
    "reducescatter": lambda hvd, tensor: hvd.reducescatter(tensor, name="mismatch"),
}
_DIFFERENT: dict[str, Callable[[bool], torch.Tensor]] = {
    "shape": lambda odd: torch.ones(6, 4 if odd else 3),
    "dimensions": lambda odd: torch.ones(6, 1, 3) if odd else torch.ones(6, 3),
}
for _what, _make in _DIFFERENT.items():
    for _name, _call in _CALLS.items():
        _add(
            f"{_name}_of_different_{_what}",
            MISMATCH,
            lambda s, call=_call, make=_make: call(s.hvd, make(s.odd)),
        )
for _name, _call in _CALLS.items():
    if _name != "grouped_allreduce":
        _add(
            f"{_name}_of_different_dtype",
            MISMATCH,
            lambda s, call=_call: call(
                s.hvd, torch.ones(6, dtype=[torch.int32, torch.int64][s.odd])
            ),
        )


@_wrong(MISMATCH)
def allreduce_with_different_ops(s: Setting) -> Any:
    return s.hvd.allreduce(torch.ones(3), op=s.hvd.Max if s.odd else s.hvd.Sum, name="op")


@_wrong(MISMATCH)
def reducescatter_with_different_ops(s: Setting) -> Any:
    return s.hvd.reducescatter(torch.ones(6), op=s.hvd.Average if s.odd else s.hvd.Sum, name="op")


@_wrong(MISMATCH)
def allreduce_with_different_prescale_factors(s: Setting) -> Any:
    return s.hvd.allreduce(torch.ones(3), prescale_factor=2.0 if s.odd else 1.0, name="scale")


@_wrong(MISMATCH)
def allreduce_with_different_postscale_factors(s: Setting) -> Any:
    return s.hvd.allreduce(torch.ones(3), postscale_factor=2.0 if s.odd else 1.0, name="scale")


@_wrong(MISMATCH)
def broadcast_from_different_roots(s: Setting) -> Any:
    return s.hvd.broadcast(torch.ones(3), int(s.odd), name="root")


# ---- one rank's own mistakes ----


@_wrong("ValueError", ranks="all but 0")
def a_name_twice_in_flight(s: Setting) -> Any:
    """Rank 0 holds the first request back until the others have made the second."""
    if s.rank:
        handle = s.hvd.allreduce_async(torch.ones(2), name="twice")
        try:
            s.hvd.allreduce_async(torch.ones(2), name="twice")
        finally:
            (s.folder / f"second{s.rank}").touch()
            s.hvd.synchronize(handle)
        return {"tensors": []}
    deadline = time.monotonic() + WAIT_S
    while not all((s.folder / f"second{rank}").exists() for rank in range(1, s.size)):
        assert time.monotonic() < deadline, "the other ranks have not made their second request"
        time.sleep(0.001)
    return {"tensors": [s.hvd.allreduce(torch.ones(2), name="twice")]}


_T = torch.ones(6, 3)
for _name, _raises, _call in [
    ("average_and_op", "ValueError", lambda s: s.hvd.allreduce(_T, average=True, op=s.hvd.Sum)),
    ("allreduce_with_unknown_op", "ValueError", lambda s: s.hvd.allreduce(_T, op=17)),
    ("root_out_of_range", "ValueError", lambda s: s.hvd.broadcast(_T, s.size, name="far")),
    ("broadcast_without_root", "TypeError", lambda s: s.hvd.broadcast(_T)),
    ("alltoall_without_splits_of_odd_rows", "ValueError",
     lambda s: s.hvd.alltoall(torch.ones(s.size + 1))),
    ("alltoall_with_too_many_rows_in_splits", "ValueError",
     lambda s: s.hvd.alltoall(torch.ones(3), [3] * s.size)),
    ("alltoall_with_negative_splits", "ValueError",
     lambda s: s.hvd.alltoall(torch.ones(3), [4, -1, 0][: s.size])),
    ("alltoall_with_too_few_splits", "ValueError", lambda s: s.hvd.alltoall(torch.ones(3), [3])),
    ("alltoall_without_dimensions", "ValueError", lambda s: s.hvd.alltoall(torch.tensor(1.0))),
    ("reducescatter_without_dimensions", "ValueError",
     lambda s: s.hvd.reducescatter(torch.tensor(1.0))),
    ("no_tensor", "AttributeError", lambda s: s.hvd.allreduce([1.0, 2.0])),
    ("sparse_tensor", "ValueError", lambda s: s.hvd.allreduce(_T.to_sparse())),
    ("empty_group", "ValueError", lambda s: s.hvd.grouped_allreduce([])),
    ("unregistered_process_set", "ValueError",
     lambda s: s.hvd.allreduce(_T, process_set=s.hvd.ProcessSet([0]))),
    ("same_process_set_again", "ValueError", lambda s: s.hvd.add_process_set(list(range(s.size)))),
    ("process_set_of_unknown_rank", "ValueError", lambda s: s.hvd.add_process_set([0, s.size])),
    ("poll_of_unknown_handle", "ValueError", lambda s: s.hvd.poll(123_456)),
    ("old_average_argument", None,
     lambda s: {"tensors": [s.hvd.allreduce(torch.ones(3), average=False)]}),
]:  # fmt: skip
    _add(_name, _raises, _call)


@_wrong("ValueError", ranks="0")
def call_of_a_rank_outside_the_set(s: Setting) -> Any:
    """Nobody but rank 0 calls, and it does not belong."""
    if s.rank == 0:
        s.hvd.allreduce(torch.ones(2), name="foreign", process_set=s.sets["all_but_first"])
    return {"tensors": []}


@_wrong("ValueError", ranks="0")
def rank_in_a_foreign_set(s: Setting) -> Any:
    if s.rank == 0:
        s.sets["all_but_first"].rank()
    return {"tensors": []}


# ---- not wrong, though it looks so ----


@_wrong(None)
def synchronize_twice(s: Setting) -> Any:
    handle = s.hvd.allreduce_async(torch.ones(2))
    first = s.hvd.synchronize(handle)
    assert s.hvd.synchronize(handle) is None
    return {"tensors": [first]}


@_wrong(None)
def the_same_name_again(s: Setting) -> Any:
    return {"tensors": [s.hvd.allreduce(torch.ones(2), name="again") for _ in range(2)]}


@_wrong(None, ranks="0")
def a_call_without_a_name_after_calls_of_some_ranks(s: Setting) -> Any:
    """The cases on sets, which came before, have not been made by every rank."""
    return {"tensors": [s.hvd.allreduce(torch.ones(2))]}


@_wrong(None)
def a_group_of_several_dtypes(s: Setting) -> Any:
    return {"tensors": s.hvd.grouped_allreduce([torch.ones(2), torch.ones(2, dtype=torch.int32)])}


@_wrong(None)
def removing_the_global_set(s: Setting) -> Any:
    assert s.hvd.remove_process_set(s.hvd.global_process_set) is False
    return {"tensors": []}


@_wrong(None)
def removing_a_set_and_adding_it_again(s: Setting) -> Any:
    """The cases on sets, which come later, show that it works again."""
    group = s.sets["all_but_first"]
    assert s.hvd.remove_process_set(group) is True
    assert group.process_set_id is None
    assert s.hvd.remove_process_set(group) is False
    assert s.hvd.add_process_set(group) is group
    assert isinstance(group.process_set_id, int)
    return {"tensors": []}


@_wrong(None)
def other_order_of_names(s: Setting) -> Any:
    """Requests are matched by name; ranks may make them in different order."""
    names = ["first", "second"]
    order = names[::-1] if s.odd else names
    handles = {name: s.hvd.allreduce_async(torch.ones(2 + len(name)), name=name) for name in order}
    return {"tensors": [s.hvd.synchronize(handles[name]) for name in names]}


@_wrong(None)
def objects(s: Setting) -> Any:
    shared = s.hvd.broadcast_object({"rank": s.rank}, root_rank=0)
    everyone = s.hvd.allgather_object((s.rank, "x" * s.rank))
    assert shared == {"rank": 0}
    assert everyone == [(rank, "x" * rank) for rank in range(s.size)]
    return {"tensors": []}


BEFORE_INIT: dict[str, Callable[[Any], Any]] = {
    "size_before_init": lambda hvd: hvd.size(),
    "rank_before_init": lambda hvd: hvd.rank(),
    "allreduce_before_init": lambda hvd: hvd.allreduce(torch.ones(2)),
}
