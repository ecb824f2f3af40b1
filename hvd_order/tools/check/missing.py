"""HVD301 to HVD303, HVD4xx and HVD601: calls that a program lacks in all of its files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from hvd_order.tools.check.rules import Finding, finding
from hvd_order.tools.check.script import Script, argument, looks_like_optimizer, text_of

__all__ = ["check_missing"]

_SAMPLERS = ("DistributedSampler", "ElasticSampler")
_EVALUATION = re.compile(r"val|test|dev|infer")  # in the name of a sampler, or of its data
_STATES = ("TorchState",)  # whose sync() broadcasts
_DEVICES = ("set_device", "local_rank")


def check_missing(script: Script, program: Sequence[Script]) -> set[Finding]:
    """Findings of `script`, a file of `program`."""
    found: set[Finding] = set()
    wrapped = script.calls_of("hvd.DistributedOptimizer")
    found |= {finding(script.path, call, "HVD301") for call in wrapped[:1] if _differ(program)}
    if not _calls(program, "broadcast_optimizer_state", *_STATES):
        calls = _loads_on_some_ranks(script)
        found |= {finding(script.path, call, "HVD302") for call in calls}
    if any(other.calls_of("hvd.init") for other in program):
        chosen = any("CUDA_VISIBLE_DEVICES" in line for one in program for line in one.lines)
        if not chosen and not _calls(program, *_DEVICES):
            found |= {finding(script.path, call, "HVD303") for call in _cuda_uses(script)[:1]}
        if not _calls(program, *_SAMPLERS):
            found |= {finding(script.path, call, "HVD401") for call in _unsharded(script)}
        if _has_epochs(program) and not any("set_epoch" in one.text for one in program):
            found |= {finding(script.path, call, "HVD402") for call in _shuffling(script)}
    if wrapped and not _scales(program):
        found |= {finding(script.path, call, "HVD601") for call in wrapped[:1]}
    return found


def _calls(program: Sequence[Script], *names: str) -> bool:
    return any(name in script.called_names for script in program for name in names)


def _differ(program: Sequence[Script]) -> bool:
    """Whether ranks may start from different parameters."""
    for script in program:
        for call in script.calls:
            meaning = script.called(call)
            if meaning.startswith("hvd.broadcast") and meaning != "hvd.broadcast_optimizer_state":
                return False
    if _calls(program, *_STATES):
        return False
    loads = any(list(_loads_on_some_ranks(script, optimizers=False)) for script in program)
    return loads or not any(
        call.args and not script.depends_on_rank(call.args[0])
        for script in program
        for call in script.calls_of("torch.manual_seed", "torch.random.manual_seed")
    )  # equal seeds give equal models


def _loads_on_some_ranks(script: Script, optimizers: bool = True) -> Iterator[ast.Call]:
    """Calls of ``load_state_dict`` under a condition that depends on the rank."""
    for test in script.nodes:
        if not isinstance(test, ast.If) or not script.tells_ranks(test.test):
            continue
        for node in (part for statement in test.body for part in ast.walk(statement)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = looks_like_optimizer(text_of(node.func.value))
                if node.func.attr == "load_state_dict" and owner == optimizers:
                    yield node


def _cuda_uses(script: Script) -> list[ast.Call]:
    """Calls that take the current CUDA device, which is GPU 0 unless set."""
    return [
        call
        for call in script.calls
        if isinstance(call.func, ast.Attribute)
        and (
            (call.func.attr == "cuda" and not call.args and not call.keywords)
            or (
                (call.func.attr == "to" or script.called(call) == "torch.device")
                and any(_is_cuda(value) for value in call.args)
            )
        )
    ]


def _is_cuda(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Constant) and part.value == "cuda" for part in ast.walk(node))


def _unsharded(script: Script) -> Iterator[ast.Call]:
    """Data loaders that shuffle the same data on every rank."""
    for call in script.calls:
        if not script.called(call).endswith(".DataLoader"):
            continue
        shuffle = argument(call, 2, "shuffle")
        if not isinstance(shuffle, ast.Constant) or shuffle.value is not True:
            continue
        dataset = argument(call, 0, "dataset")
        if dataset is None or not script.depends_on_rank(dataset):
            yield call


def _has_epochs(program: Sequence[Script]) -> bool:
    """Whether a loop of the program goes through epochs."""
    return any(
        "epoch" in text_of(node.target if isinstance(node, ast.For) else node.test).lower()
        for script in program
        for node in script.nodes
        if isinstance(node, ast.For | ast.While)
    )


def _shuffling(script: Script) -> Iterator[ast.Call]:
    """Samplers that shuffle for training, in an order that depends on the epoch alone."""
    names = {
        call: text_of(node.targets[0])
        for node in script.nodes
        if isinstance(node, ast.Assign)
        for call in ast.walk(node.value)
        if isinstance(call, ast.Call)
    }
    for call in script.calls:
        if not script.called(call).endswith(".DistributedSampler"):
            continue
        shuffle, seed = argument(call, 3, "shuffle"), argument(call, 4, "seed")
        ordered = isinstance(shuffle, ast.Constant) and not shuffle.value
        reseeded = seed is not None and not isinstance(seed, ast.Constant)
        name = f"{names.get(call, '')} {ast.unparse(call.args[0]) if call.args else ''}"
        if not ordered and not reseeded and not _EVALUATION.search(name.lower()):
            yield call


def _scales(program: Sequence[Script]) -> bool:
    """Whether anything is multiplied by, or computed from, the number of ranks."""
    return any(
        script.called(call) in ("hvd.size", "hvd.local_size") or text_of(call).endswith("Adasum)")
        for script in program
        for call in script.calls
    )
