"""Records one step: its operators, and the time between them, by places.

Every ATen operator of a step passes a dispatch mode, in forward and in backward. So any model can
be recorded unchanged: branches, tied weights, functional code. Operators depend on each other
through the memory that they read and write; views cost nothing and are left out. The operator that
computed a gradient is identified when autograd has accumulated the gradient.

Time between operators is noted with the place where it passes: numpy, extensions and waits inside
of custom autograd functions are no operators. What the recording itself takes does not count, as
far as it can be told here; `outside.py` takes off the rest.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.module_tracker import ModuleTracker

from hvd_order.planning.graph.graph import Phase

__all__ = ["Clock", "Mark", "ModuleWatch", "OperatorCall", "StepRecording"]

Clock = Callable[[], float]

# Transfers are measured as a link, not as an op.
_TRANSFERS = {"c10d", "_c10d_functional"}
_NAMESPACES_LEFT_OUT = {*_TRANSFERS, "prim"}


@dataclass
class OperatorCall:
    """One operator of one step, timed by two events on a device, else by the clock.

    Attributes:
        inputs: indices of other calls in the step.
        new_memory: it reads memory that no operator has read or written before in the step.
    """

    name: str
    phase: Phase
    resource: str
    inputs: list[int]
    reads: list[str]
    produces: list[str] = field(default_factory=list)
    new_memory: bool = False
    seconds: float = 0.0
    events: tuple[torch.Event, torch.Event] | None = None


@dataclass
class Mark:
    """A place in a step where time outside of operators ends.

    Attributes:
        kind: what comes next there. "call": an operator. "gradient": autograd has accumulated a
            gradient. "view": a view of parameters was made, so that other code may read them.
            "enter": a module that owns parameters is called. "begin": the model begins. "update":
            an optimizer begins its step. "end": the step ends.
        names: of the parameters.
        call: number of operators before it.
        module: innermost module.
        unknown: the gradient's memory was written by no operator.
        pause_s: time since the mark before, or since the end of the operator before.
        passes: how often the recording was entered in that time, which takes time unseen.
    """

    kind: Literal["call", "gradient", "view", "enter", "begin", "update", "end"]
    names: tuple[str, ...]
    call: int
    module: str
    unknown: bool = False
    pause_s: float = 0.0
    passes: int = 1


class ModuleWatch(ModuleTracker):
    """Knows the innermost module, and tells a step of each module that is called.

    One for all steps, because it has to get to know each module once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step: StepRecording | None = None

    @property
    def innermost(self) -> str:
        """Its qualified name; "step" outside of all modules."""
        modules = self.parents - {"Global"}
        return max(modules, key=lambda name: (name.count("."), len(name)), default="step")

    def _fw_pre_hook(self, mod: torch.nn.Module, input: Any) -> None:
        step = self.step
        assert step is not None
        with step.own_work():
            super()._fw_pre_hook(mod, input)
            step.enters(mod)

    def _fw_post_hook(self, mod: torch.nn.Module, input: Any, output: Any) -> None:
        assert self.step is not None
        with self.step.own_work():
            super()._fw_post_hook(mod, input, output)


