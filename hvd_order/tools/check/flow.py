"""Follows a function's statements in execution order, with a state for the rules.

Branches get copies of the state and join after it; a branch that returns does not join. Bodies
of loops are followed once. Nested functions and classes are functions of their own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

__all__ = ["FlowAnalysis", "calls_in_order"]

State = TypeVar("State")


def calls_in_order(node: ast.AST) -> Iterator[ast.Call]:
    """Calls of an expression or simple statement, arguments before what they are passed to."""
    if isinstance(node, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for child in ast.iter_child_nodes(node):
        yield from calls_in_order(child)
    if isinstance(node, ast.Call):
        yield node


class FlowAnalysis(Generic[State]):
    """Derive from it; `follow` calls the methods below on the way."""

    def copy(self, state: State) -> State:
        """Copies the state for a branch."""
        raise NotImplementedError

    def join(self, first: State, second: State) -> State:
        """Returns the state after two branches."""
        raise NotImplementedError

    def call(self, call: ast.Call, state: State) -> State:
        """Handles a call."""
        raise NotImplementedError

    def assign(self, targets: Sequence[ast.expr], value: ast.expr, state: State) -> State:
        """Handles an assignment; the calls in `value` have been handled."""
        return state

    def end(self, state: State) -> State:
        """Handles the end of the function or of a loop iteration."""
        return state

    def follow(self, body: Sequence[ast.stmt], state: State) -> None:
        """Goes through a function's or module's statements."""
        last = self._block(body, state)
        if last is not None:
            self.end(last)

    def _block(self, body: Sequence[ast.stmt], state: State | None) -> State | None:
        for statement in body:
            if state is None:
                break
            state = self._statement(statement, state)
        return state

    def _statement(self, node: ast.stmt, state: State) -> State | None:
        if isinstance(node, ast.If):
            state = self._calls(node.test, state)
            return self._branches([node.body, node.orelse], state)
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            state = self._calls(node.test if isinstance(node, ast.While) else node.iter, state)
            behind = self._block(node.body, self.copy(state))
            if behind is not None:
                state = self._joined(state, self.end(behind)) or state
            return self._block(node.orelse, state)
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                state = self._calls(item.context_expr, state)
                if item.optional_vars is not None:
                    state = self.assign([item.optional_vars], item.context_expr, state)
            return self._block(node.body, state)
        if isinstance(node, ast.Try):
            done = self._block([*node.body, *node.orelse], self.copy(state))
            for handler in node.handlers:
                done = self._joined(done, self._block(handler.body, self.copy(state)))
            return self._block(node.finalbody, done)
        if isinstance(node, ast.Match):
            state = self._calls(node.subject, state)
            return self._branches([*(case.body for case in node.cases), []], state)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return state
        state = self._calls(node, state)
        if isinstance(node, ast.Assign):
            return self.assign(node.targets, node.value, state)
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            return self.assign([node.target], node.value, state)
        if isinstance(node, ast.Return | ast.Raise):
            self.end(state)
            return None
        return None if isinstance(node, ast.Break | ast.Continue) else state

    def _branches(self, bodies: Sequence[Sequence[ast.stmt]], state: State) -> State | None:
        behind: State | None = None
        for body in bodies:
            behind = self._joined(behind, self._block(body, self.copy(state)))
        return behind

    def _joined(self, first: State | None, second: State | None) -> State | None:
        if first is None or second is None:
            return first if second is None else second
        return self.join(first, second)

    def _calls(self, node: ast.AST, state: State) -> State:
        for call in calls_in_order(node):
            state = self.call(call, state)
        return state
