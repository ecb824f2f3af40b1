"""Makes the profile of one worker's step: its operators, what they leave out, and their times.

Some steps are recorded (recording.py), others only timed (plain_step.py): recording takes time
itself, so those say how much of a step operators leave out (outside.py).
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from hvd_order.base.errors import InvalidUsage
from hvd_order.planning.files.profile import (
    LEAST_RUNS,
    MeasuredLink,
    Profile,
    Timing,
    middle,
    unique,
)
from hvd_order.planning.graph.graph import GraphOp, GraphParameter
from hvd_order.planning.profiling.outside import ProfiledStep, TimedOp, with_outside
from hvd_order.planning.profiling.plain_step import PlainStep
from hvd_order.planning.profiling.recording import Clock, ModuleWatch, StepRecording

__all__ = ["Profiler", "is_recorded", "record_profile"]


def record_profile(
    step: Callable[[], object],
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    model: str = "model",
    runs: int = LEAST_RUNS,
    warm_up: int = 2,
    link: MeasuredLink | None = None,
    clock: Clock = time.perf_counter,
) -> Profile:
    """Runs ``step`` several times and records its graph.

    Args:
        step: forward, backward and update; the same work each time.
        named_parameters: of the model.
        model: name, for display.
        runs: recorded steps, at least 5; as many others are only timed.
        warm_up: steps before them.
        link: the transport, if it was measured.
        clock: of the host, in seconds.

    Raises:
        InvalidUsage: too few runs, or the steps run different operators.
    """
    profiler = Profiler(dict(named_parameters), clock)
    for _ in range(warm_up):
        step()
    number = 0
    while profiler.steps < runs or profiler.plain_steps < runs:
        with profiler if is_recorded(number) else profiler.plain():
            step()
        number += 1
    return profiler.profile(model, link)


def is_recorded(number: int) -> bool:
    """Whether to record a step or only to time it; of 2 n steps, n even or not, about n each.

    Two of a kind follow each other, so that of steps that alternate both kinds get both.
    """
    return number % 4 in (1, 2)


class Profiler:
    """Records the steps that run inside ``with profiler:``, one at a time.

    Time outside of operators is known only with steps inside ``with profiler.plain():``. Not
    thread-safe; the threads of the backward pass are recorded.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        clock: Clock = time.perf_counter,
    ) -> None:
        """``parameters``: by name; the same tensor under two names counts once."""
        seen: set[int] = set()
        self._parameters: list[tuple[str, torch.nn.Parameter]] = []
        for name, parameter in parameters.items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                self._parameters.append((name, parameter))
        self._clock = clock
        self._modules = ModuleWatch()
        self._steps: list[StepRecording] = []
        self._plain: list[PlainStep] = []
        self._step: StepRecording | None = None

    @property
    def steps(self) -> int:
        """Number of recorded steps."""
        return len(self._steps)

    @property
    def plain_steps(self) -> int:
        """Number of steps that were only timed."""
        return len(self._plain)

    def __enter__(self) -> Profiler:
        """Starts recording a step."""
        self._step = StepRecording(self._parameters, self._modules, self._clock)
        self._step.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the step; one that ended with an exception does not count."""
        step, self._step = self._step, None
        assert step is not None
        step.__exit__(*exception)
        if exception[0] is None:
            self._steps.append(step)

    def plain(self) -> AbstractContextManager[object]:
        """A context for a step that is only timed; one that raises does not count."""
        return _PlainTiming(PlainStep(self._parameters, self._clock), self._plain)

    def profile(self, model: str = "model", link: MeasuredLink | None = None) -> Profile:
        """The profile of the steps recorded so far.

        Raises:
            InvalidUsage: fewer than five steps ran the same operators.
        """
        alike = self._alike()
        timed, between_s = self._timed(alike)
        names = unique([f"{op.call.phase}/{op.call.name}" for op in timed])
        ops = [
            GraphOp(name, 0.0, tuple(names[i] for i in op.inputs), tuple(op.call.reads),
               tuple(op.call.produces), op.call.resource, op.call.phase)
            for name, op in zip(names, timed, strict=True)
        ]  # fmt: skip
        on_device = any(call.events for call in alike[0].calls)
        machine = _machine(self._parameters)
        if between_s is not None:
            machine["between steps"] = f"{between_s * 1e3:.4g} ms, not part of the profile"
        return Profile(
            model,
            machine,
            tuple(GraphParameter(name, p.nbytes) for name, p in self._parameters),
            tuple(ops),
            {name: Timing.of(op.seconds) for name, op in zip(names, timed, strict=True)},
            link,
            "cuda_event" if on_device else "wall",
        )

    def _alike(self) -> list[StepRecording]:
        """The steps with the most frequent sequence of operators."""
        kinds = [tuple((c.name, tuple(c.inputs)) for c in step.calls) for step in self._steps]
        common, count = Counter(kinds).most_common(1)[0] if kinds else ((), 0)
        if count < LEAST_RUNS:
            raise InvalidUsage(
                f"{len(kinds)} steps were recorded, and at most {count} of them ran the same "
                f"operators; {LEAST_RUNS} are needed. Record more steps, of batches of one size"
            )
        return [step for step, kind in zip(self._steps, kinds, strict=True) if kind == common]

    def _timed(self, alike: Sequence[StepRecording]) -> tuple[list[TimedOp], float | None]:
        """All ops with their times, and the time between two steps."""
        calls = alike[0].calls
        steps = [ProfiledStep(step.marks, _seconds(step)) for step in alike]
        if not self._plain:
            return [
                TimedOp(call, list(call.inputs), [step.seconds[i] for step in steps])
                for i, call in enumerate(calls)
            ], None
        before = [plain.before_s for plain in self._plain]
        if any(seconds is None for seconds in before):
            whole_s = middle([plain.step_s for plain in self._plain])
            return with_outside(calls, steps, whole_s, None), None
        known = [seconds for seconds in before if seconds is not None]
        inside = [plain.step_s - s for plain, s in zip(self._plain, known, strict=True)]
        return with_outside(calls, steps, middle(inside), 0.0), middle(known)


class _PlainTiming:
    """Keeps a timed step that ends well."""

    def __init__(self, step: PlainStep, kept: list[PlainStep]) -> None:
        self._step = step
        self._kept = kept

    def __enter__(self) -> PlainStep:
        return self._step.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._step.__exit__(*exception)
        if exception[0] is None:
            self._kept.append(self._step)


def _seconds(step: StepRecording) -> list[float]:
    """The times of a step's operators; waits for the device."""
    if any(call.events for call in step.calls):
        torch.accelerator.synchronize()
    return [
        call.seconds if call.events is None else call.events[0].elapsed_time(call.events[1]) / 1e3
        for call in step.calls
    ]


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
