"""A rank that is killed: what the other one sees, and how soon."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from gpu.on_device import CUDA, DEVICES, run

import hvd_order.torch as hvd

_TIMEOUT_S = 10
_KILLED_IN_STEP = 5
_KILLED, _SURVIVED = "killed.json", "survived.json"


@pytest.mark.parametrize(
    ("device", "backend"),
    [*((device, "gloo") for device in DEVICES[:1]),
     *(pytest.param("cuda", backend, marks=CUDA.marks) for backend in ("gloo", "nccl"))],
)  # fmt: skip
def test_the_survivor_names_the_killed_rank_in_time(
    device: str, backend: str, tmp_path: Path
) -> None:
    """Its call raises, and leaves a usable process, which ends by itself."""
    run(loses_a_rank, device, str(tmp_path), ranks=2, backend=backend, killed=1,
        env={"HVD_ORDER_TIMEOUT": str(_TIMEOUT_S), "GLOO_SOCKET_IFNAME": "lo"})  # fmt: skip
    killed, found = (json.loads((tmp_path / name).read_text()) for name in (_KILLED, _SURVIVED))
    # By time and not by step: on a device the survivor's host may be steps ahead of the sums.
    seconds = found["raised_at"] - killed["at"]
    assert 0 < seconds <= _TIMEOUT_S + 2


def loses_a_rank(device: torch.device, folder_name: str) -> None:
    """Rank 1 ends; rank 0 writes what it saw."""
    folder = Path(folder_name)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    used, kept = 0, 0
    try:
        for step in range(100):
            half = model[:4](torch.randn(64, 512, device=device))
            if hvd.rank() == 1 and step == _KILLED_IN_STEP:
                # Within the backward pass: the sums of half of the gradients cannot be complete.
                half.register_hook(lambda _: _end_process(folder))
            model[4:](half).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.flush()
        raise SystemExit("the training went on without rank 1")
    except hvd.HorovodInternalError as error:
        raised_at, text = time.monotonic(), str(error)
    assert "rank 1" in text, f"the error does not name rank 1: {text}"
    hvd.shutdown()
    if device.type == "cuda":
        torch.cuda.synchronize()
        used = torch.cuda.memory_allocated()
    del model, optimizer
    gc.collect()
    if device.type == "cuda":
        kept = torch.cuda.memory_allocated()
        assert torch.ones(2**20, device=device).sum().item() == 2**20
    found = {"raised_at": raised_at, "used_bytes": used, "kept_bytes": kept}
    (folder / _SURVIVED).write_text(json.dumps(found))


def _end_process(folder: Path) -> None:
    (folder / _KILLED).write_text(json.dumps({"at": time.monotonic()}))
    os.kill(os.getpid(), signal.SIGKILL)
