"""Keeps the outcomes of runs as CSV files, so that a later call need not repeat complete runs.

A folder holds ``options.json``, what all runs have in common; ``runs.csv``, a row of metrics for
each complete run; and for each run ``POLICY-SEED.jobs.csv``, a row for each job, and
``POLICY-SEED.placements.csv``, a row for each time that a job had one placement on one machine.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from hvd_order.base.document import Fields, read_document, write_document
from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.job import ClusterJob
from hvd_order.cluster.model.machines import Amounts, Machines
from hvd_order.cluster.simulate.outcome import JOB_COLUMNS, JobOutcome

__all__ = ["RunFolder", "RunWriter"]

_PLACEMENT_COLUMNS = ("job", "machine", "begin_s", "end_s", "workers", "servers")
_KIND, _VERSION = "cluster runs", 1
_DRAFT = ".part"  # ends the name of a file that is being written


class RunWriter:
    """Writes one run as its jobs end."""

    def __init__(self, jobs: TextIO, placements: TextIO, machines: Machines) -> None:
        self._jobs = csv.writer(jobs, lineterminator="\n")
        self._placements = csv.writer(placements, lineterminator="\n")
        self._machines = machines
        self._demands: dict[str, tuple[Amounts, Amounts]] = {}  # of jobs in the cluster
        self._jobs.writerow(JOB_COLUMNS)
        self._placements.writerow((*_PLACEMENT_COLUMNS, *machines.resources))

    def watch(self, jobs: Iterable[ClusterJob]) -> Iterator[ClusterJob]:
        """The same jobs; what they take is kept until they end."""
        for job in jobs:
            self._demands[job.name] = (
                self._machines.amounts(job.worker),
                self._machines.amounts(job.server),
            )
            yield job

    def add(self, outcome: JobOutcome) -> None:
        """Writes a job that was watched."""
        self._jobs.writerow(outcome.row())
        worker, server = self._demands.pop(outcome.name)
        for interval in outcome.placements:
            for machine, workers, servers in interval.parts:
                amounts = (workers * worker + servers * server).tolist()
                self._placements.writerow(
                    (outcome.name, self._machines.machines[machine].name, interval.begin_s,
                     interval.end_s, workers, servers, *(f"{amount:.12g}" for amount in amounts))
                )  # fmt: skip


class RunFolder:
    """A folder with runs of one workload on one cluster.

    Args:
        options: what all its runs have in common, by name.

    Raises:
        InvalidUsage: it holds runs with other options, or files of something else.
        OSError: it cannot be read or made.
    """

    def __init__(self, path: Path, machines: Machines, options: Mapping[str, str]) -> None:
        self._path = path
        self._machines = machines
        self._complete: dict[tuple[str, int], dict[str, float]] = {}
        known = path / "options.json"
        if known.exists():
            self._compare(read_document(known, _KIND, _VERSION, _options), options)
            self._read_complete()
            return
        if path.exists() and any(not p.name.endswith(_DRAFT) for p in path.iterdir()):
            raise InvalidUsage(f"{path} holds files, and no options.json of an earlier call; "
                               "choose another --out")  # fmt: skip
        path.mkdir(parents=True, exist_ok=True)
        write_document(known, _KIND, _VERSION, {"options": dict(options)})

    def _compare(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        for name in {**before, **now}:
            was, is_now = before.get(name, "not given"), now.get(name, "not given")
            if was != is_now:
                raise InvalidUsage(
                    f"{self._path} holds runs of another call: {name} was {was}, now it is "
                    f"{is_now}; choose another --out, or delete that folder"
                )

    def _read_complete(self) -> None:
        listed = self._path / "runs.csv"
        if not listed.exists():
            return
        with listed.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                run = (row.pop("policy"), int(row.pop("seed")))
                if self._jobs_file(*run).exists() and self.placements_file(*run).exists():
                    self._complete[run] = {name: float(value) for name, value in row.items()}

    def metrics(self, policy: str, seed: int) -> dict[str, float] | None:
        """Those of a complete run; None: it is not complete."""
        return self._complete.get((policy, seed))

    def _jobs_file(self, policy: str, seed: int) -> Path:
        return self._path / f"{policy}-{seed}.jobs.csv"

    def placements_file(self, policy: str, seed: int) -> Path:
        """File of a run."""
        return self._path / f"{policy}-{seed}.placements.csv"

    @contextmanager
    def writer(self, policy: str, seed: int) -> Iterator[RunWriter]:
        """Writes a run. Its files have their names when the block ends, and not if it raises."""
        files = (self._jobs_file(policy, seed), self.placements_file(policy, seed))
        drafts = [_draft(file) for file in files]
        try:
            with (
                drafts[0].open("w", newline="", encoding="utf-8") as jobs,
                drafts[1].open("w", newline="", encoding="utf-8") as placements,
            ):
                yield RunWriter(jobs, placements, self._machines)
                for file in (jobs, placements):
                    file.flush()
                    os.fsync(file.fileno())
            for draft, file_path in zip(drafts, files, strict=True):
                draft.replace(file_path)
        finally:
            for draft in drafts:
                draft.unlink(missing_ok=True)

    def complete(self, policy: str, seed: int, metrics: Mapping[str, float]) -> None:
        """Notes that a run is complete, its files being there."""
        self._complete[policy, seed] = dict(metrics)
        listed = self._path / "runs.csv"
        draft = _draft(listed)
        with draft.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(("policy", "seed", *metrics))
            for (name, number), found in sorted(self._complete.items()):
                rows.writerow((name, number, *found.values()))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(listed)


def _draft(path: Path) -> Path:
    return path.with_name(path.name + _DRAFT)


def _options(fields: Fields) -> dict[str, str]:
    found = fields.take("options", dict)
    return {str(name): str(value) for name, value in found.items()}
