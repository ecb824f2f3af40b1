"""A small regression whose last weights are known: by numpy, in one process, without hvd_order.

The learning rate and the momentum have few bits, so that frameworks that keep them in float32
compute with the same numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["BATCH", "LEARNING_RATE", "MOMENTUM", "SHAPES", "batch", "initial", "trained"]

Array = NDArray[np.float64]

BATCH = 12  # rows of all ranks together; divides by 1, 2 and 3
LEARNING_RATE = 1 / 64
MOMENTUM = 0.875
WIDTH, HIDDEN = 16, 48
SHAPES = ((HIDDEN, WIDTH), (HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,), (1, HIDDEN), (1,))


def initial() -> list[Array]:
    """Weight and bias of three layers, as torch keeps them: (outputs, inputs)."""
    numbers = np.random.default_rng(1)
    return [numbers.uniform(-0.2, 0.2, shape) for shape in SHAPES]


def batch(step: int, rank: int = 0, size: int = 1) -> tuple[Array, Array]:
    """This rank's rows of a step's batch, and what they are to give."""
    x = np.random.default_rng(1000 + step).normal(size=(BATCH, WIDTH))
    mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    return x[mine], np.sin(x.sum(1))[mine]


def trained(steps: int) -> list[Array]:
    """The weights after so many steps of SGD with momentum on the mean square."""
    weights = initial()
    momenta = [np.zeros_like(weight) for weight in weights]
    for step in range(steps):
        for weight, momentum, gradient in zip(
            weights, momenta, _gradients(weights, *batch(step)), strict=True
        ):
            momentum *= MOMENTUM
            momentum += gradient
            weight -= LEARNING_RATE * momentum
    return weights


def _gradients(weights: list[Array], x: Array, y: Array) -> list[Array]:
    w1, b1, w2, b2, w3, b3 = weights
    h1 = np.tanh(x @ w1.T + b1)
    h2 = np.tanh(h1 @ w2.T + b2)
    d3 = 2 / len(x) * (h2 @ w3.T + b3 - y[:, None])
    d2 = (d3 @ w3) * (1 - h2**2)
    d1 = (d2 @ w2) * (1 - h1**2)
    return [d1.T @ x, d1.sum(0), d2.T @ h1, d2.sum(0), d3.T @ h2, d3.sum(0)]
