"""What a training program acts on: the same on a rank, and in one process on the whole batch.

The whole batch has two halves. A rank computes the gradients of its half and the exchange sums
them; one process computes both halves, one after the other, and sums them in the same way: each is
multiplied by the factor of ``op`` (a power of two, so this rounds nothing) and the two are added.
So the two must agree in every bit, whatever optimizer, model and program it is.

With the option "same_rows" all ranks have the same rows, so averages change nothing. The one
process then computes what each rank computes and adds nothing up: it runs the plain program as it
stands, which every rank must equal.

What the program observes goes through `World.see`. What is observed while a half is at work (its
loss, what a hook has read) belongs to the rank that has this half.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from random_programs.models import WIDTH, make_model
from random_programs.optimizers import make_optimizer
from torch import Tensor, nn

import hvd_order.torch as hvd

ROWS = 4  # of one rank
RANKS = 2

Seen = list[tuple[str, Any]]
Loss = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Setup:
    """What a program says before its first action.

    Attributes:
        model, optimizer: names in `MODELS` and `OPTIMIZERS`.
        options: "sum", "predivide": the operation; "unnamed": no names are given; "passes2": two
            backward passes a step; "small_slices": tensors are cut; "negotiated": the agreement;
            "split": norms are known before sums; "shutdown": the last reads come after
            ``hvd.shutdown()``; "same_rows": all ranks have the rows of the first; "coded":
            gradients travel in 8 bits, so parameters are float32.
    """

    model: str = "perceptron"
    optimizer: str = "momentum"
    options: tuple[str, ...] = ()

    @property
    def is_sum(self) -> bool:
        return "sum" in self.options

    @property
    def same_rows(self) -> bool:
        return "same_rows" in self.options

    @property
    def coded(self) -> bool:
        return "coded" in self.options

    @property
    def passes(self) -> int:
        return 2 if "passes2" in self.options else 1


@dataclass
class Kept:
    """Things that a program has taken and looks at later, by kind."""

    tensors: list[Tensor] = field(default_factory=list)  # share memory with parameters
    arrays: list[np.ndarray[Any, Any]] = field(default_factory=list)
    readers: list[Callable[[], Any]] = field(default_factory=list)  # give what they read
    gradients: list[Tensor] = field(default_factory=list)  # of all parameters that had one
    gradient_arrays: list[np.ndarray[Any, Any]] = field(default_factory=list)  # their memory
    flat: Tensor | None = None  # buffer of which all gradients are views
    saved: dict[str, Any] = field(default_factory=dict)  # copies, to go back to
    open: list[Callable[[], None]] = field(default_factory=list)  # what ends with the program

    def forget_gradients(self) -> None:
        self.gradients, self.gradient_arrays, self.flat = [], [], None


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def frozen(value: Any) -> Any:
    """Plain data with the same bits, which neither later writes nor pickling change."""
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            value = value.to_dense()
        value = value.detach().clone().contiguous()
        if value.dtype == torch.bfloat16:
            value = value.view(torch.int16)
        return frozen(value.numpy())
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, float):
        return ("float", value.hex())
    if isinstance(value, dict):
        return {str(key): frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    return value if isinstance(value, (int, str, bytes, type(None))) else repr(value)


class World:
    """A model in training.

    Attributes:
        rank: None in one process on the whole batch.
        dtype: of parameters.
        model, optimizer: what is trained; actions may replace them.
        other, other_optimizer: a second model of the same job, made by the first action on it.
        kept: what the program holds on to.
        step_number: how many updates have been asked for.
    """

    def __init__(self, setup: Setup, rank: int | None) -> None:
        torch.manual_seed(7)
        self.setup = setup
        self.rank = rank
        self.prefix = ""  # of parameters' names, where the job has another model at the same time
        self.dtype = torch.float32 if setup.coded else torch.float64
        self.model = make_model(setup.model, dtype=self.dtype)
        self.optimizer: Any = make_optimizer(setup.optimizer, self.model)
        self.other: nn.Module | None = None
        self.other_optimizer: Any = None
        self.kept = Kept()
        self.step_number = 0
        self.label = "start"
        self.counters: dict[str, int] = {}
        self.reading: list[Callable[[], None]] = []  # what waits for threads of the program
        self.shares_model = False  # one of these threads runs the model, or goes through it
        self.loss: Loss = loss_of
        self.gradients_came = False
        self.distributed = False
        self.has_backward_hooks = False  # which neither tracing nor transforms allow
        self._half: int | None = None  # at work; None: what happens happens to all
        self.seen: dict[int, Seen] = {r: [] for r in self.halves}

    # ---- what all programs do -----------------------------------------------------------------

    @property
    def on_ranks(self) -> bool:
        """Whether the optimizer is a distributed one."""
        return self.rank is not None and self.distributed

    @property
    def halves(self) -> range:
        """Whose rows this process computes."""
        return range(RANKS) if self.rank is None else range(self.rank, self.rank + 1)

    def distribute(self, optimizer: Any = None, model: nn.Module | None = None) -> Any:
        """Makes an optimizer a distributed one, where there are ranks."""
        optimizer = self.optimizer if optimizer is None else optimizer
        model = self.model if model is None else model
        self.distributed = True
        if self.rank is None:
            return optimizer
        options = self.setup.options
        how: dict[str, Any] = {}
        if self.setup.coded:
            how["compression"] = hvd.Compression.int8
        if self.setup.is_sum:
            how["op"] = hvd.Sum
        elif "predivide" in options:
            how["gradient_predivide_factor"] = 4.0
        if "unnamed" not in options:
            how["named_parameters"] = list(model.named_parameters(prefix=self.prefix))
        return hvd.DistributedOptimizer(
            optimizer, backward_passes_per_step=self.setup.passes, **how
        )

    def backward(self, optimizer: Any = None, model: nn.Module | None = None) -> None:
        """Forward and backward passes of this step, on the rows of this process."""
        model = self.model if model is None else model

        def passes(half: int) -> None:
            for part in range(self.setup.passes):
                loss = self.loss(model, self.rows(half, part))
                self.see("loss", loss)
                loss.backward()

        self.in_halves(passes, optimizer, model)

    def cast(self, dtype: torch.dtype) -> None:
        """Casts the model and its gradients to a type and back.

        Not where gradients have a type of their own: PyTorch casts them whatever their
        ``grad_dtype``, and refuses to assign such a gradient afterwards.
        """
        if all(getattr(p, "grad_dtype", p.dtype) == p.dtype for p in self.parameters()):
            self.model.to(dtype)
            self.model.to(self.dtype)

    def in_halves(
        self,
        run: Callable[[int], Any],
        optimizer: Any = None,
        model: nn.Module | None = None,
    ) -> list[Any]:
        """Runs what makes gradients, and in one process adds up those of the two halves."""
        optimizer = self.optimizer if optimizer is None else optimizer
        model = self.model if model is None else model
        self.gradients_came = True
        if self.rank is not None:
            with self._working_on(self.rank):
                return [run(self.rank)]
        if self.setup.same_rows:
            return [self._for_all(run)]
        parameters = list(
            dict.fromkeys(
                [
                    *model.parameters(),
                    *(p for group in optimizer.param_groups for p in group["params"]),
                ]
            )
        )
        before = [p.grad for p in parameters]
        start = [None if gradient is None else gradient.clone() for gradient in before]
        state = self._side_state()
        results, gradients = [], []
        for half in self.halves:
            if half:
                self._restore(state)
            for p, gradient in zip(parameters, start, strict=True):
                p.grad = None if gradient is None else gradient.clone()
            with self._working_on(half):
                results.append(run(half))
            gradients.append([p.grad for p in parameters])
        for p, old, first, second in zip(parameters, before, *gradients, strict=True):
            p.grad = self._sum(old, first, second)
        return results

    def _for_all(self, run: Callable[[int], Any]) -> Any:
        """Runs it once; every rank observes the same."""
        begin = len(self.seen[0])
        with self._working_on(0):
            result = run(0)
        for half in self.halves[1:]:
            self.seen[half] += self.seen[0][begin:]
        return result

    def _sum(
        self, old: Tensor | None, first: Tensor | None, second: Tensor | None
    ) -> Tensor | None:
        """As the exchange: a rank without a gradient counts as zeros, unless all have none."""
        if first is None and second is None:
            return old
        some = first if first is not None else second
        assert some is not None
        factor = 1.0 if self.setup.is_sum else 0.5
        parts = [torch.zeros_like(some) if g is None else g.detach() for g in (first, second)]
        total = parts[0] * factor + parts[1] * factor
        if old is None:
            return total
        old.detach().copy_(total)  # who keeps it sees the sum, as in a plain program
        return old

    def step(self, *closure: Callable[[], Any]) -> Any:
        """``optimizer.step()``."""
        if self.setup.is_sum and not closure and not self.gradients_came:
            for p in self.parameters():  # the ranks would sum once more, as Horovod, what is left
                p.grad = None
            self.kept.forget_gradients()
        self.gradients_came = False
        self.step_number += 1
        result = self.optimizer.step(*closure)
        self.gradients_came = False  # also those of a closure
        gradient = self.kept.saved.pop("gradient", None)
        if gradient is not None:
            self.see("kept gradient", gradient + 0)
        return result

    def join_threads(self) -> None:
        """Waits for the threads that read beside the program."""
        while self.reading:
            self.reading.pop(0)()
        self.shares_model = False

    # ---- what actions use ---------------------------------------------------------------------

    def rows(self, half: int, part: int = 0) -> Tensor:
        """Inputs of one rank in this step."""
        half = 0 if self.setup.same_rows else half
        numbers = torch.Generator().manual_seed(1000 * self.step_number + 10 * part + half)
        x = torch.randn(ROWS, WIDTH, generator=numbers, dtype=torch.float64)
        return x.to(next(self.model.parameters()).dtype)

    def common_rows(self) -> Tensor:
        """Inputs that are the same everywhere, for evaluations."""
        return torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64).view(3, WIDTH).to(self.dtype)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def parameter(self, which: int) -> nn.Parameter:
        parameters = self.parameters()
        return parameters[which % len(parameters)]

    def layer(self, which: int) -> nn.Module:
        """A module that owns parameters and takes hooks."""
        owners = [
            m
            for m in self.model.modules()
            if list(m.parameters(recurse=False)) and not isinstance(m, torch.jit.ScriptModule)
        ]
        return owners[which % len(owners)]

    def to_evaluation(self, model: nn.Module | None = None) -> nn.Module:
        """Puts a model into evaluation mode; not attention, whose last bits would depend on it.

        Its fused path looks at the class of parameters (docs/limits.md).
        """
        model = self.model if model is None else model
        return model if self.setup.model == "attention" else model.eval()

    def see(self, what: str, value: Any) -> None:
        """Notes what the program observes now; copies it."""
        with torch.no_grad():
            entry = (f"{self.label}: {what}", frozen(value))
        for half in self.halves if self._half is None else [self._half]:
            self.seen[half].append(entry)

    def mine(self, half: int) -> bool:
        """Whether this process sees what the rank of ``half`` sees."""
        return half in self.halves

    @contextlib.contextmanager
    def only(self, half: int) -> Iterator[bool]:
        """Within, one rank acts alone; gives whether that is done here."""
        with self._working_on(half):
            yield half in self.halves

    @contextlib.contextmanager
    def _working_on(self, half: int) -> Iterator[None]:
        before, self._half = self._half, half
        try:
            yield
        finally:
            self._half = before

    @property
    def half(self) -> int:
        """The half at work."""
        assert self._half is not None
        return self._half

    @contextlib.contextmanager
    def without_trace(self) -> Iterator[None]:
        """Within, buffers and random numbers may change, which one rank alone must not do."""
        state = self._side_state()
        try:
            yield
        finally:
            self._restore(state)

    def _side_state(self) -> tuple[list[tuple[Tensor, Tensor]], Tensor, dict[str, int]]:
        models = [m for m in (self.model, self.other) if m is not None]
        buffers = [(b, b.detach().clone()) for m in models for b in m.buffers()]
        return buffers, torch.get_rng_state(), dict(self.counters)

    def _restore(self, state: tuple[list[tuple[Tensor, Tensor]], Tensor, dict[str, int]]) -> None:
        buffers, numbers, counters = state
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.set_rng_state(numbers)
        self.counters = dict(counters)

    # ---- the end ------------------------------------------------------------------------------

    def see_everything(self) -> None:
        """The last reads: all there is."""
        self.label = "end"
        self.join_threads()
        self.see("random numbers", torch.rand(2))
        for name, model in (("model", self.model), ("other model", self.other)):
            if model is not None:
                for key, p in model.named_parameters():
                    self.see(f"{name}, {key}", p)
                    self.see(f"{name}, {key}.grad", p.grad)
                for key, b in model.named_buffers():
                    self.see(f"{name}, buffer {key}", b)
        for name, optimizer in (("", self.optimizer), (" other", self.other_optimizer)):
            if optimizer is not None:
                state = optimizer.state_dict()
                self.see(f"state of the{name} optimizer", state["state"])
                self.see(f"groups of the{name} optimizer", state["param_groups"])
        self.see("kept", [read() for read in self.kept.readers])

    def close(self) -> None:
        """Ends what the program has left open."""
        for end in reversed(self.kept.open):
            end()
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)
        self.model = self.other = self.optimizer = self.other_optimizer = None  # type: ignore[assignment]
        self.kept = Kept()
        gc.collect()


def in_thread(run: Callable[[], None]) -> Callable[[], None]:
    """Starts a thread; gives what waits for it and raises what it raised."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()

    def wait() -> None:
        thread.join(timeout=30)
        if thread.is_alive():
            raise TimeoutError("a thread of the program still reads after 30 s")
        if errors:
            raise errors[0]

    return wait
