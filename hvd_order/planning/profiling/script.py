"""Profiles an unchanged training script: ``hvd-order profile train.py``."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hvd_order.planning.files.profile import Profile
from hvd_order.planning.profiling.profiler import Profiler, is_recorded
from hvd_order.planning.run_script import Enough, run_script, too_few

__all__ = ["WARM_UP", "profile_script"]

WARM_UP = 2


def profile_script(
    script: Path, arguments: Sequence[str], runs: int, warm_up: int = WARM_UP
) -> Profile:
    """Runs a script until enough steps of its optimizer have been recorded, then stops it.

    A step goes from the end of one ``optimizer.step()`` to the end of the next. With several
    optimizers, the first one to step defines the steps; ``step()`` calls of the other optimizers
    are part of them. As many steps as are recorded are only timed, in turn with them.

    Args:
        script: a Python file that trains in one process.
        arguments: arguments of the script.
        runs: steps to record, at least 5.
        warm_up: steps before them.

    Raises:
        InvalidUsage: the script ended too early, or its steps run different operators.
    """
    recorder = _Recorder(runs, warm_up)
    try:
        run_script(script, arguments)
    finally:
        recorder.close()
    profiler = recorder.profiler
    if profiler is None or profiler.steps < runs or profiler.plain_steps < runs:
        raise too_few(script, recorder.steps, f"{warm_up} + 2 * {runs}")
    return profiler.profile(script.stem)


class _Recorder:
    """Records the first optimizer that takes a step."""

    def __init__(self, runs: int, warm_up: int) -> None:
        self.profiler: Profiler | None = None
        self.steps = 0
        self._runs = runs
        self._warm_up = warm_up
        self._optimizer: torch.optim.Optimizer | None = None
        self._now: AbstractContextManager[object] | None = None
        self._closed = False
        # The hook stays, because hooks cannot be removed while an optimizer runs them.
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def close(self) -> None:
        """Ends a step that the script left unfinished."""
        self._closed = True
        self._stop(whole=False)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._optimizer is None and not self._closed:
            self._optimizer = optimizer
            self.profiler = Profiler(_named_parameters(optimizer))

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer is not self._optimizer or self._closed:
            return
        assert self.profiler is not None
        self.steps += 1
        self._stop(whole=True)
        number = self.steps - self._warm_up
        if number >= 2 * self._runs:
            raise Enough
        if number >= 0:
            recorded = is_recorded(number) and self.profiler.steps < self._runs
            recorded = recorded or self.profiler.plain_steps == self._runs
            self._now = self.profiler if recorded else self.profiler.plain()
            self._now.__enter__()

    def _stop(self, whole: bool) -> None:
        """Ends a step, if one is under way."""
        now, self._now = self._now, None
        if now is not None:
            now.__exit__(*((None,) * 3 if whole else (Enough, None, None)))


def _named_parameters(optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """The optimizer's parameters, with their names in a module if one has them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    wanted = {id(p) for p in parameters}
    best: dict[int, str] = {}
    for module in [m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module)]:
        names = {id(p): name for name, p in module.named_parameters() if id(p) in wanted}
        if len(names) > len(best):
            best = names
    return {best.get(id(p), f"parameter {i}"): p for i, p in enumerate(parameters)}
