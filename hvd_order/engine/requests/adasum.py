"""Adasum: a sum of gradients that does not grow where they have the same direction.

Maleki et al. 2020, "Scaling Distributed Training with Adaptive Summation", section 3: for two
gradients ``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``, which is their sum where they are
orthogonal and their mean where they are parallel; for more gradients, the same for pairs of pairs.
The data travels by recursive vector halving: in round d a rank exchanges half of its data with the
rank d away, so each round moves half as much as the one before. The parts are gathered at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hvd_order.engine.job import group_collectives
from hvd_order.engine.requests.request_parts import as_bytes

__all__ = ["adasum_in_place", "check_count"]


def check_count(ranks: int) -> None:
    """Raises NotImplementedError (as Horovod does) unless ``ranks`` is a power of 2."""
    if ranks & (ranks - 1):
        raise NotImplementedError(
            "Running Adasum with non-power of 2 ranks is not supported yet."
            f" ({ranks} ranks take part)"
        )


def adasum_in_place(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Replaces each tensor by the Adasum of all ranks' tensors in its place. Blocks until done.

    Args:
        tensors: contiguous, of one floating dtype and device; the same shapes on all ranks.
        group: a power of 2 of ranks, which all call this together; None: this process alone.
    """
    if group is None:
        return
    counts = [tensor.numel() for tensor in tensors]
    size = group.size()
    length = -(-sum(counts) // size) * size  # divisible in every round
    if length == 0:
        return
    flat = tensors[0].new_zeros(length)
    flat[: sum(counts)] = torch.cat([tensor.reshape(-1) for tensor in tensors])
    rank = group.rank()
    first, end = 0, length
    piece = flat
    distance = 1
    while distance < size:
        lower = not rank & distance
        halves = piece.split(piece.numel() // 2)
        kept, sent = halves if lower else halves[::-1]
        received = _swap(sent, rank ^ distance, group)
        middle = (first + end) // 2
        first, end = (first, middle) if lower else (middle, end)
        a, b = (kept, received) if lower else (received, kept)
        begin = rank // (2 * distance) * 2 * distance
        block = range(begin, begin + 2 * distance)
        piece = _combine(a, b, _inside(counts, first, end), block, group)
        distance *= 2
    for other, part in enumerate(_gather(piece, group)):
        at = _first_of(other, size, length)
        flat[at : at + part.numel()] = part
    for tensor, result in zip(tensors, flat[: sum(counts)].split(counts), strict=True):
        tensor.copy_(result.view_as(tensor))


def _first_of(rank: int, size: int, length: int) -> int:
    """Returns the start of the piece that a rank ends with."""
    first, distance = 0, 1
    while distance < size:
        length //= 2
        first += length if rank & distance else 0
        distance *= 2
    return first


def _inside(counts: Sequence[int], first: int, end: int) -> list[slice]:
    """Returns each tensor's place, maybe empty, in the piece from ``first`` to ``end`` of all."""
    places, begin = [], 0
    for count in counts:
        start, stop = max(begin, first), min(begin + count, end)
        places.append(slice(start - first, max(start, stop) - first))
        begin += count
    return places


def _combine(
    a: torch.Tensor, b: torch.Tensor, places: list[slice], block: range, group: dist.ProcessGroup
) -> torch.Tensor:
    """Returns this rank's piece of the Adasum, tensor by tensor.

    Args:
        a, b: pieces of the two gradients.
        places: place of each tensor in the piece.
        block: ranks that have the other pieces.
        group: all ranks.
    """
    wide = torch.float64 if a.dtype is torch.float64 else torch.float32
    result = torch.zeros(a.shape, dtype=wide, device=a.device)
    products = torch.zeros((len(places), 3), dtype=torch.float64, device=a.device)
    for product, at in zip(products, places, strict=True):
        x, y = a[at].double(), b[at].double()
        product.copy_(torch.stack([x.dot(y), x.dot(x), y.dot(y)]))
    everyone = group_collectives.all_gather(products, group)
    sums = torch.stack([everyone[rank] for rank in block]).sum(0)  # the same bits on every rank
    for at, (both, a_square, b_square) in zip(places, sums.tolist(), strict=True):
        of_a = 1.0 - both / (2 * a_square) if a_square > 0 else 1.0
        of_b = 1.0 - both / (2 * b_square) if b_square > 0 else 1.0
        result[at] = of_a * a[at].to(wide) + of_b * b[at].to(wide)
    return result.to(a.dtype)


def _swap(sent: torch.Tensor, peer: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchanges equal amounts with a rank of the group; all ranks do, in pairs."""
    received = torch.empty_like(sent)
    if sent.numel() == 0:
        return received
    counts = [0] * group.size()
    counts[peer] = sent.nbytes
    # One call for both directions: a send and a receive of NCCL would wait for each other.
    group_collectives.all_to_all(as_bytes(received), as_bytes(sent), counts, counts, group)
    return received


def _gather(piece: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Returns all ranks' pieces, by rank."""
    if not piece.numel():
        return [piece] * group.size()
    gathered = group_collectives.all_gather(as_bytes(piece), group)
    return [one.view(piece.dtype) for one in gathered]
