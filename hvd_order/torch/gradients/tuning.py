"""Chooses slice size and credit: measures the transport first, then tries real steps.

A plan gives the first choice, and a choice that an earlier run has confirmed is not tried again.
If steps later become clearly longer or shorter than with the choice, the choice is made anew
(base/link/drift_detector.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hvd_order.base.link.advice import run_line
from hvd_order.base.link.drift_detector import Drift, DriftDetector
from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.link.slice_settings import SliceSettings
from hvd_order.base.link.tuner import Tuner, candidates, distinct
from hvd_order.base.plan.plan_file import Confirmed, Plan
from hvd_order.engine.advised_settings import advised_settings
from hvd_order.engine.model_channel import ModelChannel
from hvd_order.torch.devices import synchronize
from hvd_order.torch.gradients import followed_plan
from hvd_order.torch.sums.coding import GradientCoding
from hvd_order.torch.sums.registered_model import RegisteredModel

__all__: list[str] = []

_log = logging.getLogger("hvd_order")

_LONGEST_PATIENCE = 64  # the detector checks twice a minute at first, twice an hour at last


class Tuning:
    """The choice for one optimizer. Every rank takes the same action after the same steps."""

    def __init__(
        self,
        channel: ModelChannel,
        model: RegisteredModel,
        device: torch.device,
        plan: Plan | None,
        separable: bool,
    ) -> None:
        """Collective, in the engine's turn: measures the transport and applies the first choice.

        Nothing may be in flight.

        Args:
            channel: of the model.
            plan: a plan that fits the model.
            separable: whether updates may wait for their readers.
        """
        self._channel = channel
        self._host = host = channel.host
        self._model = model
        self._device = device
        self._plan = plan
        self._tuner: Tuner | None = None
        self._detector: DriftDetector | None = None
        self._patience = 1
        self._separable = separable
        self._counted_at = host.steps  # when hold-ups were last counted
        self._shared = host.shared
        config = host.job.config
        self._confirmed = self._fitting_choice()
        self._advised = settings = self._advice()
        is_free = (
            config.slice_bytes is None
            and config.credit_bytes is None
            and config.policy == "priority"
        )
        if is_free and plan is not None:
            settings = self._allowed(plan.slice_settings)
        self._use(settings)
        self._tries = is_free and config.tune
        if self._tries:
            if self._confirmed is None:
                self._try_rivals()
            else:
                self._detector = DriftDetector(self._confirmed.step_s)
        host.tuning_ended = self.done
        if plan is not None:
            self._log_plan(plan)
        if self.done:
            self._log_outlook(None if self._detector is None else self._detector.expected_s)

    def _fitting_choice(self) -> Confirmed | None:
        """The choice of an earlier run with as many ranks, if it was among what this one tries."""
        confirmed = None if self._plan is None else self._plan.confirmed
        if confirmed is None or confirmed.ranks != self._host.size:
            return None
        coding = self._model.coding
        fits = confirmed.coded is None if coding is None else coding.fits(confirmed.coded)
        return confirmed if all(self._channel.gather("the plan's choice", fits)) else None

    def _advice(self, again: bool = False) -> SliceSettings:
        may_be_split = (
            self._separable and self._host.job.config.cross_iteration and self._model.may_be_split
        )
        settings = advised_settings(
            self._channel, self._device, self._model.size_bytes, again, may_be_split
        )
        self._without_codes = settings
        coding = self._model.coding
        return settings if coding is None else self._with_codes(settings, coding, again)

    def _with_codes(
        self, settings: SliceSettings, coding: GradientCoding, again: bool
    ) -> SliceSettings:
        """Chooses which gradients travel in fewer bits, and cuts them so that slices have the
        size on the wire that is advised for so few bytes.
        """
        model = self._model
        known = None if again or self._confirmed is None else self._confirmed.coded
        if known is not None:
            coding.names = frozenset(known)
        elif coding.chooses:
            model.choose_coded(coding, self._link)
        if not coding.names:
            return settings
        if self._host.job.config.slice_bytes is None:
            fewer = advised_settings(self._channel, self._device, model.wire_bytes)
            settings = replace(
                settings, slice_bytes=fewer.slice_bytes, credit_bytes=fewer.credit_bytes
            ).scaled(model.size_bytes / model.wire_bytes)
        return replace(settings, split=True, coded=True)

    def _allowed(self, settings: SliceSettings) -> SliceSettings:
        """A plan's settings, overridden by what the user has set and by what the transport needs.

        All-reduces are split only where all ranks may split this model's: the plan may have been
        made for a program that clips.
        """
        config = self._host.job.config
        if config.agreement is not None or not self._host.choice.ranks_sum:
            settings = replace(settings, agreement=self._host.first_agreement)
        if self._advised.coded:
            settings = replace(settings, split=True, coded=True)
        elif not self._advised.split:
            settings = replace(settings, split=False)
        return settings if config.cross_iteration else replace(settings, cross_iteration=False)

    def _use(self, settings: SliceSettings) -> None:
        self._model.retune(
            settings, None if self._plan is None else self._plan.issue_order_of(settings)
        )

    def _try_rivals(self) -> None:
        """Begins trials of the settings in use, the plan's alternatives, and those without a plan.

        Leaves out rivals that no trial can distinguish from an earlier one.
        """
        host = self._host
        self._shared = host.shared
        of_plan = (
            []
            if self._plan is None
            else [self._allowed(each.slice_settings) for each in self._plan.candidates]
        )
        is_free = host.choice.ranks_sum and host.job.config.agreement is None
        planned = is_free and not host.shared
        others = candidates(self._advised, self._model.size_bytes, planned, self._separable)
        if "split" in host.job.config.debug and self._advised.split and not self._advised.coded:
            others = [each for each in others if each.split]
        tried = [*([host.slice_settings] if of_plan else []), *of_plan, *others]
        if self._advised.coded:
            tried = self._coded_and_not(tried, others[1:3])
        # All ranks try the same: rank 0's.
        choices: list[SliceSettings] = self._channel.gather("settings to try", distinct(tried))[0]
        self._tuner = Tuner(choices)
        if self._tuner.slice_settings != host.slice_settings:
            self._use(self._tuner.slice_settings)

    def _coded_and_not(
        self, settings: Sequence[SliceSettings], waiting: Sequence[SliceSettings]
    ) -> list[SliceSettings]:
        """Candidates with codes. If these are there to save time, some without come first: one of
        them stays unless codes are clearly faster.

        Args:
            waiting: of the settings, those that wait for all gradients.
        """
        with_codes = [replace(each, split=True, coded=True) for each in settings]
        if self._model.coding is None or not self._model.coding.chooses:
            return with_codes
        may_be_split = self._separable and self._model.read_by_norm
        without = [
            replace(each, coded=False, split=may_be_split and each.cross_iteration)
            for each in (self._without_codes, *waiting)
        ]
        return [*without, *with_codes]

    @property
    def done(self) -> bool:
        """Whether the choice has been made."""
        return self._tuner is None

    def step_taken(self, flush: Callable[[], object]) -> None:
        """Handles the end of a step. Collective after the same steps on all ranks.

        Args:
            flush: finishes all transfers in flight.
        """
        if self._tuner is not None and self._tuner.is_boundary:
            synchronize(self._device)
        now_s = time.monotonic()
        if self._is_newly_shared and self._host.shared_on is threading.current_thread():
            flush()
            with self._channel.turn():
                self._share_engine()
        elif self._tuner is not None:
            mine_s = self._tuner.step_taken(now_s)
            if mine_s is not None:
                flush()
                with self._channel.turn():
                    if self._is_newly_shared:
                        self._share_engine()
                    else:
                        self._go_on(self._tuner, mine_s)
        elif self._detector is not None:
            seen_s = self._detector.step_taken(now_s)
            if seen_s is not None:
                with self._channel.turn():
                    if self._is_newly_shared:
                        flush()
                        self._share_engine()
                    else:
                        self._compare(self._detector, seen_s, flush)

    @property
    def _is_newly_shared(self) -> bool:
        """Whether a second model has come since the last choice of candidates.

        It may have come on a thread of its own, between other steps of this model on each rank: in
        a turn all ranks see the same.
        """
        return self._shared != self._host.shared

    def _share_engine(self) -> None:
        """Begins trials anew without planned orders, which cover one model only."""
        self._shared = self._host.shared
        self._detector = None
        if self._tries:
            self._use(self._advised)
            self._try_rivals()

    def _go_on(self, tuner: Tuner, mine_s: float) -> None:
        """Goes on to the next candidate, or to the choice. Nothing may be in flight."""
        before = tuner.slice_settings
        settings = tuner.measured(self._channel.gather("step times", mine_s))
        if settings != before:
            self._use(settings)
        if not tuner.done:
            return
        self._tuner = None
        self._host.engine.take_counts()
        self._counted_at = self._host.steps
        self._detector = DriftDetector(tuner.chosen_s, self._patience, expected=False)
        self._host.tuning_ended = True
        self._note(tuner.chosen_s)
        if self._host.rank == 0:
            level = logging.WARNING if settings.policy == "arrival" else logging.INFO
            _log.log(level, "chosen: %s%s", _text(settings), _no_gain(settings))
        if self._patience == 1:  # the first choice
            self._log_outlook(tuner.chosen_s)

    @property
    def _link(self) -> LinkModel:
        link = self._host.known_link
        assert link is not None  # `advised_settings` has measured it
        return link

    def _log_outlook(self, step_s: float | None) -> None:
        """Logs the largest possible gain from ordering, from the measurements of this run."""
        if self._host.rank == 0:
            _log.info(run_line(self._link, self._model.size_bytes, self._host.size, step_s))

    def _compare(self, detector: DriftDetector, mine_s: float, flush: Callable[[], object]) -> None:
        """Compares the last step times of all ranks; begins new trials after a lasting change."""
        is_first = detector.expected_s is None
        only_model = len(self._host.models) == 1
        _, hold_ups = self._host.engine.take_counts()
        steps = max(self._host.steps - self._counted_at, 1)
        self._counted_at = self._host.steps
        everyone: Sequence[tuple[float, float, bool]] = self._channel.gather(
            "what its drift detector has seen", (mine_s, hold_ups / steps, only_model)
        )
        drift = detector.compared(
            [seen_s for seen_s, _, _ in everyone], max(late for _, late, _ in everyone)
        )
        if is_first and detector.expected_s is not None:
            self._note(detector.expected_s)
        if drift is not None:
            flush()
            self._try_again(drift, measure=all(only_model for _, _, only_model in everyone))

    def _try_again(self, drift: Drift, measure: bool) -> None:
        """Begins trials anew; the next ones after these come later.

        Args:
            measure: nothing of another optimizer may be in flight on any rank.
        """
        if self._host.rank == 0:
            _log.info(
                "steps take %.3g s, where they took %.3g s when slices were chosen%s: trying again",
                drift.now_s, drift.before_s,
                "; slices are late in the planned order" if drift.late else "",
            )  # fmt: skip
        if measure:
            self._channel.gather(
                "nothing in flight", None
            )  # waits until no rank has anything in flight
            self._advised = self._advice(again=True)
        self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
        self._detector = None
        self._try_rivals()
        self._host.tuning_ended = self.done

    def _note(self, step_s: float) -> None:
        if self._plan is not None:
            settings, coding = self._host.slice_settings, self._model.coding
            coded = None
            if coding is not None and coding.chooses:
                coded = tuple(sorted(coding.names)) if settings.coded else ()
            followed_plan.note(self._host, Confirmed(settings, step_s, self._host.size, coded))

    def _log_plan(self, plan: Plan) -> None:
        if self._host.rank != 0:
            return
        others = "" if plan.ranks == self._host.size else f" (made for {plan.ranks} ranks)"
        next_ = "to be tried against others" if self._tuner is not None else "without trials"
        _log.info(
            "following the plan %s%s: %s, %s",
            self._host.job.config.plan, others, _text(self._host.slice_settings), next_,
        )  # fmt: skip


def _text(settings: SliceSettings) -> str:
    return (
        f"slices of {settings.slice_bytes >> 10} KiB, {settings.credit_bytes >> 10} KiB in flight, "
        f"{settings.policy} order, {settings.agreement} agreement"
        + (", all-reduces split" if settings.split and not settings.coded else "")
        + (", codes of fewer bits" if settings.coded else "")
    )


def _no_gain(settings: SliceSettings) -> str:
    """What the choice says about the gain from ordering, if it has none."""
    if not settings.cross_iteration:
        return (
            ", awaited in step(): neither order nor overlap with the next forward pass helps this "
            "model on this network"
        )
    return (
        "; order does not help this model on this network" if settings.policy == "arrival" else ""
    )
