"""Parameter servers that update: the optimizer facts that they need, and their answers.

During the warm-up, servers sum and the worker's own optimizer updates. Then worker 0 sends
parameters and optimizer state to the servers. From then on the answer to a gradient is the updated
parameter, and the "update" of a parameter is to copy the answer. State returns on request
(checkpoints), and when the model is registered anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from hvd_order._native import _torch as native
from hvd_order.base.errors import InvalidUsage
from hvd_order.engine.model_channel import ModelChannel
from hvd_order.servers.worker.client import require_servers
from hvd_order.torch.parameters.entry import ParameterEntry
from hvd_order.torch.parameters.read_guard import Guard
from hvd_order.torch.sums.sum_use import USES, Step, SumUse, refuse_resized
from hvd_order.torch.updates.partial_step import InnerStep

__all__: list[str] = []

_KINDS: dict[type[Optimizer], str] = {
    SGD: "sgd",
    Adam: "adam",
    AdamW: "adamw",
    Adagrad: "adagrad",
    RMSprop: "rmsprop",
}
_SAME_NAMES = (
    "weight_decay", "momentum", "dampening", "eps", "alpha", "lr_decay",
    "initial_accumulator_value", "nesterov", "amsgrad", "centered", "maximize",
)  # fmt: skip
_PARAMETERS = 1  # part of a slice's state; the optimizer's moments follow


class ServerUpdate(SumUse):
    """One optimizer whose updates are made by servers."""

    def __init__(
        self,
        optimizer: Optimizer,
        own_step: InnerStep,
        channel: ModelChannel,
        compressed: bool,
        factor: float,
    ) -> None:
        """Checks that servers can apply this optimizer.

        Args:
            own_step: the optimizer's own step, used while servers only sum.
            channel: of the model.
            compressed: gradients are.
            factor: of sums.

        Raises:
            InvalidUsage: servers cannot apply it.
        """
        super().__init__(own_step)
        _check_answers(compressed, factor)
        host = channel.host
        base = type(optimizer)
        if base not in _KINDS:
            raise InvalidUsage(
                f"servers cannot update as {base.__name__} does, only as "
                f"{', '.join(each.__name__ for each in _KINDS)}: set HVD_ORDER_PS_UPDATE=worker"
            )
        self._active = False  # the servers have parameters and state
        self._optimizer = optimizer
        self._channel = channel
        self._model = -1
        self._entries: Sequence[ParameterEntry] = ()
        self._kind = _KINDS[base]
        self._servers = require_servers(host)
        self._rank = host.rank
        self._timeout_s = host.job.config.timeout.total_seconds()
        self._rules: list[dict[str, Any]] = []
        self._sent_rules: list[dict[str, Any]] = []
        self._hyper_parameters()  # raises if they are unsupported

    @property
    def returns_sums(self) -> bool:
        """Whether servers only sum."""
        return not self._active

    @property
    def is_readable(self) -> bool:
        """Whether servers only sum."""
        return not self._active

    @property
    def state_owner(self) -> str | None:
        """See `SumUse`."""
        return "the parameter servers" if self._active else None

    # ---- hyper-parameters ---------------------------------------------------------------------

    def _hyper_parameters(self) -> list[dict[str, Any]]:
        return [_rule(self._kind, group) for group in self._optimizer.param_groups]

    def begin_step(self, entries: Sequence[ParameterEntry]) -> None:
        """Sends hyper-parameters ahead of the first gradient of a step."""
        if not self._active:
            return
        self._rules = self._hyper_parameters()
        if self._rank == 0 and self._rules != self._sent_rules:
            self._send_rules()

    def _send_rules(self) -> None:
        self._sent_rules = self._hyper_parameters()
        rules = [native.UpdateRule(**rule) for rule in self._sent_rules]
        self._servers.transport.set_rules(self._model, rules)

    def check_step(self) -> None:
        """Raises if a hyper-parameter has changed between backward() and step()."""
        if self._active and self._rules and self._hyper_parameters() != self._rules:
            raise InvalidUsage(
                "hyper-parameters changed between backward() and step(), but the servers have used "
                "them already; change them after step(), or set HVD_ORDER_PS_UPDATE=worker"
            )

    # ---- updates ------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, *closure: Any) -> Any:
        """Copies the servers' answers; before servers update, the optimizer's own step."""
        if not self._active:
            return super().step(optimizer, *closure)
        loss = None
        if closure:
            with torch.enable_grad():
                loss = closure[0]()
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.copy_(parameter.grad)
        return loss

    def synchronize(self, step: Step, guard: Guard) -> None:
        """See `SumUse`."""
        self.check_may_read(fresh=False)
        super().synchronize(step, guard)

    # ---- registration, and the state ----------------------------------------------------------

    def check_entries(
        self, entries: Sequence[ParameterEntry], before: Sequence[ParameterEntry]
    ) -> None:
        """See `SumUse`."""
        if self._active:
            refuse_resized(before, "HVD_ORDER_PS_UPDATE=server")

    def lay_out(
        self,
        entries: Sequence[ParameterEntry],
        buffers: Sequence[torch.Tensor],
        layout: native.SliceLayout,
        observed: bool,
    ) -> None:
        """Lets the servers update from the end of the warm-up on."""
        del entries, buffers, layout
        self._active = observed

    def update_groups(self, entries: Sequence[ParameterEntry]) -> list[tuple[int, int]]:
        """See `SumUse`; empty while servers only sum.

        Raises:
            InvalidUsage: servers cannot update one of the parameters.
        """
        groups = {
            id(parameter): number
            for number, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        }
        for entry in entries:
            if entry.parameter.dtype != torch.float32 or entry.wire.dtype != torch.float32:
                raise InvalidUsage(
                    f"servers update parameters of float32, but '{entry.name}' travels as "
                    f"{entry.wire.dtype}: set HVD_ORDER_PS_UPDATE=worker"
                )
        if not self._active:
            return []
        return [(entry.parameter.numel(), groups[id(entry.parameter)]) for entry in entries]

    def registered(self, model: int, entries: Sequence[ParameterEntry]) -> None:
        """Worker 0 sends parameters and state."""
        self._model, self._entries = model, entries
        if not self._active or self._rank != 0:
            return
        steps, names = self._progress(), self._moments()
        most = max(len(each) for each in names.values())
        parts = _PARAMETERS + 1 + (most if steps else 0)
        for part in range(_PARAMETERS, parts):
            with torch.no_grad():
                for entry in entries:
                    value: Any = entry.parameter
                    if part > _PARAMETERS:
                        name = _nth(names[entry.parameter], part - _PARAMETERS - 1)
                        value = self._optimizer.state.get(entry.parameter, {}).get(name)
                    entry.wire.copy_(value) if value is not None else entry.wire.zero_()
            self._servers.transport.begin_with_buffers(model, part, parts, steps)
        self._send_rules()

    def before_end(self) -> None:
        """State on servers returns to the optimizer. Collective if it is there."""
        if self._active:
            self._channel.gather("the end of pushes", None)  # no rank pushes any more
            self.fetch()

    def fetch(self) -> None:
        """See `SumUse`."""
        if not self._active:
            return
        model, entries = self._model, self._entries
        names = self._moments()
        most = max(len(each) for each in names.values())
        for part in range(_PARAMETERS, _PARAMETERS + 1 + most):
            self._servers.transport.pull(model, part, self._timeout_s)
            with torch.no_grad():
                for entry in entries:
                    if part == _PARAMETERS:
                        entry.parameter.copy_(entry.wire)
                        continue
                    name = _nth(names[entry.parameter], part - _PARAMETERS - 1)
                    if name is not None:
                        self._optimizer.state[entry.parameter][name] = entry.wire.clone()
        steps = self._servers.transport.steps(model)
        if self._kind != "sgd":
            for entry in entries:
                self._optimizer.state[entry.parameter]["step"] = torch.tensor(float(steps))

    def check_may_load(self) -> None:
        """See `SumUse`."""
        if self._active:
            raise InvalidUsage(
                "the parameter servers have this optimizer's state; load a checkpoint before "
                "training begins, or set HVD_ORDER_PS_UPDATE=worker"
            )

    # ---- what the program may do --------------------------------------------------------------

    def check_may_read(self, fresh: bool) -> None:
        """Raises if there will be no gradient to read: servers answer with parameters."""
        if self._active and not fresh:
            raise InvalidUsage(
                "gradients cannot be read between backward() and step(): the servers apply them as "
                "they come. To clip or unscale them set HVD_ORDER_PS_UPDATE=worker"
            )

    def check_may_keep(self, name: str) -> None:
        """See `SumUse`."""
        if self._active:
            raise InvalidUsage(
                f"the program keeps the gradient of '{name}', or a tensor or array of the same "
                "memory (flat gradients), but servers answer with parameters. Set .grad to None "
                "before backward(), or set HVD_ORDER_PS_UPDATE=worker"
            )

    def check_may_be_sparse(self, name: str) -> None:
        """Raises: servers that update support dense gradients only."""
        raise InvalidUsage(
            f"the gradient of '{name}' is sparse, which servers cannot apply; pass "
            "sparse_as_dense=True to DistributedOptimizer or set HVD_ORDER_PS_UPDATE=worker"
        )

    # ---- the optimizer's state ----------------------------------------------------------------

    def _moments(self) -> dict[torch.Tensor, list[str]]:
        """Names of each parameter's moments."""
        return {
            parameter: _moments_of(self._kind, group)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }

    def _progress(self) -> int:
        """Number of steps that the optimizer has taken."""
        states = [state for state in self._optimizer.state.values() if state]
        if self._kind == "sgd":  # has no counter; its first step differs from all others
            return int(any(state.get("momentum_buffer") is not None for state in states))
        return max((int(state["step"]) for state in states if "step" in state), default=0)


