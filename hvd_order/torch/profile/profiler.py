"""Records a profile: the operators of one worker's step, with their times.

Every ATen operator of a step passes a dispatch mode, in forward and in backward. So any model can
be recorded unchanged: branches, tied weights, functional code. Operators depend on each other
through the memory that they read and write; views cost nothing and are left out. The operator that
computed a gradient is identified when autograd has accumulated the gradient.
"""

from __future__ import annotations

import functools
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.module_tracker import ModuleTracker

from hvd_order.errors import InvalidUsage
from hvd_order.plan.files.profile import LEAST_RUNS, MeasuredLink, Profile, Timing
from hvd_order.plan.graph.graph import Op, Parameter, Phase

__all__ = ["Profiler", "record_profile"]

# Transfers are measured as a link, not as an op.
_NAMESPACES_LEFT_OUT = {"c10d", "_c10d_functional", "prim"}


def record_profile(
    step: Callable[[], object],
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    model: str = "model",
    runs: int = LEAST_RUNS,
    warm_up: int = 2,
    link: MeasuredLink | None = None,
) -> Profile:
    """Runs ``step`` several times and records its graph.

    Args:
        step: forward, backward and update; the same work each time.
        named_parameters: of the model.
        model: name, for display.
        runs: recorded steps, at least 5.
        warm_up: steps before them.
        link: the transport, if it was measured.

    Raises:
        InvalidUsage: too few runs, or the steps run different operators.
    """
    profiler = Profiler(dict(named_parameters))
    for _ in range(warm_up):
        step()
    for _ in range(runs):
        with profiler:
            step()
    return profiler.profile(model, link)


@dataclass
class _Call:
    """One operator of one step, timed by two events on a device, else by the clock."""

    name: str
    phase: Phase
    resource: str
    inputs: list[int]  # indices of other calls in the step
    reads: list[str]
    produces: list[str] = field(default_factory=list)
    seconds: float = 0.0
    events: tuple[torch.Event, torch.Event] | None = None


class Profiler:
    """Records the steps that run inside ``with profiler:``, one at a time.

    Not thread-safe; the threads of the backward pass are recorded.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """``parameters``: by name; the same tensor under two names counts once."""
        self._names: dict[int, str] = {}
        self._parameters: list[tuple[str, torch.nn.Parameter]] = []
        for name, parameter in parameters.items():
            if id(parameter) not in self._names:
                self._names[id(parameter)] = name
                self._parameters.append((name, parameter))
        self._steps: list[list[_Call]] = []
        self._step: _Step | None = None

    @property
    def steps(self) -> int:
        """Number of recorded steps."""
        return len(self._steps)

    def __enter__(self) -> Profiler:
        """Starts recording a step."""
        self._step = _Step(self._parameters)
        self._step.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the step; one that ended with an exception does not count."""
        step, self._step = self._step, None
        assert step is not None
        step.__exit__(*exception)
        if exception[0] is None:
            self._steps.append(step.calls)

    def profile(self, model: str = "model", link: MeasuredLink | None = None) -> Profile:
        """The profile of the steps recorded so far.

        Raises:
            InvalidUsage: fewer than five steps ran the same operators.
        """
        alike = self._alike()
        times = _seconds(alike)
        first = alike[0]
        names = _unique([f"{call.phase}/{call.name}" for call in first])
        ops = [
            Op(name, 0.0, tuple(names[i] for i in call.inputs), tuple(call.reads),
               tuple(call.produces), call.resource, call.phase)
            for name, call in zip(names, first, strict=True)
        ]  # fmt: skip
        on_device = any(call.events for call in first)
        return Profile(
            model,
            _machine(self._parameters),
            tuple(Parameter(name, p.nbytes) for name, p in self._parameters),
            tuple(ops),
            {name: Timing.of(runs) for name, runs in zip(names, times, strict=True)},
            link,
            "cuda_event" if on_device else "wall",
        )

    def _alike(self) -> list[list[_Call]]:
        """The steps with the most frequent sequence of operators."""
        kinds = [tuple((call.name, tuple(call.inputs)) for call in step) for step in self._steps]
        common, count = Counter(kinds).most_common(1)[0] if kinds else ((), 0)
        if count < LEAST_RUNS:
            raise InvalidUsage(
                f"{len(kinds)} steps were recorded, and at most {count} of them ran the same "
                f"operators; {LEAST_RUNS} are needed. Record more steps, of batches of one size"
            )
        return [step for step, kind in zip(self._steps, kinds, strict=True) if kind == common]


