"""HVD1xx: the order of backward(), clipping, step() and zero_grad()."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from hvd_order.tools.check.flow import FlowAnalysis
from hvd_order.tools.check.rules import Finding, finding
from hvd_order.tools.check.script import Script, looks_like_optimizer, text_of

__all__ = ["check_stepping"]

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grads_with_norm_")


@dataclass(frozen=True)
class _Last:
    """The last event: "backward", "step", "late clip", "early zero" or "unknown"."""

    kind: str
    optimizer: str = ""
    node: ast.Call | None = None


_UNKNOWN = _Last("unknown")


class _Stepping(FlowAnalysis[_Last]):
    def __init__(self, script: Script) -> None:
        self._script = script
        self.findings: set[Finding] = set()

    def copy(self, state: _Last) -> _Last:
        return state

    def join(self, first: _Last, second: _Last) -> _Last:
        if first.kind == second.kind and first.optimizer == second.optimizer:
            return first
        # A clip that came too late on one path is too late.
        late = [state for state in (first, second) if state.kind == "late clip"]
        return late[0] if late else _UNKNOWN

    def end(self, state: _Last) -> _Last:
        if state.kind == "late clip" and state.node is not None:
            self._report(state.node, "HVD101")
            return _UNKNOWN
        return state

    def call(self, call: ast.Call, state: _Last) -> _Last:
        if not isinstance(call.func, ast.Attribute | ast.Name):
            return state
        method = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
        owner = text_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if method == "backward":
            self.end(state)
            return _Last("backward")
        if method in _CLIPS:
            return _Last("late clip", node=call) if state.kind == "step" else state
        if method == "zero_grad" and looks_like_optimizer(owner):
            state = self.end(state)
            return _Last("early zero", owner, call) if state.kind == "backward" else state
        stepped = self._stepped(call, method, owner)
        if stepped:
            if state.kind == "early zero" and state.optimizer == stepped and state.node is not None:
                self._report(state.node, "HVD102")
            return _Last("step", stepped)
        return state

    @staticmethod
    def _stepped(call: ast.Call, method: str, owner: str) -> str:
        """The optimizer that steps, if this is a step."""
        if method != "step":
            return ""
        if "scaler" in owner.lower() and call.args:  # torch.amp.GradScaler.step(optimizer)
            return text_of(call.args[0])
        return owner if looks_like_optimizer(owner) else ""

    def _report(self, node: ast.Call, code: str) -> None:
        self.findings.add(finding(self._script.path, node, code))


def check_stepping(script: Script) -> set[Finding]:
    """HVD101 and HVD102 of a script."""
    flow = _Stepping(script)
    for body in [script.tree.body, *(function.body for function in script.functions)]:
        flow.follow(body, _UNKNOWN)
    return flow.findings
