"""Whether an optimizer updates each element of a parameter by itself, so that shards of it can be
updated by different ranks.

Beside what `separability` demands, a trial updates a matrix as a whole and in 1-d pieces. Norms of
parameters (LARS, LAMB), factored moments (Adafactor) and operations on matrices (Muon) show.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from hvd_order.errors import InvalidUsage
from hvd_order.torch.updates.partial_step import InnerStep, snapshot
from hvd_order.torch.updates.separability import Verdict
from hvd_order.torch.updates.separability_trial import is_plain

__all__: list[str] = []

_SHAPE = (6, 4)
_CUTS = (0, 5, 16, 24)
_SIZES = (1.0, 30.0, 1e-3, 1.0)
_TOLERANCE = 1e-5  # kernels may round the last elements of a tensor in another way


def require(optimizer: Optimizer, base: type[Optimizer], step: InnerStep, verdict: Verdict) -> None:
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
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = _run(optimizer, base, step, (0, _CUTS[-1]))
            pieces = _run(optimizer, base, step, _CUTS)
    except Exception as error:  # any error of a foreign optimizer on a toy problem
        text = str(error).splitlines() or [""]
        raise InvalidUsage(
            f"sharded=True: {name} cannot update 1-d pieces of a parameter: in a trial, it raised "
            f"{type(error).__name__}: {text[0]}"
        ) from error
    if not torch.allclose(whole, pieces, rtol=_TOLERANCE, atol=0.0):
        raise InvalidUsage(
            f"sharded=True: {name} does not update each element by itself: in a trial, pieces of a "
            "matrix got other values than the whole. Leave sharded out"
        )


def _run(
    optimizer: Optimizer, base: type[Optimizer], step: InnerStep, cuts: tuple[int, ...]
) -> torch.Tensor:
    """Takes steps with a matrix that is cut at these elements; returns its elements after each."""
    numbers = torch.Generator().manual_seed(0)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    like = parameters[0].detach() if parameters else torch.empty(0)
    dtype = torch.float32 if like.element_size() < 4 else like.dtype

    def values() -> torch.Tensor:
        return torch.randn(_SHAPE, generator=numbers).to(device=like.device, dtype=dtype)

    matrix = values()
    is_whole = len(cuts) == 2
    pieces = [
        torch.nn.Parameter(matrix if is_whole else matrix.flatten()[begin:end].clone())
        for begin, end in itertools.pairwise(cuts)
    ]
    trial: Any = base.__new__(base)
    memo: dict[int, Any] = {id(optimizer): trial}
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            setattr(trial, name, OrderedDict())
        elif name not in ("state", "param_groups", "step") and is_plain(value):
            setattr(trial, name, copy.deepcopy(value, memo))
    trial.state = defaultdict(dict)
    _begin_state(optimizer, like, trial, pieces)
    settings = snapshot(optimizer)[0]
    settings.pop("param_names", None)
    results = []
    for size in _SIZES:
        gradient = values() * size
        for piece, (begin, end) in zip(pieces, itertools.pairwise(cuts), strict=True):
            piece.grad = gradient if is_whole else gradient.flatten()[begin:end].clone()
        trial.param_groups = [{"params": pieces, **copy.deepcopy(settings)}]
        step(trial)
        results.append(torch.cat([piece.detach().flatten() for piece in pieces]))
    return torch.stack(results)


def _begin_state(
    optimizer: Optimizer, like: torch.Tensor, trial: Any, pieces: list[torch.nn.Parameter]
) -> None:
    """State as the optimizer has made it for its own parameters at its construction (Adagrad)."""
    theirs = next(iter(optimizer.state.values()), None)
    owner = next(iter(optimizer.state), like)
    for piece in pieces if theirs else ():
        trial.state[piece] = {
            key: torch.full_like(piece, float(value.flatten()[0]))
            if isinstance(value, torch.Tensor) and value.shape == owner.shape and key != "step"
            else copy.deepcopy(value)
            for key, value in (theirs or {}).items()
        }
