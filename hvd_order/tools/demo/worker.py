"""One rank of the demo: trains both systems on the same batches and compares them.

Started by ``hvd_order.tools.demo.train``; rank 0 shows the progress and writes ``result.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hvd_order.torch as hvd
from hvd_order.engine.job.group_collectives import bytes_of
from hvd_order.planning.report.progress import ProgressBar
from hvd_order.tools.demo.corpus import VOCABULARY, Batches, Corpus, load_corpus
from hvd_order.tools.demo.gpt import GptConfig, next_token_loss
from hvd_order.tools.demo.result import DemoResult, Options
from hvd_order.tools.demo.schedule import StepBlock, interleaved_blocks, step_times
from hvd_order.tools.demo.systems import HvdOrder, PlainDdp, Recipe, System

_SEED = 20
_VALIDATION_SEQUENCES = 64


def main(argv: list[str]) -> int:
    """Trains as one rank.

    Args:
        argv: one JSON object, the fields of ``Options``.
    """
    options = Options(**json.loads(argv[0]))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")  # for DDP; hvd_order joins it
        hvd.init()
        _train(options)
        hvd.shutdown()
        dist.destroy_process_group()
    except KeyboardInterrupt:
        os._exit(130)  # the other ranks are interrupted as well: nothing is left to agree on
    return 0


def _train(options: Options) -> None:
    rank, size = hvd.rank(), hvd.size()
    say = _say if rank == 0 else _silent
    corpus = load_corpus()
    recipe = Recipe(GptConfig(vocabulary=VOCABULARY), seed=_SEED, steps=options.steps)
    ordered = HvdOrder(recipe)
    systems: tuple[System, System] = (PlainDdp(recipe), ordered)
    weights = sum(parameter.numel() for parameter in ordered.model.parameters())
    say(
        f"model: GPT, {weights / 1e6:.1f} million parameters; "
        f"text: {corpus.files} files of Python's standard library, "
        f"{corpus.train.numel() / 1e6:.1f} MB; workers: {size}"
    )

    batches = _batches(corpus, options, size)
    losses = torch.zeros(2, options.steps)
    blocks = list(interleaved_blocks(options.steps, block=options.block, recorded=options.recorded))
    seconds = torch.zeros(len(blocks), dtype=torch.float64)
    progress = ProgressBar(2 * options.steps, sys.stdout) if rank == 0 else None
    for number, block in enumerate(blocks):
        if block.purpose == "recorded" and systems[block.system] is ordered:
            hvd.start_timeline(options.trace_path)
        seconds[number] = _run_block(
            block, systems[block.system], batches, losses[block.system], progress
        )
    hvd.stop_timeline()
    if progress is not None:
        progress.close()

    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)  # a step ends when its last rank ends
    dist.all_reduce(losses)
    result = DemoResult(
        systems=[system.name for system in systems],
        size=size,
        block_steps=options.block,
        weights=weights,
        train_loss=(losses / size).tolist(),
        validation_loss=[_validation_loss(system.model, corpus, rank, size) for system in systems],
        step_ms=step_times(blocks, seconds.tolist()),
        largest_difference=_on_all_ranks(_largest_difference(systems[0].model, ordered.model)),
        ranks_equal=[_equal_on_all_ranks(system.model) for system in systems],
        versions={"torch": torch.__version__, "python": sys.version.split()[0]},
    )
    if rank == 0:
        result.write(Path(options.result_path))


def _batches(corpus: Corpus, options: Options, size: int) -> Batches:
    return Batches(
        corpus.train,
        context=GptConfig.context,
        batch=options.sequences_a_rank * size,
        seed=_SEED,
    )


def _run_block(
    block: StepBlock,
    system: System,
    batches: Batches,
    losses: Tensor,
    progress: ProgressBar | None,
) -> float:
    """Trains the block's steps and returns the seconds it took, with everything finished."""
    rank, size = hvd.rank(), hvd.size()
    dist.barrier()
    begin = time.perf_counter()
    for step in range(block.first, block.last):
        losses[step] = system.step(*batches.take(step, rank=rank, size=size))
        if progress is not None:
            progress.advance(f"{system.name:<9}  step {step + 1:>4}  loss {losses[step]:.3f}")
    system.finish()
    return time.perf_counter() - begin


def _validation_loss(model: nn.Module, corpus: Corpus, rank: int, size: int) -> float:
    """Mean loss over text that was never trained on, in nats a token; each rank does a share."""
    count = _VALIDATION_SEQUENCES * size
    batches = Batches(corpus.validation, context=GptConfig.context, batch=count, seed=_SEED)
    model.eval()
    with torch.inference_mode():
        inputs, targets = batches.take(0, rank=rank, size=size)
        mean = next_token_loss(model(inputs), targets)
    model.train()
    total = mean.clone()
    dist.all_reduce(total)
    return float(total) / size


def _largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Largest difference of two models' weights, relative to the largest weight of its tensor."""
    worst = 0.0
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        scale = max(float(mine.detach().abs().max()), torch.finfo(mine.dtype).tiny)
        worst = max(worst, float((mine - theirs).detach().abs().max()) / scale)
    return worst


def _on_all_ranks(value: float) -> float:
    worst = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def _equal_on_all_ranks(model: nn.Module) -> bool:
    """Whether every bit of every weight is the same on every rank."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(bytes_of(parameter.detach().contiguous()))
    mine = int.from_bytes(digest.digest()[:7], "big")
    largest = torch.tensor([mine, -mine])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest[0].item() == -largest[1].item()


def _say(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
