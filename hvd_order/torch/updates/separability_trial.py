"""Tests whether an optimizer gives the same result when its parameters are updated in parts.

The trial is never by itself a reason to defer updates; the reading of the class or the user's
declaration is (separability.py). The trial is the second check. It works on its own object,
parameters and state; it only reads the user's.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hvd_order.torch.updates.partial_step import InnerStep
from hvd_order.torch.updates.trial_copy import state_like, trial_copy, trial_settings
from hvd_order.torch.updates.values import same

__all__: list[str] = []

_TOYS = 3
_AT_ONCE = [[0, 1, 2]]
_IN_PARTS = [[2], [1], [0]]
_SHAPE = (4, 4)  # some optimizers take matrices only


class _DifferenceError(Exception):
    """Reports a difference; the text is the end of "in a trial, ..."."""


def difference(
    optimizer: Optimizer, base: type[Optimizer], step: InnerStep, known: bool
) -> str | None:
    """The difference when parameters are updated in parts; None if there is none.

    Copies of this optimizer update three parameters together and one by one. Gradients have many
    sizes, including infinite and undefined ones. Weights, state, attributes, groups and random
    generators have to agree after every step.

    Args:
        base: the class whose ``step`` runs.
        step: from :func:`partial_step.inner_step`.
        known: the class has been read, so only plain settings among its attributes can matter.

    Returns:
        The end of a sentence that begins with "in a trial".
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    like = parameters[0] if parameters else torch.empty(0)
    generators = _Generators(like.device)
    failure = ""
    # Some optimizers (Adagrad) create their state at construction; some accept sparse gradients
    # only.
    for sparse, with_state in itertools.product((False, True), repeat=2):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trials = [
                    _TrialOptimizer(optimizer, base, step, known, like, with_state, sparse).run(
                        parts
                    )
                    for parts in (_AT_ONCE, _IN_PARTS)
                ]
            if generators.used():
                return "it drew random numbers"
            return _first_difference(*trials)
        except _DifferenceError as found:
            return str(found)
        except Exception as error:  # any error of a foreign optimizer on a toy problem
            failure = failure or f"it raised {type(error).__name__}: {error}"
        finally:
            generators.restore()
    return failure.splitlines()[0]


class _TrialOptimizer:
    """A copy of the optimizer, with its own parameters and state."""

    def __init__(
        self,
        optimizer: Optimizer,
        base: type[Optimizer],
        step: InnerStep,
        known: bool,
        like: torch.Tensor,
        with_state: bool,
        sparse: bool,
    ) -> None:
        self._step = step
        self._sparse = sparse
        self._like = like
        self._numbers = torch.Generator().manual_seed(0)
        self._toys = [torch.nn.Parameter(self._values()) for _ in range(_TOYS)]
        self._settings = trial_settings(optimizer)[:2]
        self._optimizer = trial_copy(optimizer, base, plain_only=known)
        theirs = optimizer.state.get(like, {}) if with_state else {}
        for toy in self._toys if theirs else ():
            self._optimizer.state[toy] = state_like(theirs, like, toy)

    def run(self, parts: list[list[int]]) -> list[dict[str, Any]]:
        """Takes steps, each in these parts, and returns the results after each."""
        return [self._take_step(sizes, parts) for sizes in self._sizes()]

    def _sizes(self) -> list[Sequence[float]]:
        """Factors of the gradients; only one parameter gets extreme values."""
        huge = max(torch.finfo(self._like.dtype).max ** 0.5 / 16, 1e3)
        return [
            (1, 1, 1), (1e-3, 1, 30), (1, 1e3, 1), (1, 1, huge), (1, 1, float("inf")),
            (1, 1, float("nan")), (1, 1, 1),
        ]  # fmt: skip

    def _take_step(self, sizes: Sequence[float], parts: list[list[int]]) -> dict[str, Any]:
        trial = self._optimizer
        for toy, size in zip(self._toys, sizes, strict=True):
            gradient = self._values() * size
            toy.grad = gradient.to_sparse(1) if self._sparse else gradient
        for part in parts:
            # As in a RecordedStep: groups list the parameters to update, and empty groups are left
            # out.
            groups: dict[int, dict[str, Any]] = {}
            for i in part:
                number = i % len(self._settings)
                settings = copy.deepcopy(self._settings[number])
                groups.setdefault(number, {"params": [], **settings})["params"].append(
                    self._toys[i]
                )
            trial.param_groups = list(groups.values())
            self._step(trial)
            for number, group in groups.items():
                del group["params"]
                if not same(group, self._settings[number]):
                    raise _DifferenceError("it writes into its parameter groups")
        toys = {id(toy): i for i, toy in enumerate(self._toys)}
        if any(id(key) not in toys for key in trial.state):
            raise _DifferenceError("it keeps state that belongs to no parameter")
        return {
            "weights": [toy.detach().clone() for toy in self._toys],
            "state": {toys[id(toy)]: copy.deepcopy(state) for toy, state in trial.state.items()},
            "attributes": {
                name: copy.deepcopy(value)
                for name, value in vars(trial).items()
                if name not in ("state", "param_groups") and not name.endswith("_hooks")
            },
        }

    def _values(self) -> torch.Tensor:
        numbers = torch.randn(_SHAPE, generator=self._numbers)
        return numbers.to(device=self._like.device, dtype=self._like.dtype)


def _first_difference(at_once: list[dict[str, Any]], in_parts: list[dict[str, Any]]) -> str | None:
    for one, other in zip(at_once, in_parts, strict=True):
        if not same(one["weights"], other["weights"]):
            return "updates in parts gave other weights than all at once"
        if not same(one["state"], other["state"]):
            return "updates in parts gave another state than all at once"
        names = sorted(one["attributes"].keys() | other["attributes"].keys())
        for name in names:
            if not same(one["attributes"].get(name), other["attributes"].get(name)):
                return f"its attribute '{name}' changed with every part of an update"
    return None


class _Generators:
    """The random generators that an optimizer may draw from."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._states()

    def _states(self) -> dict[str, Any]:
        states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            states["numpy"] = sys.modules["numpy"].random.get_state()
        if self._device.type not in ("cpu", "meta"):
            module = torch.get_device_module(self._device)
            states["device"] = module.get_rng_state(self._device)
        return states

    def used(self) -> bool:
        """Whether anything was drawn since the last restore."""
        return not same(self._states(), self._before)

    def restore(self) -> None:
        """Resets all generators to their recorded state."""
        random.setstate(self._before["python"])
        torch.set_rng_state(self._before["torch"])
        if "numpy" in self._before:
            sys.modules["numpy"].random.set_state(self._before["numpy"])
        if "device" in self._before:
            module = torch.get_device_module(self._device)
            module.set_rng_state(self._before["device"], self._device)
