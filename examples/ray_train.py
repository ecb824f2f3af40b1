"""Trains in the workers of Ray Train, on this machine or in a cluster that Ray has.

python examples/ray_train.py
"""

import tempfile

import ray.train
import torch
from ray.train.torch import TorchTrainer


def train(config):
    """What each worker runs; Ray has set its rank, its device and the process group."""
    import hvd_order.torch as hvd

    hvd.init()
    device = ray.train.torch.get_device()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    ).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-3), model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(config["steps"]):
        rows = torch.randn(32, 16, device=device)  # each rank has rows of its own
        labels = (rows[:, :8].sum(1) > rows[:, 8:].sum(1)).float()
        optimizer.zero_grad()
        output = model(rows).squeeze(1)
        torch.nn.functional.binary_cross_entropy_with_logits(output, labels).backward()
        optimizer.step()
    accuracy = hvd.allreduce(((output > 0) == (labels > 0)).float().mean())
    ray.train.report({"accuracy": accuracy.item()})
    if hvd.rank() == 0:  # Ray shows what workers print
        print(f"{hvd.size()} ranks, accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    TorchTrainer(
        train,
        train_loop_config={"steps": 300},
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(storage_path=tempfile.mkdtemp()),
    ).fit()
