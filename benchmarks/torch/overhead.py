"""What does DistributedOptimizer cost when there is nobody to talk to? See README.md."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import hvd_order.torch as hvd
from benchmarks.runner.records.environment import started
from benchmarks.runner.records.record import add_out_option, settings_of, write_record
from benchmarks.runner.records.report import table
from benchmarks.runner.records.summary import Summary, paired_ratio
from benchmarks.runner.turns import turns
from hvd_order.tools.demo.corpus import VOCABULARY, Batches, load_corpus
from hvd_order.tools.demo.gpt import GptConfig, next_token_loss
from hvd_order.tools.demo.systems import Recipe

TARGET = 1.01


def main() -> None:
    options = _options()
    found = started()
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
        taken = timed(lambda name=name: trainers[name].step(inputs, targets), device)  # noqa: B023
        if step >= options.warm_up:
            seconds[name].append(taken)

    difference = largest_difference(trainers["plain"].model, trainers["hvd_order"].model)
    ours = paired_ratio(seconds["hvd_order"], seconds["plain"])
    control = paired_ratio(seconds["plain again"], seconds["plain"])
    summaries = {name: Summary.of(values) for name, values in seconds.items()}
    print(f"\nGPT of the demo, fused AdamW, batch of {options.sequences} sequences, {device}, "
          f"{torch.get_num_threads()} threads; {options.steps} steps each after "
          f"{options.warm_up} of warm-up\n")  # fmt: skip
    rows = [
        [
            name,
            *(f"{1e3 * x:.2f}" for x in (s.minimum, s.median, s.p99)),
            {"plain": "1", "hvd_order": ours, "plain again": control}[name],
        ]
        for name, s in summaries.items()
    ]
    print(table(["optimizer", "min ms", "median ms", "p99 ms", "ratio to plain [95 %]"], rows))
    print(f"\nratio hvd_order / plain: {ours} (target at most {TARGET}): "
          f"{'met' if ours.median <= TARGET else 'NOT MET'}")  # fmt: skip
    print(f"largest difference of weights after the last step: {difference:g}")
    write_record(
        "overhead",
        found,
        settings_of(options),
        {"seconds": seconds},
        {
            "ratio": ours.to_json(),
            "control_ratio": control.to_json(),
            "seconds": {name: summary.to_json() for name, summary in summaries.items()},
            "largest_weight_difference": difference,
        },
        options.out,
    )
    # Equal weights on the CPU, to the bit; on a GPU some kernels of torch add in any order.
    if difference > (0 if device.type == "cpu" else 1e-3):
        raise SystemExit("FAIL: the two optimizers did not train the same weights")


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


def timed(work: Callable[[], None], device: torch.device) -> float:
    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    finish()
    begin = time.perf_counter()
    work()
    finish()
    return time.perf_counter() - begin


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each optimizer")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--sequences", type=int, default=8, help="sequences in a batch")
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--device", default="cpu")
    add_out_option(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
