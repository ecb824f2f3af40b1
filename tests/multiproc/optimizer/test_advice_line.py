"""What a run says about its own order, once."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from helpers.jobs import new_job
from helpers.ranks import RankPool
from torch import nn

import hvd_order.torch as hvd
from hvd_order.base.link.link_model import LinkModel
from hvd_order.engine import link_probe

LINK = LinkModel(latency_s=1e-4, slice_cost_s=5e-5, seconds_per_byte=1e-9)


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def body_train() -> list[str]:
    logger, kept = logging.getLogger("hvd_order"), Kept()
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        with pytest.MonkeyPatch.context() as patch, new_job({"HVD_ORDER_TUNE": "0"}):
            patch.setattr(link_probe, "measure", lambda *_: LINK)  # a busy host measures anything
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(300, 800), nn.ReLU(), nn.Linear(800, 10))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1e-3),
                named_parameters=model.named_parameters(),
            )
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.randn(4, 300)).square().mean().backward()
                optimizer.step()
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)
    return [line for line in kept.lines if "of gradients need" in line]


def test_rank_0_says_once_what_order_can_gain(two_ranks: RankPool) -> None:
    """Without trials; behind them: test_tuning.py."""
    (line,), nothing = two_ranks.run(body_train)
    assert nothing == []
    assert re.match(r"0\.99\d MB of gradients", line)
    assert "(2 ranks)" in line
    assert "hvd-order advise" in line
