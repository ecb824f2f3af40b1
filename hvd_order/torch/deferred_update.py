"""Runs the user's own optimizer on some of its parameters, as it was set at a past step.

Any ``torch.optim.Optimizer`` serves: for the time of one inner step its parameter groups list
only the parameters that are due, so that its foreach and fused kernels still take many tensors at
once.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

__all__: list[str] = []

InnerStep = Callable[..., Any]
HyperParameters = list[dict[str, Any]]


def inner_step(optimizer_class: type[Optimizer]) -> InnerStep:
    """``optimizer_class.step`` without the wrapper that runs step hooks.

    Step hooks are the user's and fire once a step, however many parts the update has.
    """
    step: Any = optimizer_class.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def snapshot(optimizer: Optimizer) -> HyperParameters:
    """The hyper-parameters of every group as they are now; a scheduler may change them any time."""
    return [
        {
            # Only a tensor (a learning rate on the device) or a list can be changed in place.
            key: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


class RecordedStep:
    """One ``step()``, put off: what it would do now can be done later, to some at a time."""

    def __init__(self, optimizer: Optimizer, step: InnerStep) -> None:
        """Takes down groups and hyper-parameters.

        Args:
            step: from :func:`inner_step`.
        """
        self._optimizer = optimizer
        self._step = step
        self._hyper_parameters = snapshot(optimizer)
        groups = optimizer.param_groups
        self._group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        self._devices = {p.device.type for group in groups for p in group["params"]}

    def run(self, due: Iterable[torch.Tensor]) -> None:
        """Updates the parameters in ``due``, whose ``.grad`` is set, and no others."""
        # It runs once for every few parameters: what it costs must not depend on how many there
        # are.
        members: list[list[torch.Tensor]] = [[] for _ in self._hyper_parameters]
        for parameter in due:
            group = self._group_of.get(id(parameter))
            if group is not None:
                members[group].append(parameter)
        optimizer = self._optimizer
        groups = optimizer.param_groups
        optimizer.param_groups = [
            {"params": parameters, **values}
            for parameters, values in zip(members, self._hyper_parameters, strict=True)
            if parameters
        ]
        try:
            if self._is_as_in_step():
                self._step(optimizer)
            else:
                with self._as_in_step():
                    self._step(optimizer)
        finally:
            optimizer.param_groups = groups

    def _is_as_in_step(self) -> bool:
        return (
            torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()
            and not any(map(torch.is_autocast_enabled, self._devices))
        )

    @contextlib.contextmanager
    def _as_in_step(self) -> Iterator[None]:
        """The modes that ``step()`` runs under, whatever the reader of a parameter runs under.

        State made in inference mode could never be changed outside of it; autocast would round.
        """
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.enable_grad())
            for device in self._devices:
                modes.enter_context(torch.autocast(device, enabled=False))
            yield


def is_separable(optimizer: Optimizer, step: InnerStep) -> bool:
    """Whether updating parameters in parts gives the same as updating them at once.

    It is tried out: two small parameters, three steps, together and one by one, with a copy of this
    optimizer's class and hyper-parameters. Optimizers that look across parameters (LBFGS) or keep
    counters in their groups differ or fail; they are updated at once, in ``step()``.
    """
    if not any(group["params"] for group in optimizer.param_groups):
        return False
    # Some (Adagrad) make their state with the optimizer, not in the first step.
    for with_state in (False, True):
        try:
            with torch.random.fork_rng():
                together = _trial(optimizer, step, [[0, 1]], with_state)
                in_parts = _trial(optimizer, step, [[1], [0]], with_state)
        except Exception:  # whatever a foreign optimizer raises on a toy problem: do not defer it
            continue
        return all(torch.equal(a, b) for a, b in zip(together, in_parts, strict=True))
    return False


def _copy_without_parameters(optimizer: Optimizer) -> Optimizer:
    """Has attributes of its own, so that a trial leaves no trace in the user's optimizer."""
    trial = optimizer.__class__.__new__(optimizer.__class__)
    own: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):  # not called by the inner step; may hold on to anything
            setattr(trial, name, value)
        elif name not in ("state", "param_groups"):
            setattr(trial, name, copy.deepcopy(value, own))
    return trial


def _state_like(
    state: dict[str, Any], parameter: torch.Tensor, toy: torch.Tensor
) -> dict[str, Any]:
    """State for ``toy`` with the fields that ``parameter`` has, and numbers of its size."""
    return {
        key: value.flatten()[0].expand_as(toy).clone()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        else copy.deepcopy(value)
        for key, value in state.items()
    }


def _trial(
    optimizer: Optimizer, step: InnerStep, parts: list[list[int]], with_state: bool
) -> list[torch.Tensor]:
    like = next(p for group in optimizer.param_groups for p in group["params"])
    generator = torch.Generator().manual_seed(0)

    def values() -> torch.Tensor:
        numbers = torch.randn(4, 4, generator=generator)
        return numbers.to(device=like.device, dtype=like.dtype)

    toys = [torch.nn.Parameter(values()) for _ in range(2)]
    trial = _copy_without_parameters(optimizer)
    trial.state = defaultdict(dict)
    if with_state:
        for toy in toys:
            trial.state[toy] = _state_like(optimizer.state[like], like, toy)
    hyper_parameters = snapshot(optimizer)[0]
    hyper_parameters.pop("param_names", None)
    for _ in range(3):
        gradients = [values() for _ in toys]
        for part in parts:
            for i in part:
                toys[i].grad = gradients[i]
            group = {"params": [toys[i] for i in part], **hyper_parameters}
            trial.param_groups = [group]
            step(trial)
            del group["params"]
            if repr(group) != repr(hyper_parameters):
                raise ValueError("the optimizer keeps state in its groups")
    return [toy.detach() for toy in toys]
