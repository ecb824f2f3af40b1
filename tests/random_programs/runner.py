"""Carries programs out on two ranks and in one process, and says how the two compare."""

from __future__ import annotations

import functools
import gc
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from helpers.ranks import RankError, RankFactory, RanksHung
from random_programs.program import Outcome, Program, carry_out
from random_programs.world import RANKS, Seen

import hvd_order.torch as hvd

_VARIABLES = {
    "small_slices": {"HVD_ORDER_SLICE_BYTES": "64", "HVD_ORDER_CREDIT_BYTES": "128"},
    "negotiated": {"HVD_ORDER_AGREEMENT": "negotiated"},
    "at_once": {"HVD_ORDER_CROSS_ITERATION": "0"},
    "split": {"HVD_ORDER_DEBUG": "split", "HVD_ORDER_TUNE": "0"},
}


CONSEQUENCES = ("TransferTimeout", "PeerLost", "HorovodInternalError")


@dataclass(frozen=True)
class Verdict:
    """How a program has ended.

    Attributes:
        kind: "equal"; "refused": all ranks raised an error that is documented; "invalid": one
            process raises as well; "FAILED".
        text: what differs, or the error.
    """

    kind: str
    text: str = ""


@functools.cache
def spare_the_collector() -> None:
    """What torch has made on import need not be looked through after every program."""
    gc.collect()
    gc.freeze()


def body_ready() -> None:
    """For whoever wants the processes before the first program."""


def body_alone(line: str) -> Outcome:
    spare_the_collector()
    return carry_out(Program.parse(line), rank=None)


def body_on_rank(line: str) -> Outcome:
    """Starts anew, so that no program depends on those before it."""
    spare_the_collector()
    program = Program.parse(line)
    hvd.shutdown()
    names = {
        name: value
        for option in program.setup.options
        for name, value in _VARIABLES.get(option, {}).items()
    }
    os.environ.update(names)
    try:
        hvd.init()
    finally:
        for name in names:
            del os.environ[name]
    return carry_out(program, hvd.rank())


def judge(ranks: RankFactory, program: Program, timeout: float = 60.0) -> Verdict:
    """Runs the program both ways.

    Args:
        timeout: seconds; a program takes a fraction of one.
    """
    line = str(program)
    one, several = ranks(1), ranks(RANKS)
    one.run(body_ready)  # two first starts at the same time would be one too many
    with ThreadPoolExecutor(1) as executor:  # ranks leave the processors idle half of the time
        running = executor.submit(one.run, body_alone, line, timeout=timeout)
        try:
            found: list[Outcome] = several.run(body_on_rank, line, timeout=timeout)
        except (RanksHung, RankError) as error:
            return Verdict("FAILED", f"hang or crash\n{error}")
        alone: Outcome = running.result()[0]
    verdict = compare(alone, found, program.setup.coded)
    if any(outcome.failure and not outcome.failure.documented for outcome in found):
        several.close(kill=True)  # who knows what they wait for
    return verdict


def compare(alone: Outcome, found: list[Outcome], coded: bool) -> Verdict:
    """Says how ranks have fared.

    Args:
        coded: one process has no codes, so its values are others; ranks have the same.
    """
    failures = [outcome.failure for outcome in found]
    kinds = {None if failure is None else failure.kind for failure in failures}
    # What a rank raises because another one has left says nothing.
    causes = [failure for failure in failures if failure is not None]
    causes.sort(key=lambda failure: failure.kind in CONSEQUENCES)
    first = next(iter(causes), None)
    if alone.failure is not None:
        if alone.failure.kind in kinds and kinds <= {alone.failure.kind, *CONSEQUENCES}:
            return Verdict("invalid", alone.failure.text)
        return Verdict("FAILED", f"one process raises, ranks: {kinds}\n{alone.failure.trace}")
    if first is not None:
        text = f"{first.where}: {first.kind}: {first.text}"
        if len(kinds) == 1 and first.documented:
            return Verdict("refused", text)
        others = "" if len(kinds) == 1 else f" (all: {kinds})"
        return Verdict("FAILED", f"{text}{others}\n{first.trace}")
    for rank, outcome in enumerate(found):
        wanted = found[0].seen[0] if coded else alone.seen[rank]
        text = difference(wanted, outcome.seen[rank])
        if text:
            return Verdict("FAILED", f"rank {rank}, {text}")
    return Verdict("equal")


def difference(wanted: Seen, found: Seen) -> str:
    """The first entry that differs, in words; empty if none does."""
    for (label, value), (other_label, other) in zip(wanted, found, strict=False):
        if label != other_label:
            return f"{label}: observed {other_label} in its place"
        if value != other:
            return f"{label}: {in_words(value, other)}"
    if len(wanted) != len(found):
        longer = max(wanted, found, key=len)
        return f"{longer[min(len(wanted), len(found))][0]}: one has not observed it"
    return ""


def in_words(wanted: Any, found: Any) -> str:
    """How two frozen values differ; arrays by the largest relative difference."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        if wanted.keys() != found.keys():
            return f"{sorted(wanted)} against {sorted(found)}"
        for key, value in wanted.items():
            if value != found[key]:
                return f"{key}: {in_words(value, found[key])}"
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for i, value in enumerate(wanted):
            if value != found[i]:
                return f"{i}: {in_words(value, found[i])}"
    if is_array(wanted) and is_array(found) and wanted[1:3] == found[1:3]:
        a, b = (np.frombuffer(v[3], dtype=v[1]).astype(float) for v in (wanted, found))
        if a.size:
            worst = np.abs(a - b).max() / max(np.abs(a).max(), 1e-300)
            return f"largest relative difference {worst:.2g}; first: {a[:3]} against {b[:3]}"
    return f"{str(wanted)[:300]} against {str(found)[:300]}"


def is_array(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 4 and value[0] == "array"
