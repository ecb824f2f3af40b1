"""HVD504: a file that some ranks save and all load, with nothing between that makes them wait."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from hvd_order.tools.check.flow import FlowAnalysis
from hvd_order.tools.check.ranks import Ranks
from hvd_order.tools.check.rules import Finding, finding
from hvd_order.tools.check.script import Script, argument, looks_like_optimizer, text_of

__all__ = ["check_saved_files"]

# Names of methods and of other files' functions that may exchange something.
_MAY_WAIT = re.compile(r"barrier|wait|sync|join|reduce|gather|broadcast|train|eval|valid|test|fit")


@dataclass
class _Saved:
    """What some ranks have saved since all ranks have last waited for each other.

    Attributes:
        waits: how often they have waited.
        files: the saved files, as the script names them.
    """

    waits: int = 0
    files: set[str] = field(default_factory=set)


class _Files(FlowAnalysis[_Saved]):
    def __init__(self, script: Script, ranks: Ranks) -> None:
        self._script = script
        self._ranks = ranks
        self._alone = ranks.calls_of_some()
        self.findings: set[Finding] = set()

    def copy(self, state: _Saved) -> _Saved:
        return _Saved(state.waits, set(state.files))

    def join(self, first: _Saved, second: _Saved) -> _Saved:
        """Waiting in one branch counts: ``if distributed: barrier()``."""
        if first.waits != second.waits:
            return max(first, second, key=lambda state: state.waits)
        return _Saved(first.waits, first.files | second.files)

    def call(self, call: ast.Call, state: _Saved) -> _Saved:
        meaning = self._script.called(call)
        if meaning == "torch.save":
            file = argument(call, 1, "f")
            if file is not None and call in self._alone:
                state.files.add(text_of(file))
        elif meaning == "torch.load":
            file = argument(call, 0, "f")
            if file is not None and call not in self._alone and text_of(file) in state.files:
                self.findings.add(finding(self._script.path, call, "HVD504"))
        elif self._waits(call):
            return _Saved(state.waits + 1)
        return state

    def _waits(self, call: ast.Call) -> bool:
        """Whether ranks may wait for each other in this call."""
        if self._ranks.collective(call):
            return True
        if not isinstance(call.func, ast.Attribute):
            return bool(_MAY_WAIT.search(text_of(call.func)))
        owner = text_of(call.func.value)
        if call.func.attr == "step":
            return looks_like_optimizer(owner) or "scaler" in owner.lower()
        # model.train() and model.eval() set a flag; torch's own functions wait for no rank.
        flag = call.func.attr in ("train", "eval") and len(call.args) <= 1
        local = self._script.called(call).startswith("torch.") and "distributed" not in owner
        return not flag and not local and bool(_MAY_WAIT.search(call.func.attr))


def check_saved_files(script: Script, ranks: Ranks) -> set[Finding]:
    """HVD504 of a script."""
    if not script.uses_hvd:
        return set()
    flow = _Files(script, ranks)
    for body in [script.tree.body, *(function.body for function in script.functions)]:
        flow.follow(body, _Saved())
    return flow.findings
