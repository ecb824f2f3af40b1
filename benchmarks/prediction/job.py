"""One worker of the benchmark; worker 0 prints a line of JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "side_by_side"))
from emulated_device import EmulatedModel, model_input
from model import layers_of

import hvd_order.torch as hvd


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    hvd.init()
    model = EmulatedModel(layers_of(job["model"], job["shrink"], job["compute_s"]), hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-6)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ends, events = [], []
    for _ in range(job["steps"]):
        optimizer.zero_grad()
        model(model_input()).backward()
        optimizer.step()
        # All hosts are on one machine, so they have one clock.
        ends.append(time.monotonic())
        events.append(list(model.recorder.events))
        model.recorder.events.clear()
    optimizer.flush()
    found = hvd.allgather_object(ends)
    if hvd.rank() == 0:
        print(json.dumps({"ends": found, "events": events}), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
