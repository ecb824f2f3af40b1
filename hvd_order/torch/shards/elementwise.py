"""Whether an optimizer updates each element of a parameter by itself, so that shards of it can be
updated by different ranks.

Beside what `separability` demands, a trial updates a matrix as a whole and in 1-d pieces. Norms of
parameters (LARS, LAMB), factored moments (Adafactor) and operations on matrices (Muon) show.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from hvd_order.base.errors import InvalidUsage
from hvd_order.torch.updates.partial_step import InnerStep
from hvd_order.torch.updates.separability import Separability
from hvd_order.torch.updates.trial_copy import state_like, trial_copy, trial_settings
from hvd_order.torch.updates.values import same

__all__: list[str] = []

_SHAPE = (6, 4)
_CUTS = (0, 5, 16, 24)
_SIZES = (1.0, 30.0, 1e-3, 1.0)
_TOLERANCE = 1e-5  # kernels may round the last elements of a tensor in another way


def require(
    optimizer: Optimizer, base: type[Optimizer], step: InnerStep, verdict: Separability
) -> None:
    """Refuses an optimizer that cannot be sharded.

    Nothing runs or changes ``optimizer`` itself.

    Args:
        optimizer: of the user.
        base: the class whose ``step`` runs.
        step: from `partial_step.inner_step`.
        verdict: whether it is separable.

    Raises:
        InvalidUsage: it is not separable, or looks beyond each element.
    """
    name = f"{base.__module__}.{base.__qualname__}"
    if not verdict.separable:
        raise InvalidUsage(f"sharded=True: {verdict.reason}")
    for settings, like in _groups(optimizer):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                whole = _run(optimizer, base, step, settings, like, (0, _CUTS[-1]))
                pieces = _run(optimizer, base, step, settings, like, _CUTS)
        except Exception as error:  # any error of a foreign optimizer on a toy problem
            text = str(error).splitlines() or [""]
            raise InvalidUsage(
                f"sharded=True: {name} cannot update 1-d pieces of a parameter: in a trial, it "
                f"raised {type(error).__name__}: {text[0]}"
            ) from error
        if not torch.allclose(whole, pieces, rtol=_TOLERANCE, atol=0.0):
            raise InvalidUsage(
                f"sharded=True: {name} does not update each element by itself: in a trial, pieces "
                "of a matrix got other values than the whole. Leave sharded out"
            )


def _groups(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Each distinct settings of a group, with a parameter of that group."""
    tried: list[Any] = []
    for group, settings in zip(optimizer.param_groups, trial_settings(optimizer), strict=True):
        for like in group["params"][:1]:
            kind = (settings, like.dtype, like.device)
            if not any(same(kind, other) for other in tried):
                tried.append(kind)
                yield settings, like.detach()


def _run(
    optimizer: Optimizer,
    base: type[Optimizer],
    step: InnerStep,
    settings: dict[str, Any],
    like: torch.Tensor,
    cuts: tuple[int, ...],
) -> torch.Tensor:
    """Takes steps with a matrix that is cut at these elements; returns its elements after each."""
    numbers = torch.Generator().manual_seed(0)
    dtype = torch.float32 if like.element_size() < 4 else like.dtype

    def values() -> torch.Tensor:
        return torch.randn(_SHAPE, generator=numbers).to(device=like.device, dtype=dtype)

    matrix = values()
    is_whole = len(cuts) == 2
    pieces = [
        torch.nn.Parameter(matrix if is_whole else matrix.flatten()[begin:end].clone())
        for begin, end in itertools.pairwise(cuts)
    ]
    trial = trial_copy(optimizer, base, plain_only=True)
    owner, theirs = next(iter(optimizer.state.items()), (like, {}))
    for piece in pieces if theirs else ():
        trial.state[piece] = {
            key: value.to(dtype) if _is_narrow(value) else value
            for key, value in state_like(theirs, owner, piece).items()
        }
    results = []
    for size in _SIZES:
        gradient = values() * size
        for piece, (begin, end) in zip(pieces, itertools.pairwise(cuts), strict=True):
            piece.grad = gradient if is_whole else gradient.flatten()[begin:end].clone()
        trial.param_groups = [{"params": pieces, **copy.deepcopy(settings)}]
        step(trial)
        results.append(torch.cat([piece.detach().flatten() for piece in pieces]))
    return torch.stack(results)


def _is_narrow(value: object) -> bool:
    """Whether shards of 16-bit parameters have float32 in place of a value of their state."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize < 4
