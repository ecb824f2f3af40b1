"""Tests whose body runs in every rank, and checks there what it has found."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from helpers.ranks import RankFactory

__all__ = ["on_ranks"]

Test = Callable[..., None]


def on_ranks(size: int | None = None, timeout: float = 60.0) -> Callable[[Test], Test]:
    """Makes a function a test that runs in every rank of a pool, after ``hvd.init()``::

        @pytest.mark.parametrize("value", [1.0, 2.0])
        @on_ranks(3)
        def test_total(value: float) -> None:
            total = hvd.allreduce(torch.tensor(value), op=hvd.Sum)
            assert total.item() == 3 * value

    Its arguments are parameters of pytest or fixtures, as usual, and are pickled.

    Args:
        size: of the pool; None: the test's parameter ``size``.
        timeout: seconds, as in `RankPool.run`.
    """

    def decorate(body: Test) -> Test:
        wanted = list(inspect.signature(body).parameters)
        by_parameter = [] if size is not None or "size" in wanted else ["size"]

        def test(ranks: RankFactory, **given: Any) -> None:
            number = given["size"] if size is None else size
            ranks(number).run(body, timeout=timeout, **{name: given[name] for name in wanted})

        functools.update_wrapper(test, body)
        test.body = body  # type: ignore[attr-defined]
        body.__qualname__ = f"{body.__qualname__}.body"  # by which the ranks find it
        names = ["ranks", *by_parameter, *wanted]
        any_kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, any_kind) for name in names]
        )
        return test

    return decorate
