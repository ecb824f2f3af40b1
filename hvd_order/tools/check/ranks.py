"""HVD5xx: calls that only some ranks make, and calls that all make but one rank should."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvd_order.tools.check.rules import Finding, finding
from hvd_order.tools.check.script import COLLECTIVES, Script, argument, text_of

__all__ = ["Ranks"]

_OPTIMIZER = re.compile(r"^torch\.optim\.(?!lr_scheduler)(\w+\.)?[A-Z]\w*$")
_SETTINGS = ("lr", "momentum", "weight_decay", "betas", "eps", "nesterov", "amsgrad")


@dataclass
class _Reached:
    """Calls in a block of code.

    Attributes:
        some: calls that only some ranks reach, by a condition in the same function.
        every: all others.
    """

    some: list[ast.Call] = field(default_factory=list)
    every: list[ast.Call] = field(default_factory=list)


class Ranks:
    """Checks one script. Functions and methods are identified by name alone.

    A method call counts only on an object of a class of the script: ``bar.update()`` may be tqdm's.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._reached: dict[str, _Reached] = {}
        self._own = {function.name for function in script.functions}
        classes = [node for node in script.nodes if isinstance(node, ast.ClassDef)]
        self._classes = {node.name for node in classes}
        self._methods = {
            part.name
            for node in classes
            for part in node.body
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self._objects = {"self", "cls"} | {
            text_of(target)
            for node in script.nodes
            if isinstance(node, ast.Assign) and self._makes_object(node.value)
            for target in node.targets
        }
        self._survey()
        self._collectives = self._functions_with_collectives()
        self.findings: set[Finding] = set()

    def check(self) -> set[Finding]:
        """HVD501 to HVD503."""
        for call in (call for reached in self._reached.values() for call in reached.some):
            what = self.collective(call)
            if what:
                self.findings.add(finding(self._script.path, call, "HVD501", what))
        if self._script.uses_hvd:
            self._check_saving()
        if self._script.calls_of("hvd.DistributedOptimizer"):
            self._check_settings()
        return self.findings

    def calls_of_some(self) -> set[ast.Call]:
        """The calls that only some ranks reach, in functions that only some ranks call as well."""
        found: set[ast.Call] = set()
        called = {self._own_function(call) for call in self._script.calls}
        alone = called - self._called_everywhere()
        for name, reached in self._reached.items():
            found.update(reached.some)
            if name in alone:
                found.update(reached.every)
        return found

    def collective(self, call: ast.Call) -> str:
        """The collective that this call reaches; "" if none."""
        return self._collective(call, self._collectives)

    # --- who reaches what ----------------------------------------------------------------------

    def _survey(self) -> None:
        for function in self._script.functions:
            guarded = any(self._script.tells_ranks(d) for d in function.decorator_list)
            reached = self._reached.setdefault(function.name, _Reached())
            self._block(function.body, guarded, reached)
        top = self._reached.setdefault("", _Reached())
        self._block(self._script.tree.body, False, top)

    def _called_everywhere(self) -> set[str]:
        """Own functions that some code calls on every rank."""
        reached = self._reached.values()
        return {self._own_function(call) for one in reached for call in one.every}

    def _block(self, body: Sequence[ast.stmt], guarded: bool, reached: _Reached) -> None:
        for place, node in enumerate(body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.If) and self._script.tells_ranks(node.test):
                self._expression(node.test, guarded, reached)
                self._both(node.body, node.orelse, guarded, reached)
                leaves = _leaves(node.body) or _leaves(node.orelse)
                if leaves:  # only some ranks reach the following code
                    self._block(body[place + 1 :], True, reached)
                    return
                continue
            for _, value in ast.iter_fields(node):
                parts = value if isinstance(value, list) else [value]
                if parts and isinstance(parts[0], ast.stmt):
                    self._block(parts, guarded, reached)
                    continue
                for part in parts:
                    if isinstance(part, ast.ExceptHandler | ast.match_case):
                        self._block(part.body, guarded, reached)
                    elif isinstance(part, ast.AST):
                        self._expression(part, guarded, reached)

    def _both(
        self, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt], guarded: bool, reached: _Reached
    ) -> None:
        """Two branches for different ranks: a collective in both is reached by all."""
        branches = [_Reached(), _Reached()]
        for branch, statements in zip(branches, (body, orelse), strict=True):
            self._block(statements, True, branch)
        names = [{text_of(call.func) for call in branch.some} for branch in branches]
        for branch in branches:
            for call in branch.some:
                shared = all(text_of(call.func) in other for other in names)
                (reached.every if shared and not guarded else reached.some).append(call)

    def _expression(self, node: ast.AST, guarded: bool, reached: _Reached) -> None:
        if isinstance(node, ast.IfExp) and self._script.tells_ranks(node.test):
            guarded = True
        if isinstance(node, ast.BoolOp) and self._script.tells_ranks(node.values[0]):
            guarded = True
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, ast.Call):
            (reached.some if guarded else reached.every).append(node)
        for child in ast.iter_child_nodes(node):
            self._expression(child, guarded, reached)

    # --- rules ---------------------------------------------------------------------------------

    def _collective(self, call: ast.Call, functions: dict[str, str]) -> str:
        meaning = self._script.called(call)
        if meaning in COLLECTIVES:
            subset = argument(call, None, "process_set")
            return "" if subset is not None else meaning
        name = self._own_function(call)
        return f"{functions[name]}, in {name}()," if name in functions else ""

    def _functions_with_collectives(self) -> dict[str, str]:
        """Functions of the script that reach a collective, with that collective."""
        found: dict[str, str] = {}
        for _ in self._own:
            before = len(found)
            for name, reached in self._reached.items():
                whats = (self._collective(call, found) for call in reached.every)
                what = next((what for what in whats if what), "")
                if name and what and name not in found:
                    found[name] = what.split(",")[0]
            if len(found) == before:
                break
        return found

    def _check_saving(self) -> None:
        everywhere = self._called_everywhere()
        memory = {
            text_of(target)
            for node in self._script.nodes
            if isinstance(node, ast.Assign) and text_of(node.value).endswith("BytesIO()")
            for target in node.targets
        }
        for name, reached in self._reached.items():
            if name and name not in everywhere:
                continue  # a function that one rank calls, or another file
            for call in reached.every:
                target = argument(call, 1, "f")
                if self._script.called(call) != "torch.save" or target is None:
                    continue
                if text_of(target) in memory or self._script.depends_on_rank(target):
                    continue
                self.findings.add(finding(self._script.path, call, "HVD502"))

    def _check_settings(self) -> None:
        """Checks for hyper-parameters computed from the rank, at or after construction."""
        for call in self._script.calls:
            if _OPTIMIZER.match(self._script.called(call)):
                settings = [*call.args[1:], *(keyword.value for keyword in call.keywords)]
                if any(map(self._script.depends_on_rank, settings)):
                    self.findings.add(finding(self._script.path, call, "HVD503"))
        for node in self._script.nodes:
            if not isinstance(node, ast.Assign | ast.AugAssign):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(map(_is_setting, targets)) and self._script.depends_on_rank(node.value):
                self.findings.add(finding(self._script.path, node, "HVD503"))

    def _own_function(self, call: ast.Call) -> str:
        function = call.func
        if not isinstance(function, ast.Attribute):
            name = text_of(function)
            return name if name in self._own else ""
        owner = function.value
        known = text_of(owner) in self._objects | self._classes or self._makes_object(owner)
        return function.attr if known and function.attr in self._methods else ""

    def _makes_object(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and text_of(node.func) in self._classes


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether a branch ends the function, the iteration or the program."""
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.Return | ast.Continue | ast.Break):
        return True
    return isinstance(last, ast.Expr) and text_of(last.value).startswith(("sys.exit(", "exit("))


def _is_setting(target: ast.expr) -> bool:
    """Whether it is a hyper-parameter of a group: ``group["lr"]``."""
    key = target.slice if isinstance(target, ast.Subscript) else None
    return isinstance(key, ast.Constant) and key.value in _SETTINGS
