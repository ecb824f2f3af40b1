"""Tensors with the memory of a gradient in flight: what ``detach()`` and ``.data`` of it return.

A program scales or measures gradients through such aliases (``p.grad.data *= c``,
``p.grad.detach().norm()``), and they are tensors of their own: to set ``requires_grad``, a name or
an attribute of one, or to give it other memory, changes nothing of ``p.grad``. So an alias is what
torch makes, with the class of the gradient and a reference to it. What may be asked of the gradient
without completing it may be asked of the alias; any other use completes the gradient first. The
alias is an ordinary tensor from its first use after the gradient is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__: list[str] = []

# Attribute of an alias: its gradient. Nothing refers from the gradient to the alias.
_GRADIENT = "_hvd_order_gradient"


def alias(gradient: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Makes a tensor an alias in flight.

    Args:
        gradient: a gradient in flight, or an alias of one.
        made: an ordinary tensor with all of its memory.
    """
    of = gradient_of(gradient)
    setattr(made, _GRADIENT, of)
    made.__class__ = type(of)
    return made


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient whose alias a tensor is; the tensor itself if it is none."""
    of: torch.Tensor = getattr(tensor, _GRADIENT, tensor)
    return of


def gradients_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """`gradient_of` for each.

    None: a program has given an alias other memory, or autograd would record, or refuse, what is
    done to one of the tensors.
    """
    gradients = []
    for tensor in tensors:
        gradient = gradient_of(tensor)
        if tensor.requires_grad or not (tensor is gradient or tensor.is_set_to(gradient)):
            return None
        gradients.append(gradient)
    return gradients


def end(tensor: torch.Tensor) -> None:
    """Makes an alias an ordinary tensor if its gradient is one. Ignores other tensors."""
    of = vars(tensor).get(_GRADIENT)
    if type(of) is torch.Tensor:
        tensor.__class__ = torch.Tensor
        vars(tensor).pop(_GRADIENT, None)  # another thread may have ended it
