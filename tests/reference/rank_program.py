"""One rank: runs all cases and mistakes on one library and saves what came.

Started as ``python rank_program.py MODULE FOLDER SIZE``, MODULE being ``hvd_order.torch`` or
``horovod.torch``; writes ``FOLDER/rank<r>.pt``, what each case and mistake gave, by its id.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reference.cases import CASES, GROUPED, REDUCTIONS, Case, inputs, members, splits_of
from reference.differences import FATAL
from reference.mistakes import BEFORE_INIT, MISTAKES, Mistake, Setting

Outcome = dict[str, Any]


def main(module: str, folder: Path, size: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # horovod warns of what is deprecated today
    hvd = importlib.import_module(module)
    outcomes: dict[str, Outcome] = {
        name: attempt(mistake, hvd) for name, mistake in BEFORE_INIT.items()
    }
    sets = {
        "all_but_last": hvd.ProcessSet(list(range(size - 1))),
        "all_but_first": hvd.ProcessSet(list(range(1, size))),
    }
    hvd.init(process_sets=list(sets.values()))
    rank = hvd.rank()
    setting = Setting(hvd, rank, size, sets, folder)

    def run_cases(wanted: Callable[[Case], bool]) -> None:
        for case in filter(wanted, CASES):
            ranks = members(case, size)
            if rank in ranks:
                print(case.id, flush=True)  # where it was, should it hang
                process_set = sets.get(case.members, hvd.global_process_set)
                outcomes[case.id] = attempt(run, hvd, case, ranks.index(rank), ranks, process_set)

    def make_mistakes(wanted: Callable[[Mistake], bool]) -> None:
        for name, mistake in MISTAKES.items():
            if wanted(mistake) and not (module.startswith("horovod") and name in FATAL):
                print(name, flush=True)
                outcomes[name] = attempt(mistake.call, setting)
                # What came before must not have harmed what comes after.
                outcomes[name]["after"] = hvd.allreduce(
                    torch.tensor([float(rank)]), name=f"after {name}"
                ).item()

    # The order is for Horovod; see CASES.
    run_cases(lambda case: case.members == "all")
    make_mistakes(lambda mistake: mistake.ranks == "all")
    run_cases(lambda case: case.members != "all")
    make_mistakes(lambda mistake: mistake.ranks != "all")
    torch.save(outcomes, folder / f"rank{rank}.pt")
    hvd.shutdown()


def attempt(call: Callable[..., Any], *arguments: Any) -> Outcome:
    """What a call returned, or the names of its exception's classes."""
    try:
        outcome: Outcome = call(*arguments)
        return outcome
    except Exception as error:
        classes = [one.__name__ for one in type(error).__mro__]
        return {"raised": classes, "message": str(error)}


def run(hvd: Any, case: Case, place: int, ranks: list[int], process_set: Any) -> Outcome:
    tensors = inputs(case, place, len(ranks))
    grouped = case.collective in GROUPED
    gradient = case.form == "gradient"
    if gradient:
        tensors = [tensor.requires_grad_() for tensor in tensors]
    results = list(call(hvd, case, tensors if grouped else tensors[0], place, ranks, process_set))
    if gradient:
        outputs = [one for one in results if one.requires_grad]
        (sum((one * (place + 1)).sum() for one in outputs)).backward()  # type: ignore[union-attr]
        return {"tensors": [tensor.grad for tensor in tensors]}
    again = inputs(case, place, len(ranks))
    notes = {}
    if case.form.startswith("in_place"):
        notes["same_objects"] = all(a is b for a, b in zip(results, tensors, strict=True))
    elif case.collective != "sparse_allreduce":
        notes["inputs_kept"] = all(torch.equal(a, b) for a, b in zip(tensors, again, strict=True))
    return {"tensors": [one.detach().to_dense() for one in results], **notes}


def call(
    hvd: Any, case: Case, argument: Any, place: int, ranks: list[int], process_set: Any
) -> list[torch.Tensor]:
    if case.collective == "sparse_allreduce":
        wait = hvd.sparse_allreduce_async(
            argument, name=case.id, op=getattr(hvd, case.op), process_set=process_set
        )
        return [wait()]
    arguments: dict[str, Any] = {"name": case.id, "process_set": process_set}
    if case.collective in REDUCTIONS:
        arguments.update(
            op=getattr(hvd, case.op), prescale_factor=case.prescale,
            postscale_factor=case.postscale,
        )  # fmt: skip
        if case.compression != "none":
            arguments["compression"] = getattr(hvd.Compression, case.compression)
    elif case.collective == "broadcast":
        arguments["root_rank"] = ranks[0 if case.root == "first" else -1]
    elif case.splits != "none":
        counts = splits_of(case, place, len(ranks))
        dtype = getattr(torch, case.splits, None)
        arguments["splits"] = counts if dtype is None else torch.tensor(counts, dtype=dtype)
    ending = {"async": "_async", "in_place": "_", "in_place_async": "_async_"}.get(case.form, "")
    result = getattr(hvd, case.collective + ending)(argument, **arguments)
    if "async" in case.form:
        assert isinstance(hvd.poll(result), bool)
        result = hvd.synchronize(result)
    return [result] if isinstance(result, torch.Tensor) else list(result)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
