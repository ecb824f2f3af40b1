"""One rank of the demo with TensorFlow: the same model with and without deferred updates.

Started by ``hvd_order.tools.demo.train``; rank 0 shows the progress and writes ``result.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_order.keras as hvd
from hvd_order.planning.report.progress import ProgressBar
from hvd_order.tensorflow import allgather_object
from hvd_order.tools.demo.corpus import VOCABULARY, Batches, Corpus, load_corpus
from hvd_order.tools.demo.gpt import GptConfig
from hvd_order.tools.demo.keras_gpt import make_gpt
from hvd_order.tools.demo.result import DemoResult, Options
from hvd_order.tools.demo.schedule import StepBlock, interleaved_blocks, step_times

NAMES = ["in each step", "hvd_order"]

_SEED = 20
_VALIDATION_SEQUENCES = 64


class _KerasSystem:
    """The model, trained with `hvd.DistributedOptimizer`.

    Args:
        make_function: what makes a function of a training step.
    """

    def __init__(self, steps: int, make_function: Callable[[Any], Any]) -> None:
        self.model = make_gpt(GptConfig(vocabulary=VOCABULARY), _SEED)
        warm_up = max(1, min(20, steps // 5))
        rate = keras.optimizers.schedules.CosineDecay(
            1e-4, max(1, steps - warm_up), alpha=0.1, warmup_target=1e-3, warmup_steps=warm_up
        )
        # The table of tokens is also the head's, so its gradient is dense after all.
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.AdamW(rate, beta_2=0.95, weight_decay=0.1), sparse_as_dense=True
        )
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def step(inputs: Any, targets: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(targets, self.model(inputs, training=True))
            variables = self.model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
            return loss

        self.step = make_function(step)


def main(argv: list[str]) -> int:
    """Trains as one rank.

    Args:
        argv: one JSON object, the fields of ``Options``.
    """
    options = Options(**json.loads(argv[0]))
    tf.config.threading.set_intra_op_parallelism_threads(1)
    try:
        hvd.init()
        _train(options)
        hvd.shutdown()
    except KeyboardInterrupt:
        os._exit(130)  # the other ranks are interrupted as well: nothing is left to agree on
    return 0


def _train(options: Options) -> None:
    rank, size = hvd.rank(), hvd.size()
    corpus = load_corpus()
    systems = [_KerasSystem(options.steps, make) for make in (tf.function, hvd.overlapped_function)]
    weights = sum(int(np.prod(v.shape)) for v in systems[1].model.trainable_variables)
    if rank == 0:
        print(
            f"model: GPT in Keras, {weights / 1e6:.1f} million parameters; text: {corpus.files} "
            f"files of Python's standard library, {len(corpus.train) / 1e6:.1f} MB; "
            f"workers: {size}",
            flush=True,
        )
    blocks = list(interleaved_blocks(options.steps, block=options.block, recorded=options.recorded))
    seconds, losses = _run_blocks(options, blocks, systems, corpus)
    everyone = allgather_object((seconds, losses, [_digest(s.model) for s in systems]))
    slowest = np.max([each[0] for each in everyone], axis=0)  # a step ends when its last rank ends
    result = DemoResult(
        systems=NAMES,
        size=size,
        block_steps=options.block,
        weights=weights,
        train_loss=np.mean([each[1] for each in everyone], axis=0).tolist(),
        validation_loss=[_validation_loss(system.model, corpus, rank, size) for system in systems],
        step_ms=step_times(blocks, slowest.tolist()),
        largest_difference=_largest_difference(*(system.model for system in systems)),
        ranks_equal=[len({each[2][system] for each in everyone}) == 1 for system in (0, 1)],
        versions={
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "python": sys.version.split()[0],
        },
    )
    if rank == 0:
        result.write(Path(options.result_path))


def _run_blocks(
    options: Options, blocks: Sequence[StepBlock], systems: Sequence[_KerasSystem], corpus: Corpus
) -> tuple[list[float], Any]:
    """Trains all blocks.

    Returns:
        The seconds that each block took, and the losses by system and step.
    """
    rank, size = hvd.rank(), hvd.size()
    batches = Batches(
        corpus.train,
        context=GptConfig.context,
        batch=options.sequences_a_rank * size,
        seed=_SEED,
    )
    losses = np.zeros((2, options.steps))
    progress = ProgressBar(2 * options.steps, sys.stdout) if rank == 0 else None
    seconds = []
    for block in blocks:
        if block.purpose == "recorded" and block.system == 1:
            hvd.start_timeline(options.trace_path)
        seconds.append(_run_block(block, systems[block.system], batches, losses, progress))
    hvd.stop_timeline()
    if progress is not None:
        progress.close()
    return seconds, losses


def _run_block(
    block: StepBlock,
    system: _KerasSystem,
    batches: Batches,
    losses: Any,
    progress: ProgressBar | None,
) -> float:
    """Trains the block's steps and returns the seconds it took, with everything finished."""
    rank, size = hvd.rank(), hvd.size()
    allgather_object(None)  # all begin together
    begin = time.perf_counter()
    for step in range(block.first, block.last):
        inputs, targets = batches.take(step, rank=rank, size=size)
        loss = system.step(tf.constant(inputs.numpy()), tf.constant(targets.numpy()))
        losses[block.system, step] = float(loss)
        if progress is not None:
            progress.advance(
                f"{NAMES[block.system]:<12}  step {step + 1:>4}  loss {float(loss):.3f}"
            )
    hvd.flush()
    return time.perf_counter() - begin


def _largest_difference(one: Any, other: Any) -> float:
    """Largest difference of two models' weights, relative to the largest weight of its tensor."""
    return max(
        float(np.abs(a - b).max() / max(np.abs(a).max(), np.finfo(a.dtype).tiny))
        for a, b in zip(one.get_weights(), other.get_weights(), strict=True)
    )


def _validation_loss(model: Any, corpus: Corpus, rank: int, size: int) -> float:
    """Mean loss over text that was never trained on, in nats a token; each rank does a share."""
    count = _VALIDATION_SEQUENCES * size
    batches = Batches(corpus.validation, context=GptConfig.context, batch=count, seed=_SEED)
    inputs, targets = batches.take(0, rank=rank, size=size)
    scores = model.predict(inputs.numpy(), batch_size=16, verbose=0)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return float(np.mean(allgather_object(float(loss_of(targets.numpy(), scores)))))


def _digest(model: Any) -> str:
    whole = hashlib.sha256()
    for weight in model.get_weights():
        whole.update(weight.tobytes())
    return whole.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