def _check_answers(compressed: bool, factor: float) -> None:
    """Refuses work on gradients after the sum."""
    if compressed:
        raise InvalidUsage(
            "compression is for gradients, but with HVD_ORDER_PS_UPDATE=server parameters come "
            "back; drop it or set HVD_ORDER_PS_UPDATE=worker"
        )
    if factor != 1.0:
        raise InvalidUsage(
            "gradient_predivide_factor scales sums, but with HVD_ORDER_PS_UPDATE=server parameters "
            "come back; drop it or set HVD_ORDER_PS_UPDATE=worker"
        )


def _moments_of(kind: str, group: dict[str, Any]) -> list[str]:
    """Names of the moments in a parameter group, in the servers' order (update_rule.cc)."""
    if kind == "sgd":
        return ["momentum_buffer"] * bool(group["momentum"])
    if kind == "adagrad":
        return ["sum"]
    if kind == "rmsprop":
        more = ["grad_avg"] * bool(group["centered"])
        return ["square_avg", *more, *["momentum_buffer"] * bool(group["momentum"])]
    return ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * bool(group["amsgrad"])]


def _nth(names: Sequence[str], number: int) -> str | None:
    return names[number] if number < len(names) else None


def _rule(kind: str, group: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `native.UpdateRule` for a parameter group.

    Raises:
        InvalidUsage: servers do not support one of its options.
    """
    for option in ("capturable", "differentiable"):
        if group.get(option):
            raise InvalidUsage(f"servers do not know {option}=True: set HVD_ORDER_PS_UPDATE=worker")
    rule: dict[str, Any] = {"kind": kind, "lr": float(group["lr"])}
    rule |= {name: group[name] for name in _SAME_NAMES if name in group}
    if "betas" in group:
        rule["beta1"], rule["beta2"] = (float(beta) for beta in group["betas"])
    if group.get("decoupled_weight_decay") and kind == "adam":
        rule["kind"] = "adamw"
    return rule


USES.register("ps", ServerUpdate)
