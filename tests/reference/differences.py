"""Where a library is known to answer otherwise than the expectation, and why; nothing is loosened.

A row is asserted like any other outcome: once a library changes, its row has to go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reference.cases import REDUCTIONS, Case

__all__ = ["CASE_DIFFERENCES", "FATAL", "MISTAKE_DIFFERENCES", "CaseDifference"]


@dataclass(frozen=True)
class CaseDifference:
    """Cases that a library refuses on every rank, with an exception of this class."""

    library: str
    applies: Callable[[Case], bool]
    raises: str
    reason: str


CASE_DIFFERENCES = [
    CaseDifference(
        "horovod",
        lambda case: case.collective in REDUCTIONS and case.dtype in ("uint8", "int8"),
        "ValueError",
        "Horovod's torch binding reduces int32, int64, float16, float32 and float64 alone",
    ),
    CaseDifference(
        "horovod",
        lambda case: case.dtype in ("bfloat16", "bool"),
        "ValueError",
        "Horovod's torch binding has no functions for these dtypes at all",
    ),
    CaseDifference(
        "horovod",
        lambda case: case.layout == "strided",
        "ValueError",
        "Horovod takes contiguous tensors only",
    ),
    CaseDifference(
        "horovod",
        lambda case: "reducescatter" in case.collective and case.op in ("Min", "Max", "Product"),
        "HorovodInternalError",
        "Horovod's reducescatter has Average and Sum alone",
    ),
    CaseDifference(
        "horovod",
        lambda case: (case.collective, case.form, case.shapes) == ("allgather", "sync", ((),)),
        "IndexError",
        "Horovod's autograd function asks a tensor without dimensions for its first",
    ),
    CaseDifference(
        "horovod",
        lambda case: (case.collective, case.form, case.shapes) == ("allgather", "async", ((),)),
        "HorovodInternalError",
        "Horovod does not gather tensors without dimensions",
    ),
    CaseDifference(
        "horovod",
        lambda case: case.splits == "int64",
        "ValueError",
        "Horovod takes splits of int32 only",
    ),
]

# By library and mistake: class of the exception, and why.
MISTAKE_DIFFERENCES = {
    ("horovod", "allreduce_before_init"): (
        "HorovodInternalError", "Horovod does not tell a mistake from a failure here"),
    ("horovod", "allreduce_with_unknown_op"): (
        "HorovodInternalError", "Horovod does not tell a mistake from a failure here"),
    ("horovod", "unregistered_process_set"): (
        "TypeError", "None for the number of the set does not fit Horovod's binding"),
}  # fmt: skip

# Not asked of Horovod, whose ranks do not survive it.
FATAL = {
    "alltoall_without_dimensions": "segmentation fault",
    "alltoall_with_negative_splits": "reads and writes outside of its memory",
    "a_call_without_a_name_after_calls_of_some_ranks": "waits for ever; see CASES",
    "process_set_of_unknown_rank": "an exception of C++ that nobody catches",
}
