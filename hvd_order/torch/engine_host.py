"""The one engine of this process, shared by all of its optimizers.

One engine means one total order over all models: process groups used in different orders on
different ranks can hang.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from hvd_order import _torch as native
from hvd_order.plan.cut import Cut, Link, hold_lead_s
from hvd_order.torch import horovod_library, link_probe, process

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__: list[str] = []

_MAX_MODELS = 256  # SliceKey::kMaxModels
# Until the transport has been measured.
_FIRST_SLICE_BYTES = 2 * 2**20
_FIRST_SLICES_IN_FLIGHT = 4


class EngineHost:
    """Owns the engine, its transport and its process groups."""

    def __init__(self, context: process.ProcessContext) -> None:
        """Collective: creates two process groups, one for data and one for control messages."""
        config = context.config
        self.context = context
        # The engine notices a stall first and can name the cause; the group's own timeout is
        # behind.
        patience = config.timeout * 1.25
        # Objects that the ranks tell each other, here and when a model is registered.
        self.registration_group = context.new_group(
            "registration", backend="gloo", timeout=patience
        )
        self.transport = _transport(context, patience, self.registration_group)
        # Horovod takes up what has come once a cycle: with two it would take up one at a time.
        self.in_flight = 3 if isinstance(self.transport, native.HorovodTransport) else 2
        control = native.C10dControl(
            context.new_group("control", backend="gloo", timeout=patience),
            context.rank,
            context.size,
        )
        planned = config.agreement == "planned"
        policy = native.Policy.PLANNED if planned else getattr(native.Policy, config.policy.upper())
        slice_bytes = config.slice_bytes or min(
            _FIRST_SLICE_BYTES, config.credit_bytes or _FIRST_SLICE_BYTES
        )
        credit_bytes = config.credit_bytes or _FIRST_SLICES_IN_FLIGHT * slice_bytes
        self.cut = Cut(slice_bytes, credit_bytes, config.policy)
        self._link: Link | None = None
        self.engine = native.Engine(
            rank=context.rank,
            size=context.size,
            agreement=getattr(native.AgreementKind, config.agreement.upper()),
            policy=policy,
            credit_bytes=self.cut.credit_bytes,
            timeout_s=config.timeout.total_seconds(),
            stall_warning_s=config.stall_warning.total_seconds(),
            transport=self.transport,
            control=control,
        )
        self.copier = native.C10dCopier()
        self.models: set[int] = set()
        self.steps = 0  # of all optimizers together
        self.tuned = False  # an optimizer has begun to choose the cut
        self.settled = False  # and it has chosen
        self.layouts: dict[int, native.SliceLayout] = {}

    def link(self, device: torch.device) -> Link:
        """What the transport can do; the first call is collective, and nothing may travel then."""
        if self._link is None:
            self._link = link_probe.measure(self.transport, device, self.in_flight)
        return self._link

    def retune(self, cut: Cut, model: int) -> None:
        """Changes policy and credit; every rank does so between the same two steps.

        Args:
            model: it is about to be cut so.
        """
        # Other optimizers' slices must fit as well, also those of models that only some ranks
        # have forgotten: credit must not differ.
        others = [layout for m, layout in self.layouts.items() if m != model]
        largest = max((layout.largest_slice_bytes for layout in others), default=0)
        policy = "planned" if self.context.config.agreement == "planned" else cut.policy
        credit_bytes = max(cut.credit_bytes, largest)
        lead_s = hold_lead_s(self._link, cut) if self._link is not None else 0.0
        self.engine.retune(getattr(native.Policy, policy.upper()), credit_bytes, lead_s)
        self.cut = cut

    def add_model(
        self,
        model: int,
        layout: native.SliceLayout,
        buffers: list[torch.Tensor],
        plan: list[int],
    ) -> None:
        """Registers gradient buffers under an id that is free on every rank."""
        if isinstance(self.transport, native.HorovodTransport):
            horovod_library.check(buffers)
        self.transport.set_buffers(model, buffers, layout)
        self.engine.add_model(model, layout, plan)
        self.models.add(model)
        self.layouts[model] = layout

    def remove_model(self, model: int) -> None:
        """Forgets an idle model. Its layout is kept for the names in the timeline."""
        self.engine.remove_model(model)
        self.transport.remove_buffers(model)
        self.models.discard(model)

    def free_id(self, taken_anywhere: set[int]) -> int:
        """The lowest model id that no rank uses."""
        return next(i for i in range(_MAX_MODELS) if i not in taken_anywhere)

    def close(self) -> None:
        """Tells the other ranks and stops the engine."""
        self.engine.shutdown()


def _transport(
    context: process.ProcessContext, patience: timedelta, objects: dist.ProcessGroup
) -> native.TorchTransport:
    """The adapter to what carries the gradients. Collective."""
    if horovod_library.chosen(context, objects):
        path = horovod_library.start(context, patience, objects)
        return native.HorovodTransport(str(path), gpu_on_host=not horovod_library.has_gpu(path))
    return native.C10dTransport(context.new_group("gradients", timeout=patience))


_host: EngineHost | None = None


def engine_host() -> EngineHost:
    """The engine of this process. The first call is collective.

    Raises:
        NotInitialized: before ``init()``.
    """
    global _host
    context = process.current()
    if _host is None or _host.context is not context:
        host = EngineHost(context)
        context.on_shutdown(_close)
        _host = host
    return _host


def running_host() -> EngineHost | None:
    """The engine of this process if there is one; creates none."""
    return _host


def _close() -> None:
    global _host
    if _host is not None:
        _host.close()
        _host = None
