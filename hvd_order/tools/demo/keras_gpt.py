"""The demo's GPT (gpt.py) in Keras 3: the same shape, other initial numbers."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import layers, ops

from hvd_order.tools.demo.gpt import GptConfig


def make_gpt(config: GptConfig, seed: int) -> Any:
    """A model from tokens, int, shape [batch, context], to scores [batch, context, vocabulary].

    Every process that asks with the same seed gets the same weights.

    Source:
        Radford et al., "Language Models are Unsupervised Multitask Learners" (2019): pre-norm
        blocks, a last norm, a tied head, residual projections initialised smaller with depth.
    """
    keras.utils.set_random_seed(seed)

    def normal(depth: float = 1.0) -> Any:
        return keras.initializers.RandomNormal(stddev=0.02 / depth)

    def dense(width: int, depth: float = 1.0, **options: Any) -> Any:
        return layers.Dense(width, kernel_initializer=normal(depth), **options)

    residual = math.sqrt(2 * config.layers)
    tokens = keras.Input((config.context,), dtype="int32")
    embedding = layers.Embedding(
        config.vocabulary, config.width, embeddings_initializer=normal(), name="embedding"
    )
    positions = layers.Embedding(
        config.context, config.width, embeddings_initializer=normal(), name="positions"
    )
    x = embedding(tokens) + positions(ops.arange(config.context))
    for _ in range(config.layers):
        normed = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(
            config.heads, config.width // config.heads, use_bias=False, kernel_initializer=normal()
        )
        x = x + attention(normed, normed, use_causal_mask=True)
        inner = dense(4 * config.width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + dense(config.width, residual)(inner)
    x = layers.LayerNormalization()(x)
    head = _TiedHead(embedding) if config.tied_head else dense(config.vocabulary, use_bias=False)
    return keras.Model(tokens, head(x))


class _TiedHead(layers.Layer):  # type: ignore[misc]
    """Scores by the table that the tokens were looked up in."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self._embedding = embedding

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(self._embedding.embeddings))
