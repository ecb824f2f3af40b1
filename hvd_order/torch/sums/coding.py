"""Which gradients of a model travel in fewer bits, and what that does to them."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from hvd_order._native import _torch as native
from hvd_order.base.link import code_choice
from hvd_order.base.link.link_model import LinkModel
from hvd_order.torch.collectives.compression import CodedSums
from hvd_order.torch.kernels import use_kernels
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.sums.gradient_buffers import GradientBuffers

__all__ = ["CodedGradient"]

_log = logging.getLogger("hvd_order")

_FORWARD = 0.5  # the forward pass in units of the backward pass
_BITS = {"int8": 8.125, "bfloat16": 16, "float16": 16}  # of an element
_MUCH = 0.05  # relative error of a sum that a line of the log names
Owed = dict[str, tuple[float, float]]  # 2-norms of a rank's residual and of the sum, by name
_FORMATS = {
    "int8": native.WireFormat.INT8,
    "bfloat16": native.WireFormat.BFLOAT16,
    "float16": native.WireFormat.FLOAT16,
}


@dataclass(frozen=True)
class CodedGradient:
    """One gradient that travels in fewer bits.

    Attributes:
        name: of the parameter.
        format: of what travels: ``"int8"``, ``"bfloat16"`` or ``"float16"``.
        saved_bytes: what its sum saves each step, of the bytes of the gradient.
        relative_error: 2-norm of what all ranks still owe to the sum, as if each owed as much as
            this one, relative to that of the last sum; NaN if the sum is gone
            (``zero_grad(set_to_none=False)``) or zero.
        residual_norm: 2-norm of what this rank still owes to the sum.
    """

    name: str
    format: str
    saved_bytes: int
    relative_error: float
    residual_norm: float


class GradientCoding:
    """How gradients of one model travel in fewer bits.

    Attributes:
        chooses: whether the link decides which ones.
        names: the parameters whose gradients do.
        active: whether they do now: trials also measure steps without.
    """

    def __init__(self, compression: CodedSums, ranks: int) -> None:
        """Takes what the program asks for, and the number of ranks."""
        self._compression = compression
        self._ranks = ranks
        self._named: set[str] = set()
        self.chooses = compression.chooses
        self.names: frozenset[str] = frozenset()
        self._possible: frozenset[str] = frozenset()
        self.active = not self.chooses
        self._told = False  # that there is nothing to encode

    def why_impossible(self, buffers: GradientBuffers) -> str | None:
        """Why the devices cannot encode; None if they can."""
        for type_ in {device.type for device in buffers.devices} - {"cpu"}:
            use_kernels(type_)
            if not native.has_kernels(type_):
                return f"hvd_order has no kernels for {type_} here (hvd-order doctor says why)"
        return None

    def prepare(self, entries: Sequence[ParameterEntry], speaks: bool) -> None:
        """Takes all gradients that can travel in fewer bits, unless they are chosen later.

        Args:
            entries: in their places.
            speaks: this rank says so if there are none.
        """
        self._possible = frozenset(entry.name for entry in entries if self._is_possible(entry))
        self.names = self.names & self._possible if self.chooses else self._possible
        if speaks and entries and not self._possible and not self._told:
            self._told = True
            _log.warning(
                "the compression encodes no gradient: biases and norms, float64 gradients and what "
                "keep= names travel as they are"
            )

    def fits(self, chosen: Collection[str] | None) -> bool:
        """Whether an earlier run of this program may have made this choice; None: it made none."""
        if chosen is None or not self.chooses:
            return chosen is None and not self.chooses
        return self._possible.issuperset(chosen)

    def _is_possible(self, entry: ParameterEntry) -> bool:
        dtype = str(entry.wire.dtype).removeprefix("torch.")
        return bool(self._compression.format_of(entry.name, entry.parameter.dim(), dtype))

    def choice(
        self,
        entries: Sequence[ParameterEntry],
        buffers: GradientBuffers,
        link: LinkModel,
        both: bool,
    ) -> list[str]:
        """The parameters whose gradients must travel in fewer bits for the link to keep pace.

        From the times of this rank's last step. The backward pass does not wait for the link, so
        they do not hang on what travels now.

        Args:
            both: both halves of a sum can be encoded; otherwise the first.
        """
        timed = [entry for entry in entries if entry.ready_s > 0]
        if not timed:
            return []
        last_s = max(entry.ready_s for entry in timed)
        compute_s = (last_s - min(entry.ready_s for entry in timed)) * (1 + _FORWARD)
        gradients = []
        for entry in timed:
            # What the backward pass does behind a gradient, the forward pass does before its use.
            work_s = compute_s - (last_s - entry.ready_s) * (1 + _FORWARD)
            wire_s = entry.wire.nbytes * link.seconds_per_byte
            coded_s, error = None, math.nan
            if self._is_possible(entry):
                coded_s = self._coded_bytes(entry) * link.seconds_per_byte
                coded_s = coded_s if both else (coded_s + wire_s) / 2
                error = self._error(entry, buffers)
            gradients.append(
                code_choice.TimedGradient(
                    work_s, wire_s, coded_s, error if 0 < error < math.inf else 1.0
                )
            )
        return sorted(timed[p].name for p in code_choice.choose_to_spare(compute_s, gradients))

    def wire_bytes(self, entries: Sequence[ParameterEntry]) -> int:
        """Size of all gradients on the wire."""
        return sum(
            self._coded_bytes(entry) if entry.name in self.names else entry.wire.nbytes
            for entry in entries
        )

    def _coded_bytes(self, entry: ParameterEntry) -> int:
        return int(entry.wire.numel() * _BITS[self._compression.format] / 8)

    def set_up(
        self,
        entries: Sequence[ParameterEntry],
        buffers: GradientBuffers,
        transport: native.TorchTransport,
        model: int,
    ) -> None:
        """Makes the sums of a model that has just been registered travel so, if `active`."""
        if self.active:
            buffers.encode(entries, _FORMATS[self._compression.format], self.names)
            transport.set_formats(model, buffers.formats, buffers.residuals)

    def report(
        self, entries: Sequence[ParameterEntry], buffers: GradientBuffers
    ) -> list[CodedGradient]:
        """What travels in fewer bits now; nothing may be in flight."""
        report = []
        for entry in entries if self.active else ():
            if entry.name in self.names:
                assert entry.residual is not None
                report.append(
                    CodedGradient(
                        entry.name, self._compression.format,
                        entry.wire.nbytes - self._coded_bytes(entry),
                        self._error(entry, buffers), entry.residual.norm().item(),
                    )
                )  # fmt: skip
        return report

    def owed(self, entries: Sequence[ParameterEntry], buffers: GradientBuffers) -> Owed:
        """What this rank owes to the last sums that came in codes; nothing may be in flight."""
        return {
            entry.name: (float(entry.residual.norm()), float(buffers.sum_of(entry).float().norm()))
            for entry in entries
            if self.active and entry.name in self.names and entry.residual is not None
        }

    def log_losses(self, of_ranks: Sequence[Owed]) -> None:
        """Logs the sum that lacks most, if that is much and no line has named it.

        Args:
            of_ranks: `owed` of the same step, this rank's first.
        """
        lacks = {
            name: math.hypot(*(owed[name][0] for owed in of_ranks if name in owed)) / norm
            for name, (_, norm) in of_ranks[0].items()
            if norm > 0 and name not in self._named
        }
        worst = max(lacks, key=lacks.__getitem__, default="")
        if lacks.get(worst, 0.0) > _MUCH:
            self._named.add(worst)
            _log.info(
                "codes lack %.0f %% of the last sum of '%s', which later sums make up for; "
                "compression= with keep=[\"%s\"] sends it exactly",
                100 * lacks[worst], worst, worst,
            )  # fmt: skip

    def _error(self, entry: ParameterEntry, buffers: GradientBuffers) -> float:
        """What codes of the last sum lack, relative to it; NaN if there is none."""
        values = buffers.sum_of(entry)
        if self.active and entry.name in self.names and entry.residual is not None:
            # Codes of a sum that came in codes lack nothing.
            lack = math.sqrt(self._ranks) * entry.residual.norm()
        else:
            lacks = torch.zeros_like(values, dtype=torch.float32)
            native.encode(values, _FORMATS[self._compression.format], lacks)
            lack = lacks.norm()
        norm = values.float().norm()
        return float(lack / norm) if norm else math.nan
