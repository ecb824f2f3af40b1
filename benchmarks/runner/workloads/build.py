"""The models of the side-by-side benchmark, by name: emulated ones, and small ones that compute."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks.runner.workloads.emulated_device import EmulatedModel, model_input
from benchmarks.runner.workloads.profiles import PROFILES
from benchmarks.runner.workloads.real_models import REAL_MODELS
from benchmarks.runner.workloads.workload import Workload

MODELS = [*PROFILES, *REAL_MODELS]


def is_real(name: str) -> bool:
    """Whether the model computes, instead of sleeping as long as it is told to."""
    return name in REAL_MODELS


def build(
    name: str, rank: int, compute_s: float, beside: Iterable[torch.nn.Module] = ()
) -> Workload:
    """The model of that name.

    Args:
        rank: ranks have different data.
        compute_s: of forward and backward; real models take their time.
        beside: models of this name that train in other turns; emulated ones share the memory of
            gradients, as an allocator would reuse it.
    """
    torch.manual_seed(0)
    if not is_real(name):
        like = next((m for m in beside if isinstance(m, EmulatedModel)), None)
        emulated = EmulatedModel(PROFILES[name]().scaled_to(compute_s), rank, like)

        def zero() -> None:
            with torch.no_grad():
                for parameter in emulated.parameters():
                    parameter.zero_()

        return Workload(emulated, model_input, recorder=emulated.recorder, reset=zero)
    model, data = REAL_MODELS[name](None, torch.Generator().manual_seed(1 + rank))
    first = [parameter.detach().clone() for parameter in model.parameters()]

    def restore() -> None:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), first, strict=True):
                if isinstance(parameter, DTensor):  # FSDP2 keeps a part on each rank
                    mesh, placements = parameter.device_mesh, parameter.placements
                    parameter.copy_(distribute_tensor(value, mesh, placements))
                else:
                    parameter.copy_(value)

    return Workload(model, lambda: data, recorder=model.recorder, reset=restore)


def size_bytes(name: str) -> int:
    """Of all gradients of a model."""
    if not is_real(name):
        return PROFILES[name]().size_bytes
    return sum(build(name, 0, 0.0).layer_bytes())
