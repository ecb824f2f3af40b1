"""One rank: trains the emulated device by model.fit; rank 0 prints the seconds of each step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import hvd_order.keras as hvd
from benchmarks.runner.commands import step_s
from benchmarks.runner.tensorflow_worker import Worker
from hvd_order.tensorflow import allgather_object


def main(model: str, compute_s: float, ranks: int, steps: int) -> None:
    worker = Worker("tensorflow_hvd_order")
    worker.build("job", "hvd_order", model, [compute_s] * ranks, {})
    worker.settle("job", at_least=3)
    measured = worker.steps("job", count=steps, warm_up=2)
    everyone = allgather_object(measured)
    if hvd.rank() == 0:
        cpu_s = sum(one["cpu_s"] for one in everyone)
        print(json.dumps({"seconds": step_s(everyone), "cpu_s": cpu_s}))
        sys.stdout.flush()
    worker.quit()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
