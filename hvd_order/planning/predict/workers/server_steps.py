"""A step of synchronous workers with parameter servers, op by op and slice by slice."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

from hvd_order.planning.predict.simulate import OpTimes, SliceTimes
from hvd_order.planning.predict.simulated_step import StepTimes
from hvd_order.planning.predict.workers.throughput import Cluster, simulate_servers
from hvd_order.planning.predict.workers.worker_step import WorkerStep

__all__ = ["ServerSteps"]

_Interval = tuple[float, float]


class ServerSteps:
    """Steps of synchronous workers of one speed, whose durations do not vary: all do the same.

    Attributes:
        steady_s: step time, the mean over the later half of the steps.
    """

    def __init__(
        self, step: WorkerStep, cluster: Cluster, workers: int, servers: int, steps: int
    ) -> None:
        """Trains in virtual time.

        Args:
            step: with one measured step.
            steps: 3 or more.

        Raises:
            InvalidUsage: the numbers are impossible; the message says which.
        """
        self._step, self._cluster = step, cluster
        self._result = simulate_servers(
            step, cluster, [1.0] * workers, servers, "sync", steps,
            program_order=True, recorded=steps,
        )  # fmt: skip
        self._starts_s = [0.0, *self._result.step_ends_s[0]]
        step_s = [
            end - begin for begin, end in zip(self._starts_s, self._starts_s[1:], strict=False)
        ]
        self.steady_s = statistics.fmean(step_s[len(step_s) // 2 :])

    def times(self) -> StepTimes:
        """The last step but one of worker 0: its pulls are part of the last."""
        number = len(self._starts_s) - 3
        before, mine = (self._slices(step) for step in (number - 1, number))
        links = {
            name: list(_union((t[3], t[4]) for t in self._result.transfers if t[0] == is_pull))
            for name, is_pull in (("worker 0 up", False), ("worker 0 down", True))
        }
        begin_s, end_s = self._starts_s[number : number + 2]
        return StepTimes(begin_s, end_s, self._ops(number), [], links, before, mine)

    def _ends_s(self, number: int) -> list[float]:
        count = len(self._step.ops)
        return self._result.op_ends_s[0][number * count :][:count]

    def _ops(self, number: int) -> list[OpTimes]:
        """Times of the computations; a stream runs them one after the other."""
        ends_s = self._ends_s(number)
        free_s: dict[int, float] = {}
        found = []
        for i, (op, seconds) in enumerate(
            zip(self._step.ops, self._step.op_seconds[0], strict=True)
        ):
            if op.kind != "compute":
                continue
            inputs = [ends_s[k] for k in op.inputs if self._step.ops[k].kind == "compute"]
            could_s = max([free_s.get(op.stream, self._starts_s[number]), *inputs])
            free_s[op.stream] = ends_s[i]
            found.append(OpTimes(op.name, could_s, max(could_s, ends_s[i] - seconds), ends_s[i]))
        return found

    def _slices(self, number: int) -> list[SliceTimes]:
        """What a step has pushed and the next one reads."""
        ends_s = self._ends_s(number)
        ready_s = {
            op.tensor: max(ends_s[k] for k in op.inputs)
            for op in self._step.ops
            if op.kind == "push"
        }
        times = self._result.transfers
        pushed_s = {t[1]: t[3] for t in times if not t[0] and t[2] == number}
        pulled_s = {t[1]: t[4] for t in times if t[0] and t[2] == number + 1}
        # A request has its latency before the bytes, an answer behind them.
        late_s = self._cluster.pull.latency_s if self._cluster.pulls == "answer" else 0.0
        return [
            SliceTimes(name, size, ready_s[i], ready_s[i], pushed_s[i], pulled_s[i] + late_s)
            for i, (name, size) in enumerate(
                zip(self._step.tensor_names, self._step.tensor_bytes, strict=True)
            )
        ]  # fmt: skip


def _union(intervals: Iterable[_Interval]) -> Iterator[_Interval]:
    """Merges intervals that overlap or touch."""
    begin_s = until_s = None
    for first_s, last_s in sorted(intervals):
        if begin_s is None or until_s is None:
            begin_s, until_s = first_s, last_s
        elif first_s <= until_s:
            until_s = max(until_s, last_s)
        else:
            yield begin_s, until_s
            begin_s, until_s = first_s, last_s
    if begin_s is not None and until_s is not None:
        yield begin_s, until_s