class _Step(TorchDispatchMode):
    """Records the operators of one step."""

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self._parameters = {_memory(p): name for name, p in parameters}
        self._writer: dict[int, int] = {}  # memory to the last call that wrote it
        self._kept: list[torch.UntypedStorage] = []  # so that no address is used twice in a step
        self._tracker: Any = ModuleTracker()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(name))
            for name, parameter in parameters
            if parameter.requires_grad
        ]
        _update_watch()

    def __enter__(self) -> _Step:
        self._tracker.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._tracker.__exit__(*exception)
        for hook in self._hooks:
            hook.remove()
        self._kept.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the operator and records it."""
        del types
        kwargs = kwargs or {}
        if func.namespace in _NAMESPACES_LEFT_OUT or func.is_view:
            return func(*args, **kwargs)
        before = [_memory(t) for t in _tensors((args, kwargs))]
        device = next((t.device for t in _tensors((args, kwargs))), torch.device("cpu"))
        events = None
        if device.type == "cpu":
            begin = time.perf_counter()
            result = func(*args, **kwargs)
            seconds = time.perf_counter() - begin
        else:
            events = (_event(device), _event(device))
            events[0].record()
            result = func(*args, **kwargs)
            events[1].record()
            seconds = 0.0
        written = self._written(func, args, kwargs, result)
        if not written:
            return result  # a question about a tensor, such as item()
        place = len(self.calls)
        phase = self._phase()
        read = dict.fromkeys(self._parameters[m] for m in before if m in self._parameters)
        self.calls.append(
            _Call(
                self._name(func),
                phase,
                "compute" if device.type == "cpu" else _stream(device),
                sorted({self._writer[m] for m in before if m in self._writer}),
                [] if phase == "update" else list(read),  # an update gives readers' inputs
                seconds=seconds,
                events=events,
            )
        )
        for tensor in written:
            memory = _memory(tensor)
            if memory not in self._parameters:  # its readers wait for the transfer instead
                self._writer[memory] = place
            self._kept.append(tensor.untyped_storage())
        return result

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

    def _name(self, func: Any) -> str:
        modules = self._tracker.parents - {"Global"}
        innermost = max(modules, key=lambda name: (name.count("."), len(name)), default="step")
        return f"{innermost}/{func.__name__.partition('.')[0]}"

    def _phase(self) -> Phase:
        if _update_watch().updating:
            return "update"
        return "backward" if torch._C._current_graph_task_id() != -1 else "forward"

    def _gradient_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                place = self._writer.get(_memory(parameter.grad))
                if place is not None:
                    self.calls[place].produces.append(name)

        return hook


class _UpdateWatch:
    """Watches all optimizers of this process, from the first recorded step on.

    Attributes:
        updating: an optimizer's step() is running.
    """

    def __init__(self) -> None:
        self.updating = False
        register_optimizer_step_pre_hook(self._begins)
        register_optimizer_step_post_hook(self._ends)

    def _begins(self, *_: object) -> None:
        self.updating = True

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


def _seconds(steps: Sequence[Sequence[_Call]]) -> list[list[float]]:
    """The times of each op in all steps."""
    if any(call.events for call in steps[0]):
        torch.accelerator.synchronize()
    times: list[list[float]] = [[] for _ in steps[0]]
    for step in steps:
        for runs, call in zip(times, step, strict=True):
            if call.events is None:
                runs.append(call.seconds)
            else:
                runs.append(call.events[0].elapsed_time(call.events[1]) / 1e3)
    return times


def _unique(names: Sequence[str]) -> list[str]:
    """The same names, with a number appended to repeated ones."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return unique


def _machine(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> dict[str, str]:
    devices = {p.device for _, p in parameters}
    names = [
        torch.cuda.get_device_name(d) if d.type == "cuda" else platform.processor() or d.type
        for d in sorted(devices, key=str)
    ]
    return {
        "host": platform.node(),
        "device": ", ".join(names),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }
