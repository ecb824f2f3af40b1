"""HVD304: updates of parameters without an optimizer, from gradients that nothing averages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from hvd_order.tools.check.ranks import Ranks
from hvd_order.tools.check.rules import Finding, finding
from hvd_order.tools.check.script import Script, text_of

__all__ = ["check_updates_by_hand"]

_IN_PLACE = ("add_", "sub_", "addcmul_", "addcdiv_", "copy_")
_AVERAGES = re.compile(
    r"(^hvd\.|^torch\.distributed\.)(\w*all_?reduce|\w*all_?gather|reduce|\w*reduce_?scatter)"
)
_EXCHANGES = ("DistributedOptimizer", "DistributedDataParallel", "DDP", "FSDP", "fully_shard")
_INPUTS = re.compile(r"^(x|inputs?|images?|imgs?|delta|noise|pert\w*|adv\w*|data|z|latent\w*)$")


def check_updates_by_hand(script: Script, program: Sequence[Script], ranks: Ranks) -> set[Finding]:
    """HVD304 of `script`, a file of `program`."""
    if not any(one.calls_of("hvd.init") for one in program):
        return set()
    if any(name in one.called_names for one in program for name in _EXCHANGES):
        return set()
    alone = {part for call in ranks.calls_of_some() for part in ast.walk(call)}
    updates = [
        (node, name)
        for loop in _loops(script)
        for node, name in _updates(loop)
        if node not in alone
    ]  # fmt: skip
    if any(_averages(one, {name for _, name in updates}) for one in program):
        return set()
    return {finding(script.path, node, "HVD304") for node, _ in updates}


def _loops(script: Script) -> Iterator[ast.AST]:
    """Loops, and functions: those that one calls in a loop. Optimizers may be wrapped."""
    inside = {
        part
        for node in script.nodes
        if isinstance(node, ast.ClassDef)
        and any("optim" in text_of(base).lower() for base in node.bases)
        for part in ast.walk(node)
    }
    for node in script.nodes:
        kinds = ast.For | ast.While | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and node not in inside:
            yield node


def _updates(loop: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Statements that move a tensor against its own gradient, with the tensor's name."""
    target: ast.expr
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
            target, value = node.target, text_of(node.value)
            descends = isinstance(node.op, ast.Sub) or "-" in value
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
            target, value = node.targets[0], text_of(node.value)
            descends = "-" in value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _IN_PLACE
        ):
            target, value = node.func.value, text_of(node).partition("_(")[2]
            descends = node.func.attr == "sub_" or "-" in value
        else:
            continue
        tensor = text_of(target).removesuffix(".data")
        if not descends or ".sign(" in value or _INPUTS.match(tensor.rpartition(".")[2]):
            continue
        if re.search(rf"(?<![\w.]){re.escape(tensor)}\.grad\b", value):
            yield node, tensor


def _averages(script: Script, updated: set[str]) -> bool:
    """Whether gradients, or the parameters themselves, go through a collective."""
    gradients = script.names_from(lambda node: "grad" in text_of(node).lower())
    owners = updated | {name.split(".")[0] for name in updated} - {"self"}
    return any(
        "grad" in text_of(call).lower() or script.mentions(call, gradients | owners)
        for call in script.calls
        if _AVERAGES.match(script.called(call))
    )
