"""``SyncBatchNorm``: batch normalisation over the batches of all ranks, as one large batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from hvd_order.engine.job import process
from hvd_order.engine.requests.reduce_ops import Sum
from hvd_order.torch.collectives.single import allgather, allreduce

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation with statistics over all ranks' batches together.

    Outputs, input gradients and running statistics equal those of one process with the whole
    batch. The gradients of ``weight`` and ``bias`` are this rank's share, to be summed like all
    other gradients. Batches may have different sizes on different ranks, or be empty; a joined
    rank has an empty batch. Unlike Horovod's class, this one also supports CPU tensors and
    ``momentum=None`` (cumulative averages).

    Args:
        num_features: C of inputs of shape [N, C, ...], with 2 dimensions or more.
        eps: added to the variance.
        momentum: weight of the new batch in the running statistics; None: the mean of all batches.
        affine: has ``weight`` and ``bias``.
        track_running_stats: keeps running statistics and uses them in evaluation.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalised input; collective unless running statistics are used.

        Raises:
            ValueError: the input has fewer than 2 dimensions, or in training all ranks together
                have fewer than 2 values a channel.
        """
        if process.size() == 1 or (self.track_running_stats and not self.training):
            return super().forward(input)
        self._check_input_dim(input)
        factor = 0.0
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = (
                1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            )
        output, mean, unbiased_var = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps
        )
        if self.track_running_stats:
            with torch.no_grad():
                for running, new in ((self.running_mean, mean), (self.running_var, unbiased_var)):
                    assert running is not None
                    running.lerp_(new.to(running.dtype), factor)
        result: torch.Tensor = output
        return result


class _Normalise(torch.autograd.Function):
    """Normalises with the mean and variance of all ranks, and returns these as well.

    Combines count, mean and sum of squared deviations of each rank as in Chan, Golub and LeVeque
    1979, "Updating formulae and a pairwise algorithm for computing sample variances", in float64.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = _computed(input)
        count = x.numel() // x.shape[1]
        if count:
            var, mean = torch.var_mean(x, _all_but_channel(x), correction=0)
        else:
            var = mean = x.new_zeros(x.shape[1])
        mine = torch.cat([mean.new_tensor([count]).double(), mean.double(), var.double() * count])
        ranks = allgather(mine[None], name="sync_batch_norm.statistics")
        counts, means, squares = ranks.split([1, x.shape[1], x.shape[1]], dim=1)
        total = counts.sum()
        if total < 2:
            raise ValueError(
                "Expected more than 1 value per channel when training, got "
                f"{int(total)} on all ranks together"
            )
        mean = (counts * means).sum(0) / total
        square = (squares + counts * (means - mean).square()).sum(0)
        mean, inv_std = mean.to(x.dtype), (square / total + eps).rsqrt().to(x.dtype)
        scale = inv_std if weight is None else inv_std * weight
        y = (x - _broad(mean, x)) * _broad(scale, x)
        if bias is not None:
            y = y + _broad(bias, x)
        unbiased_var = square / (total - 1)
        ctx.save_for_backward(input, weight, mean, inv_std, total)
        ctx.mark_non_differentiable(mean, unbiased_var)
        return y.to(input.dtype), mean, unbiased_var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, inv_std, total = ctx.saved_tensors
        x, dy = _computed(input), _computed(grad_outputs[0])
        deviation = x - _broad(mean, x)
        sum_dy = dy.sum(_all_but_channel(x))
        sum_dy_deviation = (dy * deviation).sum(_all_but_channel(x))
        grad_input = grad_weight = grad_bias = None
        if weight is not None:
            grad_weight = (sum_dy_deviation * inv_std).to(weight.dtype)
            grad_bias = sum_dy.to(weight.dtype)
        if ctx.needs_input_grad[0]:
            sums = allreduce(
                torch.stack([sum_dy, sum_dy_deviation]).double(),
                op=Sum,
                name="sync_batch_norm.sums",
            )
            mean_dy, mean_dy_deviation = (sums / total).to(x.dtype)
            scale = inv_std if weight is None else inv_std * weight
            grad_input = (
                dy
                - _broad(mean_dy, x)
                - deviation * _broad(inv_std.square() * mean_dy_deviation, x)
            ) * _broad(scale, x)
            grad_input = grad_input.to(input.dtype)
        return grad_input, grad_weight, grad_bias, None


def _computed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor for the computation: half precision becomes single."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _all_but_channel(tensor: torch.Tensor) -> list[int]:
    return [0, *range(2, tensor.dim())]


def _broad(channel: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One value a channel, in the shape [1, C, 1, ...]."""
    return channel.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))
