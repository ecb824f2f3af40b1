"""Ranks that do different things: the error of the rank that waits says what the other one does."""

from __future__ import annotations

import pytest
import torch
from helpers.jobs import new_job
from helpers.ranks import RankPool
from torch import nn

import hvd_order.torch as hvd
from hvd_order.base.errors import HorovodInternalError


def body_differ(what: str) -> str:
    with new_job({"HVD_ORDER_TIMEOUT": "4"}):
        return train(what)


def train(what: str) -> str:
    """The text of the error that it ends by."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    try:
        for step in range(3):
            optimizer.zero_grad()
            if step == 2 and hvd.rank() == 1:
                if what == "unfreezes":
                    model[0].requires_grad_(True)
                else:
                    hvd.allreduce(torch.ones(1), name="accuracy")
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.flush()
    except HorovodInternalError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        # Whichever rank's time is over first, both say it.
        ("unfreezes", "registers parameters ('0.weight', ...)"),
        ("asks", "accuracy"),
    ],
)
def test_the_cause_of_a_stall_is_what_another_rank_does(
    two_ranks: RankPool, what: str, said: str
) -> None:
    errors = two_ranks.run(body_differ, what)
    assert said in errors[0], errors
    assert errors[1], errors
