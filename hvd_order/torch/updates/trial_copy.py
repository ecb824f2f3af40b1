"""Copies of an optimizer, of its settings and of its state, on which a trial can run.

Nothing of the user's optimizer runs or changes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from hvd_order.torch.updates.partial_step import HyperParameters, snapshot
from hvd_order.torch.updates.values import is_plain

__all__: list[str] = []


def trial_copy(optimizer: Optimizer, base: type[Optimizer], plain_only: bool) -> Any:
    """An optimizer of the same class with copies of the attributes, without groups and state.

    Args:
        base: the class whose ``step`` runs.
        plain_only: only attributes that are settings are copied.
    """
    trial = base.__new__(base)
    memo: dict[int, Any] = {id(optimizer): trial}
    own = vars(trial)
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):  # never called by the inner step
            own[name] = OrderedDict()
        elif name not in ("state", "param_groups", "step") and (not plain_only or is_plain(value)):
            own[name] = copy.deepcopy(value, memo)
    state: Any = optimizer.state
    # An optimizer may have put a plain dict in its place.
    trial.state = defaultdict(dict) if isinstance(state, defaultdict) else type(state)()
    return trial


def trial_settings(optimizer: Optimizer) -> HyperParameters:
    """The hyper-parameters of every group, without what names the user's parameters."""
    groups = snapshot(optimizer)
    for settings in groups:
        settings.pop("param_names", None)
    return groups


def state_like(
    state: Mapping[str, Any], parameter: torch.Tensor, toy: torch.Tensor
) -> dict[str, Any]:
    """State for ``toy`` with the fields of ``parameter``'s state, and numbers of similar size.

    Some optimizers (Adagrad) make state at their construction.
    """
    return {
        key: value.flatten()[0].expand_as(toy).clone()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != "step"
        else copy.deepcopy(value)
        for key, value in state.items()
    }
