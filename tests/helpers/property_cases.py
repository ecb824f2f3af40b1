"""How property tests run, and the choices that Hypothesis makes for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

T = TypeVar("T")

EXPLORE = "HVD_ORDER_TEST_EXPLORE"
"""Environment variable: try other cases than the usual ones, this many times as many of them."""

ALL_CASES = "HVD_ORDER_TEST_ALL_CASES"
"""Environment variable, set by `make test-long`: try all cases also where `make test` has fewer."""


def cases(count: int, *, quick: int | None = None) -> settings:
    """Settings for ``count`` cases; `make test` tries only the first ``quick`` of them.

    The ordinary run is derandomized: every run of the same test tries the same cases, so a red run
    means that a change broke something, on everybody's machine, and needs no data base of earlier
    failures. ``HVD_ORDER_TEST_EXPLORE=20`` looks for new trouble instead: fresh random cases, 20
    times as many; a failure is printed with the blob that reproduces it.
    """
    explore = int(os.environ.get(EXPLORE, "0"))
    if quick is not None and not explore and not os.environ.get(ALL_CASES):
        count = quick
    return settings(
        max_examples=count * max(1, explore),
        derandomize=explore == 0,
        print_blob=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


class Choices:
    """An endless row of decisions made of a few bytes; all zero means: always the first.

    One draw instead of hundreds: Hypothesis is fast, and what it shrinks to is still readable.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, bound: int) -> int:
        """A number in [0, bound), bound at most 256."""
        value = self._data[self._at % len(self._data)]
        self._at += 1
        return value % bound

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in items]


def choices() -> st.SearchStrategy[Choices]:
    return st.binary(min_size=61, max_size=61).map(Choices)  # prime: wraps out of step with loops


def tensor_specs(max_size: int = 5) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    """Tensors of 16 to 384 bytes in one or two gradient buffers: (name, bytes, buffer)."""
    return st.lists(st.integers(0, 47), min_size=1, max_size=max_size).map(
        lambda codes: [(f"t{i}", (code // 2 + 1) * 16, code % 2) for i, code in enumerate(codes)]
    )


slice_sizes = st.integers(64, 200)
"""Bytes; tensors of `tensor_specs` are cut into up to six, or several share one."""
