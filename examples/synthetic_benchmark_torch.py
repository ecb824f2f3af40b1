"""Images a second on random data, as Horovod's ``pytorch_synthetic_benchmark.py`` measures it.

    hvd-order run -np 2 python examples/synthetic_benchmark_torch.py

Written for Horovod: with ``import horovod.torch as hvd`` in place of our import it runs there. The
model is a small ResNet, so no other package is needed.
"""

import argparse
import statistics
import timeit

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

import hvd_order.torch as hvd


class Block(nn.Module):
    """Two 3 x 3 convolutions and a way around them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.around = nn.Identity()
        if stride != 1 or inside != outside:
            self.around = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, of shape (batch, outside, height / stride, width / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


def small_resnet(blocks: int, width: int, classes: int) -> nn.Module:
    """Three stages of `blocks` blocks; each stage halves the image and doubles the width."""
    layers = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inside = width
    for stage in range(3):
        for block in range(blocks):
            outside = width * 2**stage
            layers.append(Block(inside, outside, stride=2 if block == 0 else 1))
            inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


def log(text):
    """Prints on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


def main():
    """Measures."""
    parser = argparse.ArgumentParser(
        description="PyTorch synthetic benchmark",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--fp16-allreduce", action="store_true", help="send 16 bits an element")
    parser.add_argument("--blocks", type=int, default=3, help="residual blocks a stage")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--image-size", type=int, default=64, help="pixels a side")
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="steps not counted")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="steps an iteration")
    parser.add_argument("--num-iters", type=int, default=10, help="iterations that are measured")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU")
    args = parser.parse_args()
    args.cuda = not args.no_cuda and torch.cuda.is_available()

    hvd.init()
    if args.cuda:
        torch.cuda.set_device(hvd.local_rank())  # a GPU for each rank
        torch.backends.cudnn.benchmark = True

    model = small_resnet(args.blocks, args.width, classes=10)
    if args.cuda:
        model.cuda()
    optimizer = optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    data = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    target = torch.randint(10, (args.batch_size,))
    if args.cuda:
        data, target = data.cuda(), target.cuda()
    losses = []

    def benchmark_step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    device = "GPU" if args.cuda else "CPU"
    log(f"Model: ResNet of {sum(p.numel() for p in model.parameters())} parameters")
    log(f"Batch size: {args.batch_size}")
    log(f"Number of {device}s: {hvd.size()}")
    log("Running warmup...")
    timeit.timeit(benchmark_step, number=args.num_warmup_batches)
    log("Running benchmark...")
    rates = []
    for iteration in range(args.num_iters):
        seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"Iter #{iteration}: {rates[-1]:.1f} img/sec per {device}")

    mean, spread = statistics.mean(rates), 1.96 * statistics.pstdev(rates)
    log(f"Loss: {losses[0].item():.4f} to {losses[-1].item():.4f}")
    log(f"Img/sec per {device}: {mean:.1f} +-{spread:.1f}")
    log(
        f"Total img/sec on {hvd.size()} {device}(s): "
        f"{hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}"
    )
    hvd.shutdown()


if __name__ == "__main__":
    main()
