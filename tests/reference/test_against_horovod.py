"""The same calls on hvd_order and on Horovod 0.28.1, both beside numbers computed without either.

Each library runs all cases once on 2 and once on 3 ranks (rank_program.py); every case is a test
of its own. What a library is known to do otherwise stands in differences.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from reference.cases import CASES, Case, members
from reference.differences import CASE_DIFFERENCES, FATAL, MISTAKE_DIFFERENCES
from reference.expectations import expected, refused
from reference.libraries import LIBRARIES, Outcomes, run_all
from reference.mistakes import BEFORE_INIT, MISTAKES

pytestmark = pytest.mark.timeout(300)  # the first test of each library and size runs all cases

Run = Callable[[str, int], list[Outcomes]]

# Of one value; sums of 3 in half precision are rounded a few times. Integers are exact.
_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-12}

SIZES = [2, 3]

on_both = pytest.mark.parametrize(
    ("library", "size"), [(library, size) for library in LIBRARIES for size in SIZES]
)


@pytest.fixture(scope="module")
def run() -> Run:
    """What the ranks of a library saw; they run once, also if that fails."""
    runs: dict[tuple[str, int], list[Outcomes] | AssertionError] = {}

    def outcomes(library: str, size: int) -> list[Outcomes]:
        if importlib.util.find_spec(library) is None:
            pytest.skip("Horovod is not installed (make horovod)")
        if (library, size) not in runs:
            try:
                runs[library, size] = run_all(library, size)
            except AssertionError as error:
                runs[library, size] = error
        found = runs[library, size]
        if isinstance(found, AssertionError):
            pytest.fail(str(found), pytrace=False)
        return found

    return outcomes


@on_both
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(run: Run, library: str, size: int, case: Case) -> None:
    outcomes = run(library, size)
    ranks = members(case, size)
    known = [one for one in CASE_DIFFERENCES if one.library == library and one.applies(case)]
    if known or refused(case):
        wanted = known[0].raises if known else "ValueError"
        for rank in ranks:
            assert wanted in outcomes[rank][case.id].get("raised", ["nothing"])
        return
    for rank, tensors in zip(ranks, expected(case, len(ranks)), strict=True):
        outcome = outcomes[rank][case.id]
        assert "raised" not in outcome, f"rank {rank}: {outcome}"
        assert outcome.get("same_objects", True), "an in-place call returned other tensors"
        assert outcome.get("inputs_kept", True), "the arguments were changed"
        assert len(outcome["tensors"]) == len(tensors)
        for got, wanted_tensor in zip(outcome["tensors"], tensors, strict=True):
            # Compressed to fp16 and back: rounded there.
            travelled = torch.float16 if case.compression == "fp16" else got.dtype
            torch.testing.assert_close(
                got, wanted_tensor, rtol=_TOLERANCE.get(travelled, 0.0), atol=0.0
            )


@pytest.mark.parametrize(
    ("library", "size", "name"),
    [
        (library, size, name)
        for name in [*BEFORE_INIT, *MISTAKES]
        for library in LIBRARIES
        for size in SIZES
        if library != "horovod" or name not in FATAL
    ],
)
def test_mistake(run: Run, library: str, size: int, name: str) -> None:
    outcomes = run(library, size)
    mistake = MISTAKES.get(name)
    raises = mistake.raises if mistake is not None else "ValueError"
    raises, _ = MISTAKE_DIFFERENCES.get((library, name), (raises, ""))
    raising = {
        "all": range(size), "0": range(1), "all but 0": range(1, size),
    }[mistake.ranks if mistake is not None else "all"]  # fmt: skip
    for rank in range(size):
        outcome = outcomes[rank][name]
        if raises is not None and rank in raising:
            assert raises in outcome.get("raised", ["nothing"]), f"rank {rank}: {outcome}"
        else:
            assert "raised" not in outcome, f"rank {rank}: {outcome}"
        if mistake is not None:
            assert outcome["after"] == (size - 1) / 2, "the next call suffered"


@on_both
def test_what_is_not_wrong_gives_the_right_values(run: Run, library: str, size: int) -> None:
    for outcomes in run(library, size):
        assert outcomes["old_average_argument"]["tensors"][0].tolist() == [float(size)] * 3
        floats, integers = outcomes["a_group_of_several_dtypes"]["tensors"]
        assert (floats.tolist(), integers.tolist()) == ([1.0, 1.0], [1, 1])
        assert integers.dtype is torch.int32


def test_every_known_difference_is_met() -> None:
    for difference in CASE_DIFFERENCES:
        assert any(difference.applies(case) for case in CASES), difference.reason
    names = {*BEFORE_INIT, *MISTAKES}
    assert {name for _, name in MISTAKE_DIFFERENCES} | set(FATAL) <= names


def test_there_are_cases_of_every_kind() -> None:
    assert len(CASES) >= 150
    assert {case.form for case in CASES} >= {"sync", "async", "in_place", "gradient"}
