"""Every knob once: type, default, what it accepts and one line of help, and what fits together."""

# ruff: noqa: RUF009  (knob() returns a dataclasses.field, which is no value that instances share)

from __future__ import annotations

import dataclasses
import difflib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from hvd_order.base.config.knobs import (
    BYTES,
    COUNT,
    DIRECTORY,
    FILE,
    HOST_PORT,
    METRICS,
    NORM,
    SECONDS,
    SWITCH,
    TRACE_FILE,
    choice,
    knob,
    knobs_of,
    names,
    one_of,
)
from hvd_order.base.errors import InvalidUsage

__all__ = [
    "KNOBS",
    "Agreement",
    "Comm",
    "Config",
    "Consistency",
    "Policy",
    "Transport",
    "Updater",
]

Policy = Literal["priority", "arrival"]
Agreement = Literal["leader", "negotiated", "planned"]
Transport = Literal["c10d", "horovod"]
Comm = Literal["allreduce", "ps"]
Split = Literal["auto", "never"]
Updater = Literal["worker", "server"]
Consistency = Literal["sync", "async"]
Debug = Literal["host_waits", "split", "no_account"]
LogLevel = Literal["debug", "info", "warning", "error"]


_LEVELS = choice(LogLevel, {"trace": "debug", "fatal": "error"})  # also Horovod's words


