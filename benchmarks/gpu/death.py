"""A rank that is killed: what the other one sees, and how soon.

As a script it is one rank, ``death.py DEVICE BACKEND FOLDER``; check_death starts two of them
without a launcher, which would end the survivor.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from finding import Finding

_TIMEOUT_S = 10
_LIMIT_S = 45  # of a rank; less than the check's own, which ends no other process
_KILLED_IN_STEP = 5
_KILLED, _SURVIVED = "killed.json", "survived.json"


def check_death(device: torch.device, backend: str) -> Finding:
    """The survivor's call raises, names the lost rank, and leaves a usable process.

    Args:
        backend: what carries CUDA tensors, where hvd_order would choose another.
    """
    from common.ports import free_port

    kind = device.type if device.type in ("cuda", "cpu") else "test"
    with tempfile.TemporaryDirectory(prefix="hvd_order_bench_") as folder:
        env = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2", "HVD_ORDER_TIMEOUT": str(_TIMEOUT_S),
            "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        ranks = [
            subprocess.Popen([sys.executable, __file__, kind, backend, folder],
                             env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]  # fmt: skip
        try:
            codes = [rank.wait(timeout=_LIMIT_S + 5) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert codes == [0, -signal.SIGKILL], f"the ranks ended with {codes}"
        killed, found = (
            json.loads((Path(folder) / name).read_text()) for name in (_KILLED, _SURVIVED)
        )
    # By time and not by step: on a device the survivor's host may be steps ahead of the sums.
    seconds = found.pop("raised_at") - killed["at"]
    assert seconds > 0, f"the error came {-seconds:.1f} s before rank 1 was killed"
    found["seconds"] = seconds
    late = seconds > _TIMEOUT_S + 2
    text = (
        f"raised {seconds:.1f} s after the kill (at most {_TIMEOUT_S + 2} s), names rank 1, "
        "and the process ended by itself"
    )
    if device.type == "cuda":
        text += (
            f"; the device was usable, {found['kept_bytes'] / 2**20:.0f} of "
            f"{found['used_bytes'] / 2**20:.0f} MiB were not freed"
        )
    return Finding(text, found, "the time to the error" if late else "")


def _rank(device_type: str, backend: str, folder: Path) -> None:
    from busy import open_device

    import hvd_order.torch as hvd

    faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
    device = open_device(device_type, backend)
    hvd.init()
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


if __name__ == "__main__":
    _rank(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
