"""Slots of a real cluster, handed from job to job by a runner that takes its time."""

from __future__ import annotations

from pathlib import Path

from helpers.property_cases import Choices, cases
from hypothesis import given
from hypothesis import strategies as st

from hvd_order.cluster.serve.jobs_file import ServedJob, job_of
from hvd_order.cluster.serve.processes import Processes
from hvd_order.cluster.serve.runner import JobStatus, Slots

MACHINES = {"a": 2, "b": 3}
JOBS = ("x", "y", "z")


class SlowRunner:
    """Jobs that change and stop some looks after they were told to."""

    def __init__(self, choices: Choices, resizes: bool) -> None:
        self.resizes = resizes
        self.choices = choices
        self.used: dict[str, set[tuple[str, int]]] = {}
        self.told: dict[str, set[tuple[str, int]]] = {}
        self.changes = 0

    def start(self, served: ServedJob, slots: Slots) -> None:
        assert served.job.name not in self.used
        self.used[served.job.name] = self.told[served.job.name] = flat(slots)
        self.check()

    def give(self, name: str, slots: Slots) -> None:
        assert self.resizes
        self.told[name] = flat(slots)
        self.used[name] |= flat(slots)  # it may use the new ones at once, and the old ones still
        self.changes += 1
        self.check()

    def stop(self, name: str) -> None:
        self.told[name] = set()

    def kill(self, name: str) -> None:
        raise AssertionError("nobody has to be killed")

    def look(self, name: str) -> JobStatus:
        if self.used[name] != self.told[name] and self.choices.below(3) == 0:
            self.used[name] = self.told[name]
        if not self.used[name]:
            del self.used[name]
            return JobStatus(running=False, code=143)
        return JobStatus(running=True, within_slots=self.used[name] == self.told[name])

    def find(self, name: str) -> Slots | None:
        return None

    def log(self, name: str) -> Path:
        return Path("log")

    def check(self) -> None:
        everything = [slot for used in self.used.values() for slot in used]
        assert len(everything) == len(set(everything)), f"two jobs use a slot: {self.used}"
        assert all(number < MACHINES[machine] for machine, number in everything)


def flat(slots: Slots) -> set[tuple[str, int]]:
    return {(machine, number) for machine, numbers in slots.items() for number in numbers}


def wish(choices: Choices) -> dict[str, dict[str, int]]:
    """What all jobs shall have; together no more than there is."""
    left = dict(MACHINES)
    wanted: dict[str, dict[str, int]] = {}
    for name in choices.shuffled(JOBS):
        wanted[name] = {}
        for machine in MACHINES:
            count = choices.below(left[machine] + 1)
            left[machine] -= count
            if count:
                wanted[name][machine] = count
    return wanted


@given(st.binary(min_size=20, max_size=60), st.booleans())
@cases(300)
def test_no_two_jobs_use_a_slot_and_each_gets_what_it_shall_have(
    data: bytes, resizes: bool
) -> None:
    choices = Choices(data + bytes(range(7)))
    runner = SlowRunner(choices, resizes)
    processes = Processes(runner, MACHINES, 1e6, lambda name, text: None)
    for name in JOBS:
        row = {"name": name, "command": "true", "workers": "1", "duration_s": "1", "most": "5"}
        processes.add(job_of(row))
    for _ in range(4):
        wanted = wish(choices)
        for name, workers in wanted.items():
            processes.want(name, workers)
        for _ in range(choices.below(5)):  # often another wish comes before this one is reached
            processes.look()
            processes.adapt()
    for _ in range(300):
        processes.look()
        processes.adapt()
    for name, workers in wanted.items():
        assert processes.given(name) == workers
        assert runner.used.get(name, set()) == runner.told.get(name, set())


@given(st.binary(min_size=20, max_size=40))
@cases(100)
def test_who_only_grows_or_shrinks_changes_once(data: bytes) -> None:
    choices = Choices(data + bytes(range(7)))
    runner = SlowRunner(choices, resizes=True)
    processes = Processes(runner, {"b": 3}, 1e6, lambda name, text: None)
    for name in ("x", "y"):
        row = {"name": name, "command": "true", "workers": "1", "duration_s": "1", "most": "3"}
        processes.add(job_of(row))
    processes.want("x", {"b": 1})
    processes.want("y", {"b": 2})
    processes.adapt()
    processes.want("x", {"b": 2})  # waits until y has let go
    processes.want("y", {"b": 1})
    for _ in range(100):
        processes.adapt()
        processes.look()
    assert (processes.given("x"), processes.given("y")) == ({"b": 2}, {"b": 1})
    assert runner.changes == 2
