"""One rank of PyTorch, which obeys the commands of its standard input (commands.py).

The commander (fleet.py) lets systems take turns: it builds several in the same ranks, then asks
for some steps of one, some of the next, and so on.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.runner.commands import (
    cpu_s,
    link_samples,
    sent_bytes,
    serve,
    switches,
    threads,
)
from benchmarks.runner.systems import SYSTEMS, Trainer, saturated_all_reduce
from benchmarks.runner.workloads.build import build
from benchmarks.runner.workloads.emulated_device import make_bfloat16
from benchmarks.runner.workloads.workload import Workload, adamw


@dataclass
class Job:
    """One system with its model."""

    trainer: Trainer
    work: Workload


class Worker:
    """The commands; each method's result is the answer."""

    def __init__(self, peer: str) -> None:
        """``peer``: "torch" or "horovod", whose process group is used."""
        self._peer = peer
        self._jobs: dict[str, Job] = {}
        if peer == "horovod":
            import horovod.torch as hvd

            hvd.init()
            self._rank = hvd.rank()
            self._barrier: Callable[[], object] = hvd.barrier
        else:
            dist.init_process_group("gloo")
            self._rank = dist.get_rank()
            self._barrier = dist.barrier

    def wire(self, size_bytes: int, rounds: int, chunk_bytes: int = 8 << 20) -> list[float]:
        """How long an all-reduce of so many bytes takes when nothing else runs."""
        run = saturated_all_reduce(size_bytes, chunk_bytes)
        times = []
        for _ in range(rounds):
            self._barrier()
            begin = time.monotonic()
            run()()
            times.append(time.monotonic() - begin)
        return times

    def link(self) -> dict[str, Any]:
        """What `hvd-order profile` measures between ranks; they must not have hvd_order's job."""
        import hvd_order.torch as hvd
        from hvd_order.planning.profiling.ranks import measure_link

        hvd.init()
        measured = measure_link(on_device=False)
        hvd.shutdown()
        return asdict(measured)

    def build(
        self, job: str, system: str, model: str, compute_s: list[float], options: dict[str, Any]
    ) -> list[int]:
        """Makes a system with a model of its own, named ``job``.

        Args:
            compute_s: of a step, by rank.
            options: of the workload, "max_norm", "adamw", "bfloat16" and "scaled"; others are the
                system's.

        Returns:
            The model's layer_bytes().
        """
        # A cell has one model, and all jobs of a cell are dropped before the next cell.
        beside = [other.work.model for other in self._jobs.values()]
        work = build(model, self._rank, compute_s[self._rank], beside)
        layer_bytes = work.layer_bytes()
        narrow = options.pop("bfloat16", False)
        if narrow:
            make_bfloat16(work.model)
        work = replace(
            work, max_norm=options.pop("max_norm", None), scaled=options.pop("scaled", False),
            optimizer=adamw if options.pop("adamw", False) else work.optimizer, masters=narrow,
        )  # fmt: skip
        trainer = SYSTEMS[system](work, **options)
        self._jobs[job] = Job(trainer, work)
        return layer_bytes

    def drop(self, job: str) -> None:
        """Frees a system and its model."""
        self._jobs[job].trainer.finish()
        self._barrier()
        self._jobs[job].trainer.close()
        del self._jobs[job]
        gc.collect()

    def settle(self, job: str, at_least: int) -> str:
        """Runs first steps, in which systems learn and tune; returns the system's note."""
        trainer = self._jobs[job].trainer
        self._barrier()
        done = 0
        while done < at_least or not trainer.settled():
            trainer.step()
            done += 1
        trainer.finish()
        self._jobs[job].work.reset()  # all systems start the measured steps from the same weights
        self._barrier()
        return trainer.note()

    def state_bytes(self, job: str) -> int:
        """Size of optimizer state and master copies on this rank."""
        return self._jobs[job].trainer.state_bytes()

    def steps(self, job: str, count: int, warm_up: int) -> dict[str, Any]:
        """Runs steps back to back, after one of warm-up or more.

        Returns:
            ends: when the warm-up and each later step ended, by the machine's clock.
            cpu_s, switches, sent_bytes: of the process and of the host, a step; all steps' bytes
                are counted, up to the last one's arrival.
            threads: of the process.
            messages: of the order agreement, a step, sent by this rank.
        """
        trainer = self._jobs[job].trainer
        recorder = self._jobs[job].work.recorder
        self._barrier()
        ends = []
        sent = sent_bytes()
        for number in range(warm_up + count):
            if number == warm_up:
                began_s, began_switches = cpu_s(), switches()
                trainer.messages()
            recorder.events.clear()
            trainer.step()
            ends.append(time.monotonic())
        used_s = cpu_s() - began_s
        switched = switches() - began_switches
        trainer.finish()
        self._barrier()
        return {
            "ends": ends[warm_up - 1 :],
            "cpu_s": used_s / count,
            "switches": switched / count,
            "threads": threads(),
            "messages": trainer.messages() / count,
            "sent_bytes": (sent_bytes() - sent) / (warm_up + count),
        }

    def record(self, job: str, warm_up: int) -> dict[str, Any]:
        """One steady step: when each layer ran, how much had been sent when, from its start; and
        what codes save of each layer's bytes.
        """
        trainer = self._jobs[job].trainer
        recorder = self._jobs[job].work.recorder
        self._barrier()
        for _ in range(warm_up):
            trainer.step()
        recorder.events.clear()
        with link_samples() as samples:
            begin = time.monotonic()
            trainer.step()
            step_s = time.monotonic() - begin
            trainer.step()  # the transfers of the recorded step may run on into it
        trainer.finish()
        self._barrier()
        return {
            "step_s": step_s,
            "layers": [(n, k, b - begin, e - begin) for n, k, b, e in recorder.events],
            "sent": [(at - begin, sent) for at, sent in samples],
            "saved_bytes": self._jobs[job].work.by_layer(trainer.saved_bytes()),
        }

    def weights(self, job: str) -> list[float]:
        """The first and the last element of every parameter."""
        self._jobs[job].trainer.finish()
        whole = [
            p.full_tensor() if isinstance(p, DTensor) else p  # FSDP2 keeps a part on each rank
            for p in self._jobs[job].work.model.parameters()
        ]
        ends = [p.detach().view(-1)[[0, -1]] for p in whole]
        values: list[float] = torch.cat(ends).tolist()
        return values

    def quit(self) -> None:
        """Ends the rank."""
        for job in list(self._jobs):
            self.drop(job)
        if self._peer == "horovod":
            import horovod.torch as hvd

            hvd.shutdown()
        else:
            dist.destroy_process_group()


def _worker() -> Worker:
    torch.set_num_threads(1)
    return Worker(sys.argv[1])


if __name__ == "__main__":
    serve(_worker)
