"""Trains a small CNN on digits, as Horovod's ``pytorch_mnist.py`` does; the digits are drawn here.

    hvd-order run -np 2 python examples/mnist_torch.py

Written for Horovod: with ``import horovod.torch as hvd`` in place of our import it runs there.
"""

import argparse
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvd_order.torch as hvd

# The digits 0 to 9, five dots wide and seven high, a row a word.
GLYPHS = """
01110 00100 01110 11111 00010 11111 00110 11111 01110 01110
10001 01100 10001 00010 00110 10000 01000 00001 10001 10001
10011 00100 00001 00100 01010 11110 10000 00010 10001 10001
10101 00100 00010 00010 10010 00001 11110 00100 01110 01111
11001 00100 00100 00001 11111 00001 10001 01000 10001 00001
10001 00100 01000 10001 00010 10001 10001 01000 10001 00010
01110 01110 11111 01110 00010 01110 01110 01000 01110 01100
"""


def draw_digits(count: int, seed: int) -> TensorDataset:
    """Images of digits, float32 of shape (count, 1, 28, 28), with their labels.

    Each digit is drawn three pixels a dot, at a place and a brightness of its own, in noise.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [line.split() for line in GLYPHS.split("\n") if line]
    glyphs = torch.tensor([[[int(dot) for dot in row[d]] for row in rows] for d in range(10)])
    large = glyphs.float().repeat_interleave(3, dim=1).repeat_interleave(3, dim=2)  # 21 x 15
    labels = torch.randint(10, (count,), generator=generator)
    images = 0.3 * torch.randn(count, 1, 28, 28, generator=generator)
    tops = torch.randint(28 - 21 + 1, (count,), generator=generator).tolist()
    lefts = torch.randint(28 - 15 + 1, (count,), generator=generator).tolist()
    lights = 0.5 + torch.rand(count, generator=generator)
    for image, label, top, left, light in zip(images, labels, tops, lefts, lights, strict=True):
        image[0, top : top + 21, left : left + 15] += light * large[label]
    return TensorDataset(images, labels)


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d(0.1)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the ten digits."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def average(value: float, name: str) -> float:
    """The mean of a number over all ranks."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train_epoch(epoch, model, optimizer, loader, sampler, args):
    """One pass over this rank's part of the training data."""
    model.train()
    sampler.set_epoch(epoch)  # another shuffle in each epoch
    total = 0.0
    for batch, (data, target) in enumerate(loader):
        if args.cuda:
            data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        total += loss.item()
        if batch % args.log_interval == 0 and hvd.rank() == 0:
            seen = batch * len(data)
            print(f"Train Epoch: {epoch} [{seen}/{len(sampler)}]\tLoss: {loss.item():.6f}")
    mean = average(total / len(loader), "train_loss")
    if hvd.rank() == 0:
        print(f"Epoch {epoch}: average loss {mean:.4f}", flush=True)


def test(model, loader, sampler, args):
    """Loss and accuracy on all ranks' parts of the test data."""
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            if args.cuda:
                data, target = data.cuda(), target.cuda()
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += int((output.argmax(dim=1) == target).sum())
    loss = average(loss / len(sampler), "test_loss")
    accuracy = average(correct / len(sampler), "test_accuracy")
    if hvd.rank() == 0:
        print(f"Test set: Average loss: {loss:.4f}, Accuracy: {100 * accuracy:.2f}%", flush=True)


def main():
    """Trains and tests."""
    parser = argparse.ArgumentParser(description="MNIST-like example for PyTorch")
    parser.add_argument("--batch-size", type=int, default=64, help="images a rank and step")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one rank")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--train-images", type=int, default=8192)
    parser.add_argument("--test-images", type=int, default=1024)
    parser.add_argument("--log-interval", type=int, default=10, help="steps")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send 16 bits an element")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    args = parser.parse_args()
    args.cuda = not args.no_cuda and torch.cuda.is_available()

    hvd.init()
    torch.manual_seed(args.seed)
    if args.cuda:
        torch.cuda.set_device(hvd.local_rank())  # a GPU for each rank
    torch.set_num_threads(1)

    train_data = draw_digits(args.train_images, args.seed)
    test_data = draw_digits(args.test_images, args.seed + 1)
    train_sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
    test_sampler = DistributedSampler(
        test_data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    train_loader = DataLoader(train_data, batch_size=args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test_data, batch_size=args.batch_size, sampler=test_sampler)

    model = Net()
    if args.cuda:
        model.cuda()
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        train_epoch(epoch, model, optimizer, train_loader, train_sampler, args)
        test(model, test_loader, test_sampler, args)

    values = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
    digests = hvd.allgather_object(hashlib.sha256(values.numpy().tobytes()).hexdigest())
    if hvd.rank() == 0:
        print(f"Parameters of {hvd.size()} ranks are equal: {len(set(digests)) == 1}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
