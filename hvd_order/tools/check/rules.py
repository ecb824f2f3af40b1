"""All rules: code, mistake and cure.

``python -m hvd_order.tools.check.rules > docs/guides/check.md`` generates the page.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RULES", "Finding", "Rule", "finding", "reference_page"]


@dataclass(frozen=True)
class Rule:
    """One kind of mistake.

    Attributes:
        code: what ``--select``, ``--ignore`` and ``# hvd-order: ignore[...]`` name.
        message: the mistake and its consequence; may contain ``{what}``.
        cure: the code to write instead.
        note: advice; it does not count as a mistake.
    """

    code: str
    message: str
    cure: str
    note: bool = False


_DEFAULT_GROUP = "torch.distributed.init_process_group() before hvd.init()"

RULES = {
    rule.code: rule
    for rule in (
        Rule("HVD001", "this is no Python that can be read: {what}", "correct the syntax"),
        Rule(
            "HVD101",
            "gradients are clipped after step(), so the update has used them unclipped",
            "clip between backward() and step()",
        ),
        Rule(
            "HVD102",
            "zero_grad() between backward() and step() throws away the gradients of this step",
            "call zero_grad() before backward() or after step()",
        ),
        Rule(
            "HVD201",
            "this optimizer is wrapped by DistributedOptimizer already",
            "wrap it once",
        ),
        Rule(
            "HVD202",
            "this scheduler is made for the inner optimizer, so under Horovod it misses step() and "
            "warns of a wrong order",
            "make the scheduler after DistributedOptimizer, from what it returned",
        ),
        Rule(
            "HVD203",
            "the compiled model has run before DistributedOptimizer was made, so its graphs know "
            "no hooks",
            "make the optimizer before the first forward pass",
        ),
        Rule(
            "HVD204",
            "a hook that is added after torch.compile is left out of the compiled graph",
            "add hooks before torch.compile",
        ),
        Rule(
            "HVD205",
            "DistributedDataParallel and DistributedOptimizer both exchange the gradients",
            "use one of them",
        ),
        Rule(
            "HVD206",
            "under Horovod, step() of the inner optimizer exchanges nothing, so ranks drift apart",
            "call step() of what DistributedOptimizer returned",
        ),
        Rule(
            "HVD301",
            "ranks start from different parameters: nothing broadcasts them",
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before training",
        ),
        Rule(
            "HVD302",
            "only some ranks load the optimizer's state, and nothing broadcasts it",
            "hvd.broadcast_optimizer_state(optimizer, root_rank=0) on all ranks after loading",
        ),
        Rule(
            "HVD303",
            "CUDA is used without a device for each process, so all ranks of a host share GPU 0",
            "torch.cuda.set_device(hvd.local_rank()) after hvd.init()",
        ),
        Rule(
            "HVD304",
            "parameters are updated by hand from the gradients of each rank alone, so ranks drift "
            "apart",
            "a torch.optim optimizer in hvd.DistributedOptimizer, or hvd.allreduce_(p.grad) before "
            "the update",
        ),
        Rule(
            "HVD401",
            "every rank reads the whole data set: shuffle=True without a sampler",
            "sampler=DistributedSampler(dataset, hvd.size(), hvd.rank()) instead of shuffle=True",
        ),
        Rule(
            "HVD402",
            "every epoch has the same order: nothing calls set_epoch() of this sampler",
            "sampler.set_epoch(epoch) at the beginning of each epoch",
        ),
        Rule(
            "HVD501",
            "{what} is reached by some ranks only; they wait for the others in vain",
            "call it on every rank, and keep only its result or output to one",
        ),
        Rule(
            "HVD502",
            "every rank writes this file, at the same time",
            "if hvd.rank() == 0: torch.save(...)",
        ),
        Rule(
            "HVD503",
            "the optimizer is set otherwise on each rank, so ranks drift apart",
            "the same class and hyper-parameters on every rank",
        ),
        Rule(
            "HVD504",
            "some ranks save this file, and the others do not wait for it before they load it",
            "hvd.barrier() on every rank between saving and loading",
        ),
        Rule(
            "HVD601",
            "the learning rate does not grow with the number of ranks, though the batch does",
            "lr * hvd.size(), with warm-up, is the usual start",
            note=True,
        ),
        Rule(
            "HVD602",
            "torch.compile comes before DistributedOptimizer",
            "compile after wrapping, block by block, so that no hook is added to a compiled model",
            note=True,
        ),
        Rule(
            "HVD701",
            "torchmetrics finds no default process group, so this metric is of each rank's batches "
            "alone",
            f"{_DEFAULT_GROUP}, or hvd.allreduce of what it computes",
        ),
        Rule(
            "HVD702",
            "torch's SyncBatchNorm finds no default process group, so its statistics are of each "
            "rank's batch alone",
            f"{_DEFAULT_GROUP}, or hvd.SyncBatchNorm",
        ),
        Rule(
            "HVD703",
            "DistributedSampler raises: without num_replicas and rank it needs a default process "
            "group",
            f"DistributedSampler(dataset, hvd.size(), hvd.rank()), or {_DEFAULT_GROUP}",
        ),
    )
}


@dataclass(frozen=True, order=True)
class Finding:
    """A rule that fired at a place.

    Attributes:
        path, line, column: place; line and column count from 1.
        code: code of the rule.
        text: message with its cure.
        last_line: where the expression ends; a comment up to there can silence it.
    """

    path: str
    line: int
    column: int
    code: str
    text: str
    last_line: int

    def __str__(self) -> str:
        """``file:line:col: CODE message (cure)``."""
        return f"{self.path}:{self.line}:{self.column}: {self.code} {self.text}"


def finding(path: Path, node: ast.expr | ast.stmt, code: str, what: str = "") -> Finding:
    """The finding of rule `code` at `node`."""
    rule = RULES[code]
    text = f"{'note: ' if rule.note else ''}{rule.message.format(what=what)} ({rule.cure})"
    last_line = node.end_lineno or node.lineno
    return Finding(str(path), node.lineno, node.col_offset + 1, code, text, last_line)


def reference_page() -> str:
    """The text of ``docs/guides/check.md``."""
    lines = [
        "# hvd-order check",
        "",
        "<!-- Made by `python -m hvd_order.tools.check.rules > docs/guides/check.md`; "
        "edit rules.py. -->",
        "",
        "`hvd-order check train.py src/` reads scripts, without running or importing them, and",
        "prints `file:line:col: CODE message (cure)`. Exit status 1 when something was found,",
        "notes aside, and 2 when a file cannot be read. `--select HVD1,HVD201` and `--ignore HVD6`",
        "take codes or their beginnings; `# hvd-order: ignore[HVD101]` silences its line.",
        "Local modules that a script imports are read as well, so one file may have what another",
        "lacks. Scripts for `horovod.torch` and `hvd_order.torch` are checked alike. The last line",
        "says what was read: `13 files, nothing found; 6 do not use hvd_order`.",
        "",
        "| code | what is wrong | cure |",
        "| --- | --- | --- |",
    ]
    for rule in RULES.values():
        message = rule.message.format(what="...")
        lines.append(f"| {rule.code} | {'note: ' * rule.note}{message} | {rule.cure} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference_page())
