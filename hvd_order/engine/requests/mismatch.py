"""Explains how ranks disagree, from each rank's description of its next operation. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_order.base.same_model import name_ranks

__all__ = ["explain_mismatch", "name_ranks", "ranks_have"]


def explain_mismatch(
    lines_of_rank: Sequence[Sequence[str]], ranks: Sequence[int] | None = None
) -> str:
    """Returns the first difference between the ranks, with the ranks on each side.

    Args:
        lines_of_rank: each rank's description, one line for each item, most general first.
        ranks: names of the ranks; 0, 1, ... if None.

    Returns:
        One message, the same on every rank: ``"ranks disagree: rank 0: allreduce 'x' float32 [2];
            rank 1: allreduce 'x' float32 [3]"``.
    """
    names = range(len(lines_of_rank)) if ranks is None else ranks
    longest = max(len(lines) for lines in lines_of_rank)
    for place in range(longest):
        ranks_of_line: dict[str, list[int]] = {}
        for rank, lines in zip(names, lines_of_rank, strict=True):
            line = lines[place] if place < len(lines) else "nothing more"
            ranks_of_line.setdefault(line, []).append(rank)
        if len(ranks_of_line) > 1:
            sides = [f"{name_ranks(ranks)}: {line}" for line, ranks in ranks_of_line.items()]
            first_line = lines_of_rank[0][0]
            where = f" in {first_line}" if place > 0 else ""
            return (
                f"ranks disagree{where}: {'; '.join(sides)} "
                "(a collective must be the same on all ranks, on equal tensors)"
            )
    return "ranks disagree"


def ranks_have(ranks: Sequence[int]) -> str:
    """Returns text such as "rank 3 has" or "ranks 0, 2 have"."""
    return f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}"