@dataclass(frozen=True)
class Config:
    """The knobs of one process, checked.

    Sizes are in bytes; None: chosen at run time. The environment variable of a field is
    ``HVD_ORDER_`` and its name.

    Raises:
        InvalidUsage: values that cannot work, alone or together.
    """

    slice_bytes: int | None = knob(
        "",
        BYTES,
        "Size of a slice, the unit of transfer; a large tensor is cut, small neighbours share "
        "one. Not set: chosen for model and network.",
    )
    credit_bytes: int | None = knob(
        "",
        BYTES,
        "How much may be in flight at once; what is in flight cannot be overtaken. Not set: "
        "twice the slice, more on a network of high latency.",
    )
    plan: str | None = knob(
        "",
        FILE,
        "Plan that `hvd-order tune` made: order, slices, credit and agreement of this model "
        "here; rank 0 reads it, and writes down what trials have chosen. Variables that are set "
        "win.",
        may_differ=True,
    )
    tune: bool = knob(
        "1",
        SWITCH,
        "Try other slice sizes, arrival order, planned orders and DDP's buckets in the first steps "
        "and keep the fastest; a size or credit that is set, or policy `arrival`, is not tried "
        "against others. Again, rarely, when step times have clearly changed.",
    )
    policy: Policy = knob(
        "priority",
        choice(Policy),
        "Which ready slice goes first: the one needed first, or the one that was ready first.",
    )
    agreement: Agreement | None = knob(
        "",
        choice(Agreement),
        "How all ranks come to send the same slices in the same order. Not set: as the plan "
        "says, else `leader` until trials on real steps have chosen `leader` or `planned`.",
    )
    transport: Transport | None = knob(
        "",
        choice(Transport),
        "What carries the slices: torch.distributed, or an installed Horovod. Not set: Horovod "
        "where horovodrun started the job and all ranks have it, else torch.distributed.",
    )
    comm: Comm = knob(
        "allreduce",
        choice(Comm),
        "Who sums gradients: all ranks together, or parameter servers.",
    )
    server_store: str | None = knob(
        "",
        HOST_PORT,
        "Where workers and parameter servers find each other; `hvd-order run --servers` sets it.",
        may_differ=True,
    )
    servers: int | None = knob(
        "",
        COUNT,
        "Parameter servers that a job begins with; `hvd-order run --servers` sets it.",
    )
    min_servers: int | None = knob(
        "",
        COUNT,
        "Least number of servers: servers without which steps take no longer are stopped, down to "
        "this number; `hvd-order run --min-servers` sets it. Not set: the fewest that work, if the "
        "other limit is set; else none is stopped.",
        may_differ=True,
    )
    max_servers: int | None = knob(
        "",
        COUNT,
        "Largest number of servers: the launcher starts more while they make steps shorter; "
        "`hvd-order run --max-servers` sets it. Not set: none is started.",
        may_differ=True,
    )
    ps_update: Updater = knob(
        "worker",
        choice(Updater),
        "Who applies gradients: servers answer with sums, or update and answer with parameters.",
    )
    ps_mode: Consistency = knob(
        "sync",
        choice(Consistency),
        "Servers apply a step's gradients together, or each push as it comes (updates on "
        "servers only).",
    )
    ps_staleness: int | None = knob(
        "",
        COUNT,
        "With `async`: how many steps a worker may be ahead of the slowest. Not set: any.",
    )
    ps_delay_bound: int | None = knob(
        "",
        COUNT,
        "With `async`: largest delay of an update, in updates of its slice. With 2, at most two "
        "other updates come between a worker's read of a slice and its own update; an update that "
        "would be later is not sent. Not set: all are sent.",
    )
    ps_aggregate: bool = knob(
        "0",
        SWITCH,
        "With a delay bound: where that is faster, another server adds up the updates of "
        "several workers and sends their sum to the owner of the slice.",
    )
    ps_replicas: bool = knob(
        "0",
        SWITCH,
        "Keep a copy of each slice on another server, which takes over when its owner is lost.",
    )
    ps_divergence: float = knob(
        "0",
        NORM,
        "How far a copy may lag: answers wait while the updates that it lacks have norms that "
        "add up to more. `0`: answers wait for the copy.",
    )
    ps_silence: timedelta = knob(
        "30",
        SECONDS,
        "A server that gives no sign of life for so long, while a worker waits, counts as lost; "
        "at most half of HVD_ORDER_TIMEOUT.",
    )
    ps_balance: bool = knob(
        "1",
        SWITCH,
        "Move slices away from servers that are slow.",
    )
    cross_iteration: bool = knob(
        "1",
        SWITCH,
        "Let the next forward pass of a layer start while other layers' gradients still travel.",
    )
    split: Split = knob(
        "auto",
        choice(Split),
        "Send each sum in two halves, a reduce-scatter and later an all-gather, so that gradients "
        "can be clipped or unscaled before their sums have arrived. `auto`: where the program "
        "reads the norms of gradients before `step()` and trials find it faster.",
    )
    timeout: timedelta = knob(
        "1800",
        SECONDS,
        "Longest wait for another rank or a transfer before an error that names both.",
    )
    stall_warning: timedelta = knob(
        "60",
        SECONDS,
        "Wait after which a warning names the tensors and the ranks that are late.",
        may_differ=True,
    )
    report: int | None = knob(
        "",
        COUNT,
        "Log a line about the parts of a step every so many steps (at least every ten); empty: "
        "none.",
        may_differ=True,
    )
    timeline: str | None = knob(
        "",
        TRACE_FILE,
        "Write what happened when as trace events (Perfetto opens them); empty: nowhere.",
        also="HOROVOD_TIMELINE",
        may_differ=True,
    )
    metrics: str | None = knob(
        "",
        METRICS,
        "Offer the numbers of the last steps to Prometheus: at a port of the loopback interface or "
        "of a named host, which is this one plus the local rank (`0`: any free one, in the log), "
        "or as files for node_exporter's textfile collector. Not set: nowhere.",
        may_differ=True,
    )
    watch: bool = knob(
        "1",
        SWITCH,
        "Let `hvd-order top` and `hvd-order doctor --job` look at the job: a thread of each rank "
        "looks once a second into the store where ranks have met.",
    )
    elastic_dir: str | None = knob(
        "",
        DIRECTORY,
        "Where an elastic job keeps its last commit, on every host or shared; a job that finds "
        "one there goes on from it. Not set: in memory of each host, for this job alone.",
        may_differ=True,
    )
    check_ranks: bool = knob(
        "1",
        SWITCH,
        "Compare the ranks' parameters and hyper-parameters after steps 1, 2, 4, 8, 16, ..., "
        "and stop with an error that names the first that differ.",
    )
    debug: frozenset[Debug] = knob(
        "",
        names(Debug),
        "Slower ways, to find where a fault lies. `host_waits`: the host waits for a sum itself "
        "before it launches work on it, not only until a stream of the device waits. `split`: "
        "sums in two halves wherever that is possible. `no_account`: ranks do not compare their "
        "steps, and `optimizer.stats()` is empty.",
    )
    log: LogLevel | None = knob(
        "",
        _LEVELS,
        "Write messages of the logger `hvd_order` from this level on, to standard error unless the "
        "program sets up logging itself. Not set: warnings, or what the program's logging says.",
        also="HOROVOD_LOG_LEVEL",
        may_differ=True,
    )
    alias: bool = knob(
        "0",
        SWITCH,
        "Let `import horovod` give hvd_order, in scripts that stay as they are; "
        "takes effect when Python starts.",
        may_differ=True,
    )

    def __post_init__(self) -> None:
        if self.slice_bytes is not None and self.slice_bytes < 64:
            raise InvalidUsage(
                f"slice_bytes is {self.slice_bytes}, the smallest useful slice has 64 bytes"
            )
        if (
            self.slice_bytes is not None
            and self.credit_bytes is not None
            and self.credit_bytes < self.slice_bytes
        ):
            raise InvalidUsage(
                f"credit_bytes ({self.credit_bytes}) is smaller than slice_bytes "
                f"({self.slice_bytes}), so no slice could ever be sent; raise "
                "HVD_ORDER_CREDIT_BYTES or lower HVD_ORDER_SLICE_BYTES"
            )
        for each in KNOBS:
            value = getattr(self, each.field)
            allowed = (*each.choices, *([] if each.default else [None]))
            if each.choices and value not in allowed:
                raise InvalidUsage(f"{each.field} is {value!r}; expected {one_of(each.choices)}")
        self._check_servers()
        for name in ("timeout", "stall_warning", "ps_silence"):
            wait: timedelta = getattr(self, name)
            if wait <= timedelta(0):
                raise InvalidUsage(f"{name} is {wait.total_seconds():g} s; it must be positive")

    def _check_servers(self) -> None:
        if self.comm == "ps" and self.transport == "horovod":
            raise InvalidUsage("parameter servers (comm=ps) do not go through Horovod's transport")
        if self.ps_mode == "async" and self.ps_update != "server":
            raise InvalidUsage(
                "asynchronous workers need servers that update: set HVD_ORDER_PS_UPDATE=server"
            )
        if self.ps_staleness is not None and self.ps_mode != "async":
            raise InvalidUsage("HVD_ORDER_PS_STALENESS is for HVD_ORDER_PS_MODE=async")
        if self.ps_delay_bound is not None and self.ps_mode != "async":
            raise InvalidUsage("HVD_ORDER_PS_DELAY_BOUND is for HVD_ORDER_PS_MODE=async")
        if self.ps_aggregate and self.ps_delay_bound is None:
            raise InvalidUsage(
                "HVD_ORDER_PS_AGGREGATE needs a bound of the delay (HVD_ORDER_PS_DELAY_BOUND): "
                "without one, workers do not ask where to push"
            )
        if self.servers is not None and self.servers < 1 + self.ps_replicas:
            raise InvalidUsage(
                f"{self.servers} parameter servers are too few; a copy of each slice needs two"
                if self.ps_replicas
                else "at least one parameter server is needed"
            )
        self._check_limits_of_servers()

    def _check_limits_of_servers(self) -> None:
        if self.min_servers is None and self.max_servers is None:
            return
        fewest = 1 + self.ps_replicas
        least = fewest if self.min_servers is None else self.min_servers
        if least < fewest:
            raise InvalidUsage(
                f"HVD_ORDER_MIN_SERVERS is {least}; {fewest} is the least"
                + (" with a copy of each slice" if self.ps_replicas else "")
            )
        if self.servers is not None and self.servers < least:
            raise InvalidUsage(f"the job begins with {self.servers} servers, less than {least}")
        most = self.servers if self.max_servers is None else self.max_servers
        if most is not None and most < (least if self.servers is None else self.servers):
            raise InvalidUsage(
                f"HVD_ORDER_MAX_SERVERS is {most}; the job has more from the beginning"
            )
        if not self.ps_balance:
            raise InvalidUsage(
                "servers come and go by the measurements that balance them: HVD_ORDER_MIN_SERVERS "
                "and HVD_ORDER_MAX_SERVERS need HVD_ORDER_PS_BALANCE=1"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Reads the knobs; what is not set keeps its default.

        Args:
            environ: variables to read, ``os.environ`` when None.

        Raises:
            InvalidUsage: a variable holds something else than its kind; the message names it.

        Warns:
            RuntimeWarning: a variable starts with ``HVD_ORDER_`` but is no knob (a typing error).
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for each in KNOBS:
            names = (each.env, each.also)
            found = next((n for n in names if n is not None and n in environ), None)
            if found is None:
                continue
            try:
                values[each.field] = each.parse(environ[found])
            except ValueError as error:
                raise InvalidUsage(f"{found}: {error}") from None
        for name, value, cure in _GONE:
            if environ.get(name, "").strip().lower() == value:
                raise InvalidUsage(f"{name}={value} is not there any more: {cure}")
        _warn_about_unknown(environ)
        return cls(**values)

    def to_environment(self) -> dict[str, str]:
        """The variables that make `from_environment` return an equal `Config` elsewhere."""
        texts: dict[str, str] = {}
        for each in KNOBS:
            value = getattr(self, each.field)
            if isinstance(value, bool):
                texts[each.env] = "1" if value else "0"
            elif isinstance(value, frozenset):
                texts[each.env] = ",".join(sorted(value))
            elif isinstance(value, timedelta):
                texts[each.env] = repr(value.total_seconds())
            else:
                texts[each.env] = "" if value is None else str(value)
        return texts

    def common_settings(self) -> dict[str, str]:
        """Of `to_environment` what all ranks need alike."""
        texts = self.to_environment()
        return {each.env: texts[each.env] for each in KNOBS if not each.may_differ}

    def with_values(self, **changes: Any) -> Config:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)


KNOBS = knobs_of(Config)

# Read by hvd_order.servers.access.secret alone, so that no one shows a secret among the settings.
_NOT_KNOBS = ("HVD_ORDER_SECRET", "HVD_ORDER_SECRET_FILE")

# Values that did what no job would go on without: (variable, value, cure).
_GONE = (
    (
        "HVD_ORDER_BACKEND",
        "mpi",
        "TensorFlow's gradients go through torch.distributed, whose steps took 0.56 of the time; "
        "pip install torch, and unset the variable",
    ),
)


def _warn_about_unknown(environ: Mapping[str, str]) -> None:
    known = [each.env for each in KNOBS]
    for name in environ:
        if not name.startswith("HVD_ORDER_") or name in (*known, *_NOT_KNOBS):
            continue
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        warnings.warn(
            f"environment variable {name} is not known to hvd_order and has no effect{hint}",
            RuntimeWarning,
            stacklevel=3,
        )
