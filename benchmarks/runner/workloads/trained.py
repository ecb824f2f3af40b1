"""Models that people train, with random weights and synthetic data.

Shapes come from torchvision and transformers; nothing is downloaded. `small_cnn` and `demo_gpt`
need neither library and suit a CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.runner.workloads.real_models import REAL_MODELS
from benchmarks.runner.workloads.workload import Workload


def build(
    name: str, device: torch.device, rank: int, batch_size: int | None, autocast: bool
) -> Workload:
    """A workload by name, with the same weights on all ranks and other data on each.

    Args:
        batch_size: samples a rank; None: what fits most accelerators.
        autocast: computes in bfloat16.

    Raises:
        SystemExit: the library that has the model is not installed.
    """
    make, usual = WORKLOADS[name]
    torch.manual_seed(1)
    try:
        with device:  # where random weights are made soonest
            work = make(batch_size or usual, torch.Generator().manual_seed(1 + rank))
    except ImportError as error:
        raise SystemExit(
            f"{name} needs {error.name}; install it with: pip install {error.name}"
        ) from None
    work.model.to(device)
    batch = torch.utils._pytree.tree_map(lambda tensor: tensor.to(device), work.batch())
    lists = [module for module in work.model.modules() if isinstance(module, nn.ModuleList)]
    blocks = max(lists, key=len) if lists else next(work.model.children()).children()
    return replace(work, batch=lambda: batch, blocks=work.blocks or list(blocks), autocast=autocast)


class _Images(nn.Module):
    """A classifier with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(self.model(images), labels)


class _Tokens(nn.Module):
    """A language model of transformers with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss


def _momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5)


def _vision(name: str) -> Callable[[int, torch.Generator], Workload]:
    def make(size: int, generator: torch.Generator) -> Workload:
        import torchvision

        images = torch.randn(size, 3, 224, 224, generator=generator, device="cpu")
        labels = torch.randint(1000, (size,), generator=generator, device="cpu")
        return Workload(
            _Images(torchvision.models.get_model(name)), lambda: (images, labels), _momentum
        )

    return make


def _language(
    family: str, auto: str, context: int, **shape: int
) -> Callable[[int, torch.Generator], Workload]:
    def make(size: int, generator: torch.Generator) -> Workload:
        import transformers

        config = transformers.AutoConfig.for_model(family, **shape)
        model = getattr(transformers, auto).from_config(config)
        tokens = torch.randint(
            config.vocab_size, (size, context), generator=generator, device="cpu"
        )
        return Workload(_Tokens(model), lambda: tokens, _adamw, max_norm=1.0)

    return make


def _small(
    name: str, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], **more: Any
) -> Callable[[int, torch.Generator], Workload]:
    def make(size: int, generator: torch.Generator) -> Workload:
        staged, data = REAL_MODELS[name](size, generator)
        stages = list(staged.children())  # without the marks that note when they ran
        owners = Counter(p for stage in stages for p in stage.parameters())
        # FSDP2 cannot shard what two blocks share, as embedding and head do.
        blocks = [stage for stage in stages if all(owners[p] == 1 for p in stage.parameters())]
        return Workload(nn.Sequential(*stages), lambda: data, optimizer, blocks=blocks, **more)

    return make


WORKLOADS: dict[str, tuple[Callable[[int, torch.Generator], Workload], int]] = {
    "resnet50": (_vision("resnet50"), 64),
    "vgg16": (_vision("vgg16"), 64),
    "gpt2_medium": (
        _language("gpt2", "AutoModelForCausalLM", 1024, n_layer=24, n_head=16, n_embd=1024), 4
    ),
    "bert_large": (
        _language("bert", "AutoModelForMaskedLM", 512, num_hidden_layers=24, num_attention_heads=16,
                  hidden_size=1024, intermediate_size=4096), 8,
    ),
    "llama_1b": (
        _language("llama", "AutoModelForCausalLM", 1024, num_hidden_layers=16,
                  num_attention_heads=32, num_key_value_heads=8, hidden_size=2048,
                  intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True), 2,
    ),
    "small_cnn": (_small("small_cnn", _momentum), 16),
    "demo_gpt": (_small("demo_gpt", _adamw, max_norm=1.0), 4),
}  # fmt: skip
"""How to make each workload, and its usual number of samples a rank."""
