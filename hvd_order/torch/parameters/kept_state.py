"""A parameter's state in the optimizer that the program can read as well: a kept state_dict.

``optimizer.state_dict()`` has the very dicts in which the optimizer keeps its state. Readers of
their tensors are guarded as readers of the parameter are. A program may also put other tensors
there, or take some out; the update that was deferred before must not see that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

__all__: list[str] = []


class KeptState:
    """The state of one parameter when ``step()`` deferred its update."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        """Records what the dict holds."""
        self._state = state
        self._recorded = dict(state)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """What the dict held."""
        return list(self._recorded.values())

    @contextlib.contextmanager
    def as_at_step(self) -> Iterator[None]:
        """A context in which the dict holds again what it held."""
        now = dict(self._state)
        same = now.keys() == self._recorded.keys()
        if same and all(value is self._recorded[key] for key, value in now.items()):
            yield
            return
        self._put(self._recorded)
        try:
            yield
        finally:
            self._put(now)

    def _put(self, values: dict[str, torch.Tensor]) -> None:
        self._state.clear()
        self._state.update(values)


@contextlib.contextmanager
def as_at_step(states: Iterable[KeptState | None]) -> Iterator[None]:
    """A context in which all of these dicts hold what they held at ``step()``."""
    with contextlib.ExitStack() as contexts:
        for state in states:
            if state is not None:
                contexts.enter_context(state.as_at_step())
        yield
