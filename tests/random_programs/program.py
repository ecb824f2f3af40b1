"""A training program as data: drawn, written as one line, read back, and carried out.

A line reads ``model optimizer options... | actions before the optimizer is distributed | step |
step ...``, each action as ``name``, ``name:number`` or ``name@rank`` where one rank acts alone::

    perceptron momentum sum | keep_data:1 | zero backward step norm:2@0 | zero backward step
"""

from __future__ import annotations

import inspect
import random
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

from helpers.property_cases import Choices
from hypothesis import strategies as st
from random_programs.actions import ACTIONS, Action, Place
from random_programs.models import MODELS
from random_programs.optimizers import OPTIMIZERS
from random_programs.world import RANKS, Seen, Setup, World

import hvd_order.torch as hvd
from hvd_order.base.errors import InvalidUsage, StaleRead

ZEROS = (*["zero"] * 5, "zero_in_place", "zero_kept", "zero_flat")
"""How a program clears its gradients, mostly: who keeps them does it in every step."""

OPTIONS = (
    "sum", "predivide", "unnamed", "passes2", "small_slices", "negotiated", "shutdown", "split",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One action with its number, by all ranks or by one alone."""

    name: str
    number: int = 0
    rank: int | None = None

    def __str__(self) -> str:
        number = f":{self.number}" if ACTIONS[self.name].numbers > 1 else ""
        return self.name + number + ("" if self.rank is None else f"@{self.rank}")

    @staticmethod
    def parse(text: str) -> Call:
        rest, _, rank = text.partition("@")
        name, _, number = rest.partition(":")
        if name not in ACTIONS:
            raise ValueError(f"there is no action {name!r}")
        return Call(name, int(number or 0), int(rank) if rank else None)


@dataclass(frozen=True)
class Program:
    """What to carry out, on ranks or in one process."""

    setup: Setup
    first: tuple[Call, ...]
    steps: tuple[tuple[Call, ...], ...]

    def __str__(self) -> str:
        head = " ".join([self.setup.model, self.setup.optimizer, *self.setup.options])
        parts = [" ".join(map(str, calls)) for calls in (self.first, *self.steps)]
        return " | ".join([head, *parts])

    def __repr__(self) -> str:
        return f'"{self}"'

    @staticmethod
    def parse(line: str) -> Program:
        head, first, *steps = line.split("|")
        model, optimizer, *options = head.split()
        return Program(
            Setup(model, optimizer, tuple(options)),
            tuple(map(Call.parse, first.split())),
            tuple(tuple(map(Call.parse, step.split())) for step in steps),
        )

    def in_codes(self) -> Program:
        """The same with gradients in 8 bits, where all ranks do and see the same."""
        setup = self.setup
        options = {"coded", "same_rows", *setup.options} - {"sum"}
        model = "perceptron" if setup.model == "flat" else setup.model
        steps = (self.first, *self.steps)
        first, *rest = (tuple(call for call in calls if call.rank is None) for calls in steps)
        return Program(Setup(model, setup.optimizer, tuple(sorted(options))), first, tuple(rest))

    def listing(self) -> str:
        """For people: the program as calls, and what these do."""
        lines = [f"world = World({self.setup})"]
        lines += [f"{call.name}(world, {call.number})" for call in self.first]
        lines.append("world.optimizer = world.distribute()")
        for i, step in enumerate(self.steps):
            lines.append(f"# step {i + 1}")
            for call in step:
                alone = "" if call.rank is None else f"  # on rank {call.rank} alone"
                lines.append(f"{call.name}(world, {call.number}){alone}")
        used = dict.fromkeys(call.name for step in (self.first, *self.steps) for call in step)
        sources = [inspect.getsource(ACTIONS[name].run) for name in used]
        return "\n".join([*lines, "", *sources])


# ---- drawn ------------------------------------------------------------------------------------


def _at(place: Place) -> list[Action]:
    return [a for a in ACTIONS.values() if a.place is place]


class _Drawing:
    """Turns bytes into a program."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._between = _at(Place.BETWEEN)
        self._zero = self._choices.one_of(ZEROS)

    def once_in(self, many: int) -> bool:
        return self._choices.below(many) == many - 1

    def call(self, options: list[Action], may_be_alone: bool = True) -> Call:
        chosen = self._choices.one_of(options)
        number = self._choices.below(chosen.numbers) if chosen.numbers > 1 else 0
        rank = None
        if may_be_alone and chosen.alone and self.once_in(3):
            rank = self._choices.below(RANKS)
        return Call(chosen.name, number, rank)

    def calls(self, options: list[Action], most: int) -> list[Call]:
        return [self.call(options) for _ in range(self._choices.below(most + 1))]

    def mostly(self, name: str, options: list[Action], many: int) -> Call:
        """The action ``name``, or once in ``many`` draws any other."""
        return self.call(options) if self.once_in(many) else Call(name)

    def setup(self) -> Setup:
        model, optimizer = (
            self._choices.one_of(list(MODELS)),
            self._choices.one_of(list(OPTIMIZERS)),
        )
        options = {self._choices.one_of(OPTIONS) for _ in range(self._choices.below(3))}
        if self.once_in(2):
            options = {"same_rows", *options} - {"sum"}  # a sum is twice what the plain program has
        if options >= {"sum", "predivide"}:
            options.discard("predivide")
        return Setup(model, optimizer, tuple(sorted(options)))

    def step(self) -> tuple[Call, ...]:
        after = self.calls(self._between, 2)
        if self.once_in(10):
            return (self.call(_at(Place.WHOLE)), *after)
        backward = self.mostly("backward", _at(Place.BACKWARD), 2)
        gradients = self.calls(_at(Place.GRADIENTS), 2) if self.once_in(3) else []
        update = self.mostly("step", _at(Place.UPDATE), 8)
        if backward.name == "backward_on_one_rank":
            # A rank that has no gradient at all must not look for one (docs/limits.md) ...
            gradients, update = [], Call("step")
        elif backward.name.endswith("on_one_rank") and (gradients or update.name == "skip"):
            # ... and one that lacks some has them after this.
            gradients.insert(0, Call("synchronize"))
        return (
            self.mostly(self._zero, _at(Place.ZERO), 3 if self._zero == "zero" else 8),
            *self.calls(self._between, 1),
            backward,
            *gradients,
            update,
            *after,
        )

    def program(self) -> Program:
        setup = self.setup()
        may_be_first = [a for a in ACTIONS.values() if a.first]
        first = [self.call(may_be_first, may_be_alone=False) for _ in range(self._choices.below(3))]
        steps = [self.step() for _ in range(3 + self._choices.below(10))]
        if any(call.name == "hook_before_step" for calls in (first, *steps) for call in calls):
            # It looks for gradients as well.
            one, both = Call("backward_on_one_rank"), Call("backward")
            steps = [tuple(both if call == one else call for call in step) for step in steps]
        return Program(setup, tuple(first), tuple(steps))


BYTES = 257  # more than twelve steps take, so that no program repeats itself


def programs() -> st.SearchStrategy[Program]:
    """Programs of 3 to 12 steps.

    They are drawn as bytes: of structures Hypothesis would draw one and then its variations.
    """
    return st.binary(min_size=BYTES, max_size=BYTES).map(_from_bytes)


def program_from(seed: int) -> Program:
    """One of these programs, the same for the same number."""
    return _from_bytes(random.Random(seed).randbytes(BYTES))


def _from_bytes(data: bytes) -> Program:
    return _Drawing(Choices(data)).program()


def program_of(chosen: Action, number: int = 0) -> Program:
    """A plain program in which this action stands twice, where updates are deferred."""
    call = Call(chosen.name, number)
    zero, backward, step, read = map(Call, (_zero_for(chosen), "backward", "step", "read_kept"))
    plain = (zero, backward, step)
    steps = {
        Place.BETWEEN: (zero, backward, step, call),
        Place.ZERO: (call, backward, step),
        Place.BACKWARD: (zero, call, step),
        Place.GRADIENTS: (zero, backward, call, step),
        Place.UPDATE: (zero, backward, call),
        Place.WHOLE: (call,),
    }
    special = steps[chosen.place]
    model = "flat" if chosen.name in ("read_flat", "scale_flat") else "blocks"
    optimizer = "sgd" if chosen.name == "single_gradients" else "adam"  # the rest mixes no types
    return Program(
        Setup(model, optimizer),
        (),
        (plain, plain, plain, special, (*plain, read), special, plain),
    )


def _zero_for(chosen: Action) -> str:
    """How a program clears gradients that does this to them."""
    if "flat" in chosen.name and chosen.name not in ("read_flat", "scale_flat"):
        return "zero_flat"
    return "zero_kept" if "kept" in chosen.name and chosen.place is not Place.BETWEEN else "zero"


# ---- carried out --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """What ended a program early.

    Attributes:
        kind: class of the exception.
        text: its message.
        where: step and action.
        documented: it is of the kind that hvd_order raises for a mistake in the program.
        trace: for people.
    """

    kind: str
    text: str
    where: str
    documented: bool
    trace: str


@dataclass(frozen=True)
class Outcome:
    """What a process has observed, by the half of the batch that it was about."""

    seen: dict[int, Seen]
    failure: Failure | None


DOCUMENTED = (
    "Gradients were computed more than backward_passes_per_step times",
    "optimizer.zero_grad() was called after loss.backward()",
)


def is_documented(error: BaseException) -> bool:
    """Whether the documentation says that a program like this one ends with this error."""
    if isinstance(error, (InvalidUsage, StaleRead)):
        return True
    if isinstance(error, AssertionError):
        return str(error).startswith(DOCUMENTED)
    # The engine of autograd has met a gradient in flight, as a second backward pass makes it. What
    # else cannot be seen there, such as a kernel in a program's hook, has frames of its own.
    inside_autograd = traceback.extract_tb(error.__traceback__)[-1].name == "_engine_run_backward"
    return inside_autograd and "A second backward pass: " + DOCUMENTED[0] in str(error)


def carry_out(program: Program, rank: int | None) -> Outcome:
    """Runs a program here.

    Args:
        rank: None: alone, on the whole batch.
    """
    world = World(program.setup, rank)
    failure = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _run(world, program)
            if "beside" in world.kept.saved:
                world.join_threads()
            if "shutdown" in program.setup.options and rank is not None:
                hvd.shutdown()
            world.see_everything()
        except Exception as error:
            failure = Failure(
                type(error).__name__, str(error), world.label, is_documented(error),
                traceback.format_exc(),
            )  # fmt: skip
        finally:
            seen = world.seen
            world.close()
    return Outcome(seen, failure)


def _run(world: World, program: Program) -> None:
    for number, calls in enumerate((program.first, *program.steps)):
        for call in calls:
            world.label = f"step {number}, {call}"
            chosen = ACTIONS[call.name]
            run: Any = chosen.run
            if (
                chosen.place not in (Place.ZERO, Place.BACKWARD)
                # Others put something else into the modules for a while.
                or (
                    world.shares_model
                    and chosen.place is Place.BACKWARD
                    and call.name != "backward"
                )
                # The sums of the model beside may be ordered behind those that this rank begins to
                # send in step() only (docs/limits.md).
                or call.name.endswith("on_one_rank")
            ):
                world.join_threads()
            if chosen.renews:
                world.kept.forget_gradients()
            if call.rank is None:
                run(world, call.number)
            else:
                with world.only(call.rank) as here, world.without_trace():
                    if here:
                        run(world, call.number)
        if number == 0:
            world.label = "distribute"
            world.optimizer = world.distribute()
