"""Chooses slice size and credit: the transport is measured first, then real steps are tried."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from hvd_order.plan.cut import Cut, arrival_cut, best_cut
from hvd_order.plan.tuner import Tuner, Turn, candidates
from hvd_order.torch import registration
from hvd_order.torch.engine_host import EngineHost
from hvd_order.torch.registered_model import RegisteredModel
from hvd_order.torch.request_errors import translate_failure

__all__: list[str] = []

_log = logging.getLogger("hvd_order")


class Tuning:
    """The choice for one optimizer. Every rank does the same after the same steps."""

    def __init__(self, host: EngineHost, model: RegisteredModel, device: torch.device) -> None:
        """Collective: measures the transport and applies the first choice.

        Nothing may be in flight.
        """
        self._host = host
        self._model = model
        config = host.context.config
        cut = self._first_cut(device)
        model.retune(cut)
        trials = (
            config.tune
            and config.slice_bytes is None
            and config.policy == "priority"
            and config.agreement != "planned"
            and model.size_bytes > cut.slice_bytes // 2
        )
        self._tuner = Tuner(candidates(cut) if trials else [])
        host.settled = self.done

    def _first_cut(self, device: torch.device) -> Cut:
        config = self._host.context.config
        try:
            link = self._host.link(device)
        except RuntimeError as error:
            self._host.engine.check()  # knows better which rank is to blame, if it has noticed
            raise translate_failure(error, "first steps of training", self._host.context) from error
        cut = best_cut(link, self._model.size_bytes, self._host.in_flight)
        if config.slice_bytes is not None:
            in_flight = cut.credit_bytes // cut.slice_bytes
            cut = Cut(config.slice_bytes, in_flight * config.slice_bytes)
        if config.credit_bytes is not None:
            cut = Cut(min(cut.slice_bytes, config.credit_bytes), config.credit_bytes)
        # Whoever registers first measures first: all ranks take rank 0's word.
        chosen: Cut = registration.gather(self._host, replace(cut, policy=config.policy))[0]
        return chosen

    @property
    def done(self) -> bool:
        """Whether the choice is made."""
        return self._tuner.done

    def measured(self) -> Turn | None:
        """A step has ended; how the last ones went on this rank, when all ranks have to talk."""
        return self._tuner.step_taken(time.monotonic())

    def go_on(self, mine: Turn) -> None:
        """Goes on to the next candidate, or to the choice. Collective. Nothing may be in flight."""
        before = self._tuner.cut
        cut = self._tuner.measured(registration.gather(self._host, mine))
        if cut != before:
            self._model.retune(cut)
        self._host.settled = self.done
        if self.done and self._host.rank == 0:
            level = logging.WARNING if cut == arrival_cut() else logging.INFO
            _log.log(
                level,
                "chosen: slices of %d KiB, %d KiB in flight, %s order%s",
                cut.slice_bytes >> 10,
                cut.credit_bytes >> 10,
                cut.policy,
                "; order does not help this model on this network" if level > logging.INFO else "",
            )