class StepRecording(TorchDispatchMode):
    """Records the operators of one step while it is entered.

    Attributes:
        calls: its operators.
        marks: places between them; all time outside of operators ends at one of them.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        modules: ModuleWatch,
        clock: Clock = time.perf_counter,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[OperatorCall] = []
        self.marks: list[Mark] = []
        self._names = {id(p): name for name, p in parameters}
        self._parameters = {_memory(p): name for name, p in parameters}
        self._writer: dict[int, int] = {}  # memory to the last call that wrote it
        self._seen: set[int] = set()  # memory that calls have read
        self._kept: list[torch.UntypedStorage] = []  # so that no address is used twice in a step
        self._modules = modules
        self._begun = False
        self._clock = clock
        self._last = 0.0  # the recording's last work has ended then
        self._pause_s = 0.0
        self._passes = 0
        self._depth = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(name))
            for name, parameter in parameters
            if parameter.requires_grad
        ]

    def __enter__(self) -> StepRecording:
        self._modules.step = self
        self._modules.__enter__()  # type: ignore[no-untyped-call]
        _update_watch().step = self
        super().__enter__()  # type: ignore[no-untyped-call]
        self._last = self._clock()
        return self

    def __exit__(self, *exception: Any) -> None:
        with self.own_work():
            self._mark("end")
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        _update_watch().step = None
        self._modules.__exit__(*exception)  # type: ignore[no-untyped-call]
        self._modules.step = None
        for hook in self._hooks:
            hook.remove()
        self._kept.clear()

    def own_work(self) -> _OwnWork:
        """A context whose time is the recording's own."""
        return _OwnWork(self)

    def enters(self, module: torch.nn.Module) -> None:
        """Notes that a module is called."""
        if not self._begun and any(id(p) in self._names for p in module.parameters()):
            self._begun = True
            self._mark("begin")
        own = [self._names[id(p)] for p in module._parameters.values() if id(p) in self._names]
        if own:
            self._mark("enter", own)

    def update_begins(self) -> None:
        """Notes that an optimizer begins its step."""
        with self.own_work():
            self._mark("update")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the operator and records it."""
        del types
        kwargs = kwargs or {}
        with self.own_work():
            if func.namespace in _NAMESPACES_LEFT_OUT or func.is_view:
                return self._left_out(func, args, kwargs)
            return self._recorded(func, args, kwargs)

    def _left_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.is_view:
            viewed = [self._parameters.get(_memory(t)) for t in _tensors(args)]
            names = [name for name in viewed if name is not None]
            if names and self._phase() != "update":
                self._mark("view", names)
        begin = self._clock()
        result = func(*args, **kwargs)
        if func.namespace not in _TRANSFERS:
            self._pause_s += self._clock() - begin
        return result

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = list(_tensors((args, kwargs)))
        before = [_memory(tensor) for tensor in inputs]
        device = next((tensor.device for tensor in inputs), torch.device("cpu"))
        events = None
        if device.type == "cpu":
            begin = self._clock()
            result = func(*args, **kwargs)
            seconds = self._clock() - begin
        else:
            events = (_event(device), _event(device))
            events[0].record()
            result = func(*args, **kwargs)
            events[1].record()
            seconds = 0.0
        written = self._written(func, args, kwargs, result)
        if (
            not written
        ):  # a question about a tensor, such as item(); a device's answer is a wait for it
            self._pause_s += seconds
            return result
        phase = self._phase()
        read = dict.fromkeys(self._parameters[m] for m in before if m in self._parameters)
        if read and not self._begun:
            self._begun = True
            self._mark("begin")
        self._mark("call")
        place = len(self.calls)
        new = [t for t, m in zip(inputs, before, strict=True) if self._is_new(m)]
        self.calls.append(
            OperatorCall(
                f"{self._modules.innermost}/{func.__name__.partition('.')[0]}",
                phase,
                "compute" if device.type == "cpu" else _stream(device),
                sorted({self._writer[m] for m in before if m in self._writer}),
                [] if phase == "update" else list(read),  # an update gives readers' inputs
                new_memory=bool(new),
                seconds=seconds,
                events=events,
            )
        )
        self._seen.update(before)
        self._kept += [tensor.untyped_storage() for tensor in new]
        for tensor in written:
            memory = _memory(tensor)
            if memory not in self._parameters:  # its readers wait for the transfer instead
                self._writer[memory] = place
            self._kept.append(tensor.untyped_storage())
        return result

    def _is_new(self, memory: int) -> bool:
        return not any(memory in known for known in (self._seen, self._writer, self._parameters))

    def _written(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> list[torch.Tensor]:
        written = list(_tensors(result))
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written += _tensors(value)
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written += _tensors(kwargs.get(argument.name))
        return written

    def _phase(self) -> Phase:
        if _update_watch().updating:
            return "update"
        return "backward" if torch._C._current_graph_task_id() != -1 else "forward"

    def _mark(self, kind: Any, names: Sequence[str] = (), unknown: bool = False) -> None:
        module = self._modules.innermost
        passes, self._passes = self._passes, 0
        pause_s, self._pause_s = self._pause_s, 0.0
        place = len(self.calls)
        self.marks.append(Mark(kind, tuple(names), place, module, unknown, pause_s, passes))

    def _gradient_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            with self.own_work():
                if parameter.grad is not None:
                    place = self._writer.get(_memory(parameter.grad))
                    if place is not None:
                        self.calls[place].produces.append(name)
                    self._mark("gradient", [name], unknown=place is None)

        return hook


class _OwnWork:
    """The time inside is the recording's; what has passed since it last ended is a pause."""

    def __init__(self, step: StepRecording) -> None:
        self._step = step

    def __enter__(self) -> None:
        step = self._step
        step._depth += 1
        if step._depth == 1:  # an operator's own code may call modules
            step._pause_s += max(step._clock() - step._last, 0.0)
            step._passes += 1

    def __exit__(self, *_: object) -> None:
        step = self._step
        step._depth -= 1
        step._last = step._clock()


class _UpdateWatch:
    """Watches all optimizers of this process, from the first recorded step on.

    Attributes:
        updating: an optimizer's step() is running.
        step: is being recorded.
    """

    def __init__(self) -> None:
        self.updating = False
        self.step: StepRecording | None = None
        register_optimizer_step_pre_hook(self._begins)
        register_optimizer_step_post_hook(self._ends)

    def _begins(self, *_: object) -> None:
        self.updating = True
        if self.step is not None:
            self.step.update_begins()

    def _ends(self, *_: object) -> None:
        self.updating = False


@functools.cache
def _update_watch() -> _UpdateWatch:
    """Returns the one watch: its hooks stay, since optimizers may run while one is removed."""
    return _UpdateWatch()


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    """Distinguishes the memory of two tensors while both exist."""
    return int(tensor.untyped_storage()._cdata)


def _event(device: torch.device) -> torch.Event:
    return torch.Event(device, enable_timing=True)


def _stream(device: torch.device) -> str:
    return f"stream {torch.accelerator.current_stream(device).stream_id}"
