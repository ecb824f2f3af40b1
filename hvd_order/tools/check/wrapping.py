"""HVD2xx: order of wrapping, compiling and hooking."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvd_order.tools.check.flow import FlowAnalysis
from hvd_order.tools.check.rules import Finding, finding
from hvd_order.tools.check.script import Script, argument, looks_like_optimizer, text_of

__all__ = ["check_wrapping"]

_WRAP = "hvd.DistributedOptimizer"
_DDP = re.compile(r"^torch\.nn\.parallel\.(distributed\.)?DistributedDataParallel$")
_HOOKS = re.compile(r"^register_(forward|forward_pre|(full_)?backward|full_backward_pre)_hook$")
_SCHEDULER = re.compile(r"^torch\.optim\.lr_scheduler\.\w+$|\.get_\w*schedule\w*$")
_OPTIMIZER = re.compile(r"^torch\.optim\.(?!lr_scheduler)(\w+\.)?[A-Z]\w*$")


@dataclass(frozen=True)
class _Value:
    """Value of a variable; `source` is the call that created it, before any wrapping."""

    kind: str  # "optimizer", "wrapped", "compiled", "called" (compiled and run) or "ddp"
    source: ast.AST


@dataclass
class _WrappingState:
    values: dict[str, _Value] = field(default_factory=dict)
    schedulers: dict[ast.Call, ast.AST] = field(default_factory=dict)  # to their optimizer's source
    wrapped: set[ast.AST] = field(default_factory=set)  # sources that have been wrapped


class _Wrapping(FlowAnalysis[_WrappingState]):
    def __init__(self, script: Script) -> None:
        self._script = script
        self.findings: set[Finding] = set()

    def copy(self, state: _WrappingState) -> _WrappingState:
        return _WrappingState(dict(state.values), dict(state.schedulers), set(state.wrapped))

    def join(self, first: _WrappingState, second: _WrappingState) -> _WrappingState:
        """Keeps facts that hold on both paths."""
        return _WrappingState(
            dict(first.values.items() & second.values.items()),
            dict(first.schedulers.items() & second.schedulers.items()),
            first.wrapped & second.wrapped,
        )

    def call(self, call: ast.Call, state: _WrappingState) -> _WrappingState:
        meaning = self._script.called(call)
        if meaning == _WRAP:
            self._wrap(call, state)
        elif _DDP.match(meaning):
            if any(value.kind == "wrapped" for value in state.values.values()):
                self._report(call, "HVD205")
        elif _SCHEDULER.search(meaning):
            self._schedule(call, state)
        elif isinstance(call.func, ast.Attribute):
            self._method(call, call.func, state)
        self._forward(call, state)
        return state

    def _wrap(self, call: ast.Call, state: _WrappingState) -> None:
        inner = argument(call, 0, "optimizer")
        if inner is None:
            return
        value = self._value(inner, state)
        if value is None:  # an argument of this function, for example
            value = state.values[text_of(inner)] = _Value("optimizer", call)
        if value.kind == "wrapped":
            self._report(call, "HVD201")
        kinds = {value.kind for value in state.values.values()}
        if "ddp" in kinds:
            self._report(call, "HVD205")
        if "called" in kinds:
            self._report(call, "HVD203")
        elif "compiled" in kinds:
            self._report(call, "HVD602")
        state.wrapped.add(value.source)
        for scheduler, source in state.schedulers.items():
            if source is value.source:
                self._report(scheduler, "HVD202")

    def _schedule(self, call: ast.Call, state: _WrappingState) -> None:
        optimizer = argument(call, 0, "optimizer")
        value = None if optimizer is None else self._value(optimizer, state)
        if value is None or value.kind != "optimizer":
            return
        if value.source in state.wrapped:
            self._report(call, "HVD202")
        state.schedulers[call] = value.source

    def _method(self, call: ast.Call, function: ast.Attribute, state: _WrappingState) -> None:
        owner = text_of(function.value)
        value = state.values.get(owner)
        if function.attr == "step" and value is not None:
            if value.kind == "optimizer" and value.source in state.wrapped:
                self._report(call, "HVD206")
        elif function.attr == "compile" and not call.args and not self._script.called(call):
            state.values[owner] = _Value("compiled", call)
        elif _HOOKS.match(function.attr):
            parts = [owner] + [owner[: dot.start()] for dot in re.finditer(r"[.\[]", owner)]
            found = [state.values[part] for part in parts if part in state.values]
            if any(value.kind in ("compiled", "called") for value in found):
                self._report(call, "HVD204")

    def _forward(self, call: ast.Call, state: _WrappingState) -> None:
        """A call of a compiled model."""
        value = state.values.get(text_of(call.func))
        if value is not None and value.kind == "compiled":
            for name, other in list(state.values.items()):
                if other == value:
                    state.values[name] = _Value("called", value.source)

    def assign(
        self, targets: Sequence[ast.expr], value: ast.expr, state: _WrappingState
    ) -> _WrappingState:
        made = self._value(value, state)
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                name = text_of(part)
                held = made
                if held is None and isinstance(value, ast.Call) and looks_like_optimizer(name):
                    held = _Value("optimizer", value)
                if held is None or isinstance(target, ast.Tuple | ast.List):
                    state.values.pop(name, None)
                else:
                    state.values[name] = held
        if isinstance(value, ast.Call) and made is not None and made.kind == "compiled":
            model = argument(value, 0, "model")  # the module itself is compiled under both names
            if model is not None:
                state.values[text_of(model)] = made
        return state

    def _value(self, node: ast.expr, state: _WrappingState) -> _Value | None:
        """Evaluates an expression."""
        if not isinstance(node, ast.Call):
            return state.values.get(text_of(node))
        meaning = self._script.called(node)
        if meaning == _WRAP:
            inner = argument(node, 0, "optimizer")
            value = None if inner is None else self._value(inner, state)
            return _Value("wrapped", node if value is None else value.source)
        if meaning == "torch.compile":
            return _Value("compiled", node)
        if _DDP.match(meaning):
            return _Value("ddp", node)
        return _Value("optimizer", node) if _OPTIMIZER.match(meaning) else None

    def _report(self, node: ast.Call, code: str) -> None:
        self.findings.add(finding(self._script.path, node, code))


def check_wrapping(script: Script) -> set[Finding]:
    """HVD201 to HVD206, and HVD602, of a script."""
    flow = _Wrapping(script)
    for body in [script.tree.body, *(function.body for function in script.functions)]:
        flow.follow(body, _WrappingState())
    return flow.findings
