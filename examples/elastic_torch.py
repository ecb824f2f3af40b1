"""Elastic training, written for Horovod; only the import differs.

Start it with ``hvd-order run -np 2 --min-np 1 python examples/elastic_torch.py``, and add
``--host-discovery-script`` for hosts that come and go.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

import hvd_order.torch as hvd

parser = argparse.ArgumentParser(description="PyTorch elastic example")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--batches-per-commit", type=int, default=10)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--samples", type=int, default=6000)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)


class Net(nn.Module):
    """A small network for small pictures."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, kernel_size=3, stride=2)
        self.fc1 = nn.Linear(8 * 6 * 6, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        """Log probabilities of the classes."""
        x = F.relu(self.conv(x))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


# Pictures of a bright bar: which of ten places it has is the class.
labels = torch.arange(args.samples) % 10
images = torch.randn(args.samples, 1, 14, 14) * 0.3
images[torch.arange(args.samples), 0, labels + 2] += 1.0
dataset = torch.utils.data.TensorDataset(images, labels)
sampler = hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

model = Net()
optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    """Trains from wherever the state is."""
    for state.epoch in range(state.epoch, args.epochs):
        state.model.train()
        batch_offset = state.batch
        for i, (data, target) in enumerate(loader):
            state.batch = batch_offset + i
            if state.batch % args.batches_per_commit == 0:
                state.commit()
            state.optimizer.zero_grad()
            loss = F.nll_loss(state.model(data), target)
            loss.backward()
            state.optimizer.step()
            state.sampler.record_batch(i, args.batch_size)
            if state.batch % 50 == 0 and hvd.rank() == 0:
                print(
                    f"epoch {state.epoch} batch {state.batch} workers {hvd.size()} "
                    f"loss {loss.item():.4f}",
                    flush=True,
                )
        state.sampler.set_epoch(state.epoch + 1)
        state.batch = 0
        state.commit()


def on_state_reset():
    """Follows the number of workers."""
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.lr * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0, sampler=sampler)
state.register_reset_callbacks([on_state_reset])
train(state)
if hvd.rank() == 0:
    print(f"done after {state.epoch + 1} epochs")
