"""What does DistributedOptimizer cost when there is nobody to talk to? See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from torch import Tensor, nn

import hvd_order.torch as hvd
from benchmarks.runner.question import Answer, ask, option
from benchmarks.runner.ranks import finish
from benchmarks.runner.records.summary import paired_ratio
from benchmarks.runner.turns import turns
from hvd_order.tools.demo.corpus import VOCABULARY, Batches, load_corpus
from hvd_order.tools.demo.gpt import GptConfig, next_token_loss
from hvd_order.tools.demo.systems import Recipe


def measure(options: argparse.Namespace) -> Answer:
    if options.threads:
        torch.set_num_threads(options.threads)
    hvd.init()
    if hvd.size() != 1:
        raise SystemExit("this benchmark is about one rank; start it without a launcher")
    device = torch.device(options.device)
    batches = Batches(
        load_corpus().train, context=GptConfig.context, batch=options.sequences, seed=20
    )
    recipe = Recipe(GptConfig(vocabulary=VOCABULARY), seed=20, steps=options.steps)
    # The same optimizer twice shows how far two equal things are apart on this machine.
    trainers = {
        "plain": Trainer(recipe, device, wrap=False),
        "hvd_order": Trainer(recipe, device, wrap=True),
        "plain again": Trainer(recipe, device, wrap=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for step, name in turns(list(trainers), options.warm_up + options.steps):
        inputs, targets = (x.to(device) for x in batches.take(step, rank=0, size=1))
        finish(device)
        begin = time.perf_counter()
        trainers[name].step(inputs, targets)
        finish(device)
        if step >= options.warm_up:
            seconds[name].append(time.perf_counter() - begin)
    difference = largest_difference(trainers["plain"].model, trainers["hvd_order"].model)
    ours = paired_ratio(seconds["hvd_order"], seconds["plain"])
    control = paired_ratio(seconds["plain again"], seconds["plain"])
    print(f"hvd_order / plain {ours}, plain again / plain {control}; "
          f"largest difference of weights {difference:g}")  # fmt: skip
    # Equal weights on the CPU, to the bit; on a GPU some kernels of torch add in any order.
    apart = difference > (0 if device.type == "cpu" else 1e-3)
    return Answer(
        {"seconds": seconds},
        {
            "ratio": ours.to_json(),
            "control_ratio": control.to_json(),
            "step_s": {name: statistics.median(values) for name, values in seconds.items()},
            "largest_weight_difference": difference,
        },
        failed="the two optimizers did not train the same weights" if apart else "",
    )


class Trainer:
    """A model and an optimizer of its own; all trainers see the same batches."""

    def __init__(self, recipe: Recipe, device: torch.device, *, wrap: bool) -> None:
        self.model = recipe.make_model().to(device)
        self._optimizer = recipe.make_optimizer(self.model)
        if wrap:
            self._optimizer = hvd.DistributedOptimizer(
                self._optimizer, named_parameters=self.model.named_parameters()
            )
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(self._optimizer, root_rank=0)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        loss = next_token_loss(self.model(inputs), targets)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


if __name__ == "__main__":
    sys.exit(ask(
        "overhead", __doc__, measure,
        option("--steps", 200, "timed steps of each optimizer"),
        option("--warm-up", 10),
        option("--sequences", 8, "sequences in a batch"),
        option("--threads", 0, "0: as torch chooses"),
        option("--device", "cpu"),
        quick={"steps": 5, "warm_up": 3},
    ))  # fmt: skip
