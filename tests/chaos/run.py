"""A campaign of faults: ``run.py --minutes 10 --seed 1``; ``--seed 1 --only 17`` repeats a run.

Every run is a line of JSON in the file of `--out`, and a line here. A summary comes at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from chaos.faults.every_fault import FAULTS
from chaos.jobs import KINDS
from chaos.plans import MOST, Plan, draw_plan
from chaos.summary import in_words
from helpers.ranks import REPOSITORY

sys.path.insert(0, str(REPOSITORY))
from benchmarks.hosts import HostsUnavailable, namespaces

__all__ = ["Campaign"]

_LONGEST_S = 900.0  # a run; it ends by itself long before


class Campaign:
    """Runs of one seed.

    Args:
        seed: decides all that is drawn.
        job, fault: only such ones.
        most: faults that a job survives, before one that it need not survive.

    Attributes:
        records: what came of each run so far.

    Raises:
        HostsUnavailable: this machine does not permit namespaces; the text has the cure.
    """

    def __init__(
        self, seed: int, job: str | None = None, fault: str | None = None, most: int = MOST
    ) -> None:
        self.seed, self.job, self.fault, self.most = seed, job, fault, most
        self.records: list[dict[str, Any]] = []
        self._flags = [*namespaces.creation_flags(), "--pid", "--fork", "--kill-child"]
        self.absent = {
            each.name: reason for each in FAULTS if (reason := each.missing()) is not None
        }

    def plan(self, number: int) -> Plan:
        return draw_plan(self.seed, number, self.job, self.fault, self.most)

    def run(self, number: int) -> dict[str, Any] | None:
        """The run of this number; None where the machine lacks something for one of its faults."""
        if any(fault.name in self.absent for fault in self.plan(number).faults):
            return None
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="chaos_") as folder:
            record = self._in_namespaces(number, folder)
        record["wall_s"] = round(time.monotonic() - begin, 1)
        record["again"] = self.again(number)
        self.records.append(record)
        return record

    def again(self, number: int) -> str:
        """The command that repeats a run."""
        options = " ".join([f"--only {number}", *(f"--{n} '{v}'" for n, v in self._options())])
        return f"PYTHONPATH=.:tests python tests/chaos/run.py --seed {self.seed} {options}"

    def _options(self) -> list[tuple[str, object]]:
        """What is not as usual."""
        most = None if self.most == MOST else self.most
        options = [("job", self.job), ("fault", self.fault), ("most", most)]
        return [(name, value) for name, value in options if value is not None]

    def _in_namespaces(self, number: int, folder: str) -> dict[str, Any]:
        one = [sys.executable, str(Path(__file__).with_name("one.py"))]
        options = [f"--{name}={value}" for name, value in self._options()]
        path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
        process = subprocess.Popen(
            ["unshare", *self._flags, "--mount-proc", *one, str(self.seed), str(number), folder,
             *options],
            env=namespaces.tool_environment({"PYTHONPATH": path}),
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            said, errors = process.communicate(timeout=_LONGEST_S)
            record: dict[str, Any] = json.loads(said.splitlines()[-1])
        except (subprocess.TimeoutExpired, IndexError, json.JSONDecodeError) as error:
            process.kill()
            said, errors = process.communicate()
            plan = self.plan(number)
            return {
                "seed": self.seed, "number": number, "job": plan.job.kind, "how": str(plan.job),
                "faults": [
                    {"fault": fault.name, "how": str(fault), "struck_after_s": None}
                    for fault in plan.faults
                ],
                "outcome": "campaign failed", "end_after_s": 0.0, "bound_s": 0.0,
                "culprit_named": None, "violations": [f"campaign failed: {error!r}"],
                "tail": (said + errors)[-6000:],
            }  # fmt: skip
        return record


def in_a_line(record: dict[str, Any]) -> str:
    faults = "; ".join(
        fault["how"] + ("" if fault["struck_after_s"] is not None else " (too late)")
        for fault in record["faults"]
    )
    bad = "".join(f"\n    VIOLATION {text}" for text in record["violations"])
    return (
        f"{record['seed']}/{record['number']} {record['how']}: {faults}: {record['outcome']} after "
        f"{record['end_after_s']:g} s ({record['wall_s']:g} s in all){bad}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="begin no run after so many")
    parser.add_argument("--runs", type=int, help="so many runs at most")
    parser.add_argument("--only", type=int, help="the run of this number, with its output")
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--parallel", type=int, default=2, help="runs at once; many only wait")
    parser.add_argument("--job", choices=KINDS, help="only jobs of this kind")
    parser.add_argument("--fault", choices=sorted({each.name for each in FAULTS}),
        help="one fault a run, of this kind")  # fmt: skip
    parser.add_argument("--most", type=int, default=MOST,
        help="faults that a job survives, before one that it need not survive")  # fmt: skip
    parser.add_argument("--out", type=Path, help="a file for the lines of JSON; they are appended")
    parser.add_argument("--list", action="store_true", help="says what would be done")
    options = parser.parse_args()
    try:
        campaign = Campaign(options.seed, options.job, options.fault, options.most)
    except HostsUnavailable as error:
        print(str(error).replace("emulated hosts", "the campaign"), file=sys.stderr)
        return 2
    for name, reason in campaign.absent.items():
        print(f"without the fault {name!r}: {reason}")
    if options.only is not None:
        record = campaign.run(options.only)
        assert record is not None, "this run needs what this machine lacks"
        print(in_a_line(record))
        print(record.get("tail", ""))
        return len(record["violations"])
    count = options.runs or (10 if options.minutes is None else 10**9)
    numbers = range(options.first, options.first + count)
    if options.list:
        for number in numbers:
            print(f"{number}: {campaign.plan(number)}")
        return 0
    print(f"seed {options.seed}", flush=True)
    wall_s = run_all(campaign, numbers, options.minutes, options.parallel, options.out)
    print(in_words(campaign.records, wall_s))
    return int(any(record["violations"] for record in campaign.records))


def run_all(
    campaign: Campaign, numbers: range, minutes: float | None, parallel: int, out: Path | None
) -> float:
    """Carries runs out, and says how each went. Returns the seconds that it took."""
    begin = time.monotonic()
    left = iter(numbers)

    def work() -> None:
        for number in left:
            if minutes is not None and time.monotonic() > begin + 60 * minutes:
                return
            record = campaign.run(number)
            if record is None:
                continue
            print(in_a_line(record), flush=True)
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")

    with ThreadPoolExecutor(parallel) as threads:
        for done in [threads.submit(work) for _ in range(parallel)]:
            done.result()
    return time.monotonic() - begin


if __name__ == "__main__":
    raise SystemExit(main())
