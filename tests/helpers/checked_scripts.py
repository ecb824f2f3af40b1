"""Scripts for the tests of ``hvd-order check``: heads that they share, mistakes with cures."""

from __future__ import annotations

__all__ = ["HEAD", "MENDED", "RIGHT", "SHARDED", "START", "WRAP"]

HEAD = """
import torch
import torch.nn as nn
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
import horovod.torch as hvd
"""
START = """
hvd.init()
torch.cuda.set_device(hvd.local_rank())
model = Net().cuda()
optimizer = optim.SGD(model.parameters(), lr=0.1 * hvd.size())
"""
WRAP = """
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
"""
SHARDED = "sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())\n"

LOOP = """
for epoch in range(9):
    for batch in DataLoader(data, sampler=sampler):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
"""
GROUP = ("hvd.init()", "torch.distributed.init_process_group('nccl')\nhvd.init()")

# Name: (code, script with "# <--" at the line that is meant, what mends it).
MENDED = {
    "torchmetrics without a group": ("HVD701", HEAD + "import torchmetrics" + START + WRAP + """
accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10).cuda()  # <--
for batch, target in loader:
    accuracy.update(model(batch), target)
print(accuracy.compute())
""", [GROUP]),
    "a metric of torchmetrics by its name": ("HVD701", HEAD + """
from torchmetrics.classification import MulticlassAccuracy
""" + START + WRAP + """
accuracy = MulticlassAccuracy(num_classes=10)  # <--
accuracy.update(model(batch), target)
value = accuracy.compute()
""", [("value = accuracy.compute()", "value = hvd.allreduce(accuracy.compute())")]),
    "SyncBatchNorm converted without a group": ("HVD702", HEAD + START + """
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # <--
""" + WRAP, [GROUP]),
    "SyncBatchNorm made without a group": ("HVD702", HEAD + START + """
norm = torch.nn.SyncBatchNorm(8)  # <--
""" + WRAP, [("torch.nn.SyncBatchNorm", "hvd.SyncBatchNorm")]),
    "DistributedSampler without a group": ("HVD703", HEAD + START + WRAP + """
sampler = DistributedSampler(data, shuffle=True)  # <--
""", [("data, shuffle", "data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle")]),
    "updates by hand": ("HVD304", HEAD + """
hvd.init()
for batch in mine:
    model(batch).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.data -= 0.1 * p.grad  # <--
            p.grad.zero_()
""", [("            p.data -=", "            hvd.allreduce_(p.grad)\n            p.data -=")]),
    "updates by hand, with add_": ("HVD304", HEAD + """
hvd.init()
def train(batch, lr):
    model(batch).backward()
    for name, p in model.named_parameters():
        p.data.add_(p.grad, alpha=-lr)  # <--
""", [("    for name", "    grads = [p.grad for p in model.parameters()]\n"
       "    hvd.grouped_allreduce_(grads)\n    for name")]),
    "weights of no module, updated by hand": ("HVD304", HEAD + """
hvd.init()
w = torch.zeros(3, requires_grad=True)
while True:
    loss(w).backward()
    w.data = w.data - 0.1 * w.grad  # <--
    w.grad = None
""", [("    w.grad = None", "    w.grad = None\n    w.data = hvd.allreduce(w.data)")]),
    "every epoch in the same order": ("HVD402", HEAD + START + WRAP + """
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())  # <--
""" + LOOP, [("in range(9):", "in range(9):\n    sampler.set_epoch(epoch)")]),
    "saved by one rank and loaded by all": ("HVD504", HEAD + START + WRAP + SHARDED + """
best = "best.pt"
if hvd.rank() == 0:
    torch.save(model.state_dict(), best)
model.eval()
model.load_state_dict(torch.load(best))  # <--
""", [("model.eval()", "hvd.barrier()")]),
    "saved in a function of one rank": ("HVD504", HEAD + START + WRAP + """
def finish(gpu_id):
    if gpu_id != 0:
        print("done")
    else:
        torch.save(model, "m.pt")
    return torch.load("m.pt")  # <--
""", [("    return", "    if hvd.size() > 1:\n        hvd.barrier()\n    return")]),
    "collective on one GPU": ("HVD501", HEAD + """
def report(gpu_id, loss):
    if gpu_id == 0:
        print(hvd.allreduce(loss))  # <--
""", [("    if gpu_id == 0:\n", ""), ("        print(", "    print(")]),
}  # fmt: skip

RIGHT = {
    "names that hold a rank": HEAD + START + WRAP + """
import os
class Trainer:
    def __init__(self, gpu_id):
        self.gpu_id = gpu_id
    def save(self):
        torch.save(model.state_dict(), "checkpoint.pt")
    def train(self, epochs):
        for epoch in range(epochs):
            if self.gpu_id == 0 and epoch % 5 == 0:
                self.save()
me = int(os.environ["LOCAL_RANK"])
if me == 0:
    torch.save(model, "a.pt")
if not int(os.environ.get("SLURM_PROCID", 0)):
    torch.save(model, "b.pt")
first = int(os.getenv("RANK", "0")) == 0
if first:
    torch.save(model, "c.pt")
""",
    "conditions that are the same on every rank": HEAD + """
def start(args):
    ddp = int(os.environ.get("RANK", -1)) != -1
    if ddp:
        hvd.barrier()
    if args.gpu is not None:
        torch.cuda.set_device(args.gpu)
        hvd.barrier()
    if args.local_rank != -1 and args.rank is not None and args.rank >= 0:
        hvd.barrier()
    if args.gpu:
        hvd.barrier()
""",
    "an optimizer of one's own": HEAD + START + """
class Plain(torch.optim.Optimizer):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])
optimizer = Plain(model.parameters(), lr=0.1 * hvd.size())
""" + WRAP,
    "an attack on the inputs": HEAD + START + """
for x, y in mine:
    x.requires_grad_()
    loss(model(x), y).backward()
    x.data = x.data - 0.1 * x.grad
    w = w + 0.03 * w.grad.sign()
""",
    "updates by hand in one process": """
import torch
for p in model.parameters():
    p.data -= 0.1 * p.grad
""",
    "metrics and samplers of one rank": HEAD + "import torchmetrics" + START + WRAP + """
def evaluate():
    metric = torchmetrics.MeanMetric()
    metric.update(1.0)
    return metric.compute()
if hvd.rank() == 0:
    print(evaluate())
    own = torchmetrics.MeanMetric(sync_on_compute=False)
    print(torchmetrics.functional.accuracy(a, b))
val_sampler = DistributedSampler(data, hvd.size(), hvd.rank())
ordered = DistributedSampler(data, hvd.size(), hvd.rank(), shuffle=False)
for epoch in range(2):
    pass
""",
    "files that others wait for": HEAD + START + WRAP + """
for epoch in range(3):
    if hvd.rank() == 0:
        torch.save(model, "last.pt")
        model = torch.load("last.pt")
    loss = hvd.allreduce(torch.ones(1))
    model = torch.load("last.pt")
    other = torch.load("other.pt")
if hvd.rank() == 0:
    torch.save(model, "last.pt")
validate(model)
model = torch.load("last.pt")
""",
}  # fmt: skip
