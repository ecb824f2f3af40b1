"""Scheduler, order agreement and simulator; needs no framework.

Contracts: the headers in csrc/.
"""

from typing import final

from typing_extensions import Buffer

@final
class Policy:
    """Rule that picks the next slice among the ready ones."""

    ARRIVAL: Policy
    PRIORITY: Policy
    PLANNED: Policy
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

@final
class AgreementKind:
    """How all ranks issue the same slices in the same order."""

    LEADER: AgreementKind
    NEGOTIATED: AgreementKind
    PLANNED: AgreementKind
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

@final
class Operation:
    """What the transfer of a slice does."""

    ALL_REDUCE: Operation
    REDUCE_SCATTER: Operation
    ALL_GATHER: Operation
    __members__: dict[str, Operation]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

@final
class Slice:
    """Contiguous byte range of a gradient buffer, the unit of transfer."""

    @property
    def buffer(self) -> int: ...
    @property
    def offset_bytes(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def first_tensor(self) -> int: ...
    @property
    def last_tensor(self) -> int: ...
    @property
    def operation(self) -> Operation: ...

@final
class SliceLayout:
    """Place of every tensor in its gradient buffer, and the slices of the buffers."""

    def __init__(
        self,
        tensors: list[tuple[str, int, int]],
        slice_bytes: int,
        small_front: bool = ...,
        split: bool = ...,
        sharded: bool = ...,
        maxima_ranks: int = ...,
        by_need: bool = ...,
    ) -> None:
        """Takes (name, size in bytes, buffer) in consumption order.

        Args:
            small_front: slices at the front of a buffer are shorter; otherwise slices are filled
                from its end.
            split: each all-reduce is a reduce-scatter and an all-gather; one more tensor, the
                last, holds sums of squares.
            maxima_ranks: number of ranks, if that tensor also has a place for each rank's largest
                absolute value of each gradient.
            by_need: both halves of what is consumed first go before those of what is consumed
                later; otherwise what the norms wait for goes first.

        Raises:
            InvalidUsage: an empty name, or a size that is no positive multiple of 16.
        """

    @property
    def slices(self) -> list[Slice]: ...
    @property
    def buffer_bytes(self) -> list[int]: ...
    @property
    def largest_slice_bytes(self) -> int: ...
    def tensor_offset(self, tensor: int) -> int: ...
    def slice_name(self, slice: int) -> str: ...
    def slices_of(self, tensor: int) -> list[int]: ...
    def tensors_of(self, slice: int) -> list[int]: ...
    @property
    def is_split(self) -> bool: ...
    @property
    def is_sharded(self) -> bool: ...
    def parameter_of(self, gradient: int) -> int:
        """The tensor of a gradient's parameter, if sharded."""

    @property
    def squares_tensor(self) -> int:
        """The tensor of the squares, if split."""

    @property
    def squared_tensors(self) -> list[int]:
        """The tensor of each sum of squares, by place in the squares' buffer."""

    @property
    def maxima_ranks(self) -> int: ...
    def first_maximum(self, rank: int) -> int:
        """The place in the squares' buffer of the rank's maximum of the first gradient."""

@final
class Scheduler:
    """Decides which slices are sent next. Pure; slices and tensors are (model, number)."""

    def __init__(self, policy: Policy, credit_bytes: int) -> None: ...
    def add_model(self, model: int, layout: SliceLayout, plan: list[int] = ...) -> None: ...
    def remove_model(self, model: int) -> None: ...
    def retune(self, policy: Policy, credit_bytes: int) -> None: ...
    def idle(self, model: int) -> bool: ...
    def tensor_ready(self, model: int, tensor: int) -> list[tuple[int, int]]: ...
    def reserve(self, largest_bytes: int) -> None: ...
    def offer(self, model: int, slice: int) -> None: ...
    def next(self) -> tuple[int, int] | None: ...
    def slice_done(self, model: int, slice: int) -> list[tuple[int, int]]: ...
    def became_ready(self) -> list[tuple[int, int]]:
        """The slices that the last `tensor_ready` or `slice_done` made ready."""

    @property
    def in_flight_bytes(self) -> int: ...
    @property
    def credit_bytes(self) -> int: ...

@final
class Agreement:
    """One rank's side of the order agreement. Pure."""

    def __init__(
        self,
        kind: AgreementKind,
        rank: int,
        size: int,
        policy: Policy,
        credit_bytes: int,
        fan_out: int = ...,
    ) -> None: ...
    def add_model(self, model: int, layout: SliceLayout, plan: list[int] = ...) -> None: ...
    def remove_model(self, model: int) -> None: ...
    def tensor_ready(self, model: int, tensor: int) -> list[tuple[int, int]]: ...
    def received(self, sender: int, slices: list[tuple[int, int]]) -> None: ...
    def slice_done(self, model: int, slice: int) -> list[tuple[int, int]]: ...
    def decide(
        self,
    ) -> tuple[list[tuple[int, int]], list[tuple[int, list[tuple[int, int]]]]]:
        """Slices to issue, in order, and messages as (to, slices)."""

    @property
    def in_flight_bytes(self) -> int: ...

@final
class SimulatedWorkload:
    """What one rank computes in a step; hvd_order/planning/predict/scenario.py wraps it."""

    def __init__(
        self,
        ops: list[tuple[str, float, list[int], list[int], list[int], list[int], int]],
        parameters: list[tuple[str, int, float, int]],
    ) -> None:
        """Takes ops as (name, seconds, inputs, reads, produces, awaits, stream).

        Takes parameters in consumption order, as (name, bytes, seconds of the update, buffer).
        """

    def merged(self, groups: list[list[int]]) -> SimulatedWorkload: ...
    def buckets(self, first_bytes: int, bucket_bytes: int) -> list[list[int]]: ...
    def layout(self, slice_bytes: int, split: bool = ...) -> SliceLayout: ...
    @property
    def op_names(self) -> list[str]: ...
    @property
    def parameter_bytes(self) -> list[int]: ...

@final
class AllReduceCost:
    """Cost of an all-reduce of one slice."""

    def __init__(
        self,
        *,
        latency_s: float,
        slice_cost_s: float,
        seconds_per_byte: float,
        sent_per_byte: float,
        lanes: int,
    ) -> None: ...
    @property
    def latency_s(self) -> float: ...
    @property
    def slice_cost_s(self) -> float: ...
    @property
    def seconds_per_byte(self) -> float: ...
    @property
    def sent_per_byte(self) -> float: ...
    @property
    def lanes(self) -> int: ...

def ring_all_reduce(ranks: int, latency_s: float, bytes_per_s: float) -> AllReduceCost: ...
def tree_all_reduce(ranks: int, latency_s: float, bytes_per_s: float) -> AllReduceCost: ...

@final
class SimulatedDevice:
    """Ranks of one speed; records are flattened by recorded step and op."""

    @property
    def slowness(self) -> float: ...
    @property
    def ranks(self) -> int: ...
    @property
    def step_starts_s(self) -> list[float]: ...
    @property
    def busy_s(self) -> list[float]: ...
    @property
    def ops(self) -> list[tuple[float, float, float]]:
        """Ops as (could start, start, end)."""

    @property
    def updates(self) -> list[tuple[int, int | None, float, float]]:
        """Updates as (stream, tensor or None for all, start, end)."""

@final
class SimulationResult:
    """Record of a simulation; times are seconds since its start."""

    @property
    def step_s(self) -> list[float]: ...
    @property
    def end_s(self) -> float: ...
    @property
    def sent_bytes(self) -> float: ...
    @property
    def devices(self) -> list[SimulatedDevice]: ...
    @property
    def link_busy_s(self) -> float: ...
    @property
    def link_busy(self) -> list[tuple[float, float]]: ...
    @property
    def agreement(self) -> list[tuple[int, int, int, int]]:
        """By simulated half of the agreement: messages sent, slices in them; and received."""

    @property
    def slices(self) -> list[tuple[float, float, float, float]]:
        """Slices as (ready, issued, started, finished)."""

def simulate(
    workload: SimulatedWorkload,
    network: AllReduceCost,
    *,
    slowness: list[float],
    slice_bytes: int,
    credit_bytes: int,
    split: bool,
    policy: Policy,
    agreement: AgreementKind,
    plan: list[int],
    control_latency_s: float,
    control_send_s: float,
    fan_out: int,
    reservation_lead_s: float,
    program_order: bool,
    cross_iteration: bool,
    clipped: bool,
    every_rank: bool,
    every_agreement: bool,
    steps: int,
    recorded: int,
) -> SimulationResult:
    """Trains in virtual time; runs without the GIL.

    Raises:
        InvalidUsage: the scenario is impossible, or makes no more progress.
    """

class _Choice:
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

@final
class SampledKind(_Choice):
    """What a piece of a sampled step is."""

    COMPUTE: SampledKind
    PULL: SampledKind
    PUSH: SampledKind

@final
class Turns(_Choice):
    """How a connection takes turns among the transfers that wait."""

    WHOLE: Turns
    WINDOW: Turns
    PRIORITY: Turns

@final
class Sharing(_Choice):
    """How the connections of a link share it."""

    FAIR: Sharing
    FIFO: Sharing

@final
class SampledStepEnd(_Choice):
    """What a worker's next step waits for, beside its computations and pulls."""

    COMPUTED: SampledStepEnd
    PUSHED: SampledStepEnd
    UPDATED: SampledStepEnd

@final
class SampledStep:
    """A worker's step whose durations were measured several times."""

    def __init__(
        self,
        ops: list[tuple[str, SampledKind, list[int], int, int, int]],
        tensor_bytes: list[int],
        seconds: list[list[float]],
        pull_orders: list[list[int]] = ...,
    ) -> None:
        """Takes ops as (name, kind, inputs, stream, tensor, priority), durations by measured step
        and op, and the pulls' ops in the order in which each measured step asks for them (none: in
        the order of the ops).

        Raises:
            InvalidUsage: a negative time, an unknown number, a circle, or an order that is not one
                of all pulls.
        """

@final
class Transmission:
    """How tensors get from one process to another."""

    def __init__(
        self,
        *,
        turns: Turns,
        window_bytes: float,
        cold_window_bytes: float,
        cold_s: float,
        sharing: Sharing,
        latency_s: float,
        send_seconds_per_byte: float,
        send_seconds: float,
        receive_seconds_per_byte: float,
        receive_seconds: float,
    ) -> None: ...

@final
class SampledResult:
    """Record of a sampled training; times are seconds since its start."""

    @property
    def step_ends_s(self) -> list[list[float]]:
        """By worker and step."""

    @property
    def op_ends_s(self) -> list[list[float]]:
        """By worker: recorded step and op, flattened."""

    @property
    def transfers(self) -> list[tuple[bool, int, int, float, float]]:
        """Worker 0's in the recorded steps, as (is a pull, tensor, step, start, end)."""

    @property
    def pull_busy_s(self) -> list[float]: ...
    @property
    def push_busy_s(self) -> list[float]: ...
    @property
    def update_busy_s(self) -> list[float]: ...
    @property
    def late_updates(self) -> int:
        """Updates that a delay bound kept from being sent."""

    @property
    def aggregated_updates(self) -> int:
        """Updates that went to a helper."""

    @property
    def longest_delay(self) -> int:
        """With a delay bound: the largest delay of an update that was applied."""

    @property
    def end_s(self) -> float: ...

def simulate_sampled(
    step: SampledStep,
    *,
    slowness: list[float],
    servers: int,
    server_of: list[int],
    worker_bytes_per_s: float,
    server_bytes_per_s: float,
    pull: Transmission,
    push: Transmission,
    sync: bool,
    pulls_are_answers: bool,
    step_end: SampledStepEnd,
    staleness: int | None,
    delay_bound: int | None,
    aggregates: bool,
    update_seconds_per_byte: float,
    update_seconds: float,
    update_lanes: int,
    program_order: bool,
    starts_s: list[float],
    spread_s: float,
    seed: int,
    steps: int,
    recorded: int,
) -> SampledResult:
    """Trains workers and servers in virtual time; runs without the GIL.

    Args:
        staleness: steps that a worker may be ahead of the slowest; None: any.
        delay_bound: updates that may be applied between a worker's read and its own update; a later
            update is not sent. For asynchronous workers whose pulls are answers. None: any.
        aggregates: with such a bound, other servers add up the updates of several workers where
            this is faster.

    Raises:
        InvalidUsage: the scenario is impossible, or makes no more progress.
    """

@final
class UpdateRule:
    """An optimizer as parameter servers apply it; buffers are contiguous float32."""

    def __init__(
        self,
        kind: str,
        *,
        lr: float = ...,
        weight_decay: float = ...,
        momentum: float = ...,
        dampening: float = ...,
        beta1: float = ...,
        beta2: float = ...,
        eps: float = ...,
        alpha: float = ...,
        lr_decay: float = ...,
        initial_accumulator_value: float = ...,
        nesterov: bool = ...,
        amsgrad: bool = ...,
        centered: bool = ...,
        maximize: bool = ...,
    ) -> None:
        """Takes "sgd", "adam", "adamw", "adagrad" or "rmsprop".

        Raises:
            InvalidUsage: torch.optim refuses these hyper-parameters.
        """

    @property
    def moments(self) -> int:
        """Number of state buffers that the optimizer needs."""

    def initialise_moments(self, moments: list[Buffer]) -> None: ...
    def apply(self, step: int, gradient: Buffer, value: Buffer, moments: list[Buffer]) -> None:
        """Takes one step; steps count from 1. Runs without the GIL."""

def delay_bounded_order(updates: list[tuple[int, float]]) -> tuple[list[int], list[int]]:
    """The order in which updates are sent, and the updates that are late, as indices.

    csrc/servers/admission/delay_order.h has the rule.

    Args:
        updates: for each update, the number of other updates that may be applied before it, and
            the seconds that it takes.
    """

def sum_elements(dtype: str, inputs: list[Buffer], out: Buffer) -> None:
    """Sums float32, float64, float16 or bfloat16 inputs in the given order, without the GIL."""
