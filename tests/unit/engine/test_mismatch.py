"""The message for ranks that disagree."""

from __future__ import annotations

from hvd_order.engine.requests.mismatch import explain_mismatch


def test_one_line_each() -> None:
    message = explain_mismatch([["a [2]"], ["a [3]"], ["a [2]"]])
    assert message.startswith("ranks disagree: ranks 0, 2: a [2]; rank 1: a [3] (")


def test_the_first_different_item_of_a_list_is_named() -> None:
    message = explain_mismatch([["list", "w [2]", "b [3]"], ["list", "w [2]", "b [4]"]])
    assert message.startswith("ranks disagree in list: rank 0: b [3]; rank 1: b [4] (")


def test_an_item_that_is_missing() -> None:
    message = explain_mismatch([["list", "w"], ["list", "w", "b"]])
    assert "rank 0: nothing more; rank 1: b" in message


def test_many_ranks_are_shortened() -> None:
    message = explain_mismatch([["x"]] + [["y"]] * 100)
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8, ...: y" in message
