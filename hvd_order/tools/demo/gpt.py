"""A small GPT: pre-norm decoder with causal attention, learned positions and a tied head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_order.base.errors import InvalidUsage


@dataclass(frozen=True)
class GptConfig:
    """Shape of the model.

    Attributes:
        vocabulary: number of different tokens.
        context: longest sequence, in tokens.
        layers: number of blocks.
        heads: attention heads; must divide ``width``.
        width: size of a token's vector.
        tied_head: the head reads the embedding's weight instead of one of its own.
    """

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 256
    tied_head: bool = True

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise InvalidUsage(f"width {self.width} is not a multiple of {self.heads} heads")


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.heads
        # No bias: a key's bias adds the same to all scores of a query, so its gradient is zero but
        # for rounding, and Adam would blow that noise up to full steps.
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same; a token sees itself and those before it."""
        batch, tokens, width = x.shape
        per_head = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = per_head.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return joined


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to what came in."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp_in = nn.Linear(config.width, 4 * config.width)
        self.mlp_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same."""
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))
        return x


class Gpt(nn.Module):
    """Predicts each next token of a sequence.

    Source:
        Radford et al., "Language Models are Unsupervised Multitask Learners" (2019): pre-norm
        blocks, a last norm, a tied head, residual projections initialised smaller with depth.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialise()
        if config.tied_head:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token.

        Args:
            tokens: int64, shape [batch, tokens], at most ``context`` tokens.

        Returns:
            float, shape [batch, tokens, vocabulary].

        Raises:
            InvalidUsage: a sequence is longer than the context.
        """
        length = tokens.shape[1]
        if length > self.config.context:
            raise InvalidUsage(
                f"sequences have {length} tokens, the model's context is {self.config.context}"
            )
        places = torch.arange(length, device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # norms start at one and zero, as torch makes them
            residual = name.endswith(("attention.out.weight", "mlp_out.weight"))
            depth = math.sqrt(2 * self.config.layers) if residual else 1.0
            nn.init.normal_(parameter, std=0.02 / depth)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def next_token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token; ``scores`` as from ``Gpt``, ``targets`` its shape."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
