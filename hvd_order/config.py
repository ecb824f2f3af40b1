"""Every knob once: its name, default, environment variable and one line of help.

``docs/config.md`` is made from this file: ``python -m hvd_order.config > docs/config.md``.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from hvd_order.errors import InvalidUsage

__all__ = [
    "KNOBS",
    "Agreement",
    "AssignmentName",
    "BackendName",
    "Comm",
    "Config",
    "Consistency",
    "Knob",
    "Policy",
    "Transport",
    "Updater",
    "parse_bytes",
    "reference_page",
]

Policy = Literal["priority", "arrival"]
Agreement = Literal["leader", "negotiated", "planned"]
Transport = Literal["c10d", "horovod"]
BackendName = Literal["c10d", "mpi"]
Comm = Literal["allreduce", "ps"]
Updater = Literal["worker", "server"]
Consistency = Literal["sync", "async"]
AssignmentName = Literal["even", "round_robin", "hash", "mxnet"]

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def parse_bytes(text: str) -> int:
    """Reads a size such as ``"2MiB"``, ``"500KB"``, ``"1.5 GiB"`` or ``"4194304"``, in bytes.

    Raises:
        ValueError: not a whole, positive number of bytes.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"expected a size such as 2MiB, 500KB or 4194304, got {text!r}")
    size_bytes = float(match.group(1)) * unit
    if size_bytes < 1 or size_bytes != int(size_bytes):
        raise ValueError(f"expected a whole, positive number of bytes, got {text!r}")
    return int(size_bytes)


def _parse_seconds(text: str) -> timedelta:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    try:
        return timedelta(seconds=seconds)
    except (ValueError, OverflowError):
        raise ValueError(f"expected a number of seconds such as 300 or 0.5, got {text!r}") from None


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"expected 1 or 0, got {text!r}")


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}; got {text!r}")
        return word

    return parse


def _optional(*choices: str) -> Callable[[str], str | None]:
    parse = _one_of(*choices)
    return lambda text: parse(text) if text.strip() else None


def _parse_size(text: str) -> int | None:
    return parse_bytes(text) if text.strip() else None


def _parse_count(text: str) -> int | None:
    if not text.strip():
        return None
    if not text.strip().isdecimal():
        raise ValueError(f"expected a whole number, got {text!r}")
    return int(text)


def _parse_norm(text: str) -> float:
    try:
        norm = float(text)
    except ValueError:
        norm = math.nan
    if not 0 <= norm < math.inf:
        raise ValueError(f"expected a number from 0 on, got {text!r}")
    return norm


def _parse_path(text: str) -> str | None:
    # Horovod's DYNAMIC means: not yet, the program calls start_timeline() itself.
    return None if text in ("", "DYNAMIC") else text


@dataclass(frozen=True)
class Knob:
    """How one field of `Config` is read from the environment and documented.

    Attributes:
        field: name of the field in `Config`.
        env: environment variable that sets it.
        default: the default as one would write it in the environment.
        kind: what is accepted, for the reference page.
        help: one line.
        parse: text to value; raises ValueError with what was expected.
        also: Horovod's name of the variable, read when `env` is not set.
        may_differ: ranks may have different values, since each uses its own, or rank 0 alone one.
        formerly: our own name of it before; still read, with a warning.
    """

    field: str
    env: str
    default: str
    kind: str
    help: str
    parse: Callable[[str], Any]
    also: str | None = None
    may_differ: bool = False
    formerly: str | None = None


KNOBS: tuple[Knob, ...] = (
    Knob(
        "slice_bytes",
        "HVD_ORDER_SLICE_BYTES",
        "",
        "bytes",
        "Size of a slice, the unit of transfer; a large tensor is cut, small neighbours share one. "
        "Not set: chosen for model and network.",
        _parse_size,
    ),
    Knob(
        "credit_bytes",
        "HVD_ORDER_CREDIT_BYTES",
        "",
        "bytes",
        "How much may be in flight at once; what is in flight cannot be overtaken. Not set: twice "
        "the slice, more on a long line.",
        _parse_size,
    ),
    Knob(
        "plan",
        "HVD_ORDER_PLAN",
        "",
        "file name",
        "Plan that `hvd-order tune` made: order, slices, credit and agreement of this model here; "
        "rank 0 reads it, and writes down what trials have chosen. Variables that are set win.",
        # Absolute: it is written again later, when the program may be elsewhere.
        lambda text: os.path.abspath(text) if text else None,
        may_differ=True,
    ),
    Knob(
        "tune",
        "HVD_ORDER_TUNE",
        "1",
        "`1` or `0`",
        "Try other slice sizes, and arrival order, in the first steps and keep the fastest; a size "
        "or credit that is set, or policy `arrival`, is not tried against others. Again, rarely, "
        "when step times have clearly changed.",
        _parse_bool,
    ),
    Knob(
        "policy",
        "HVD_ORDER_POLICY",
        "priority",
        "`priority` or `arrival`",
        "Which ready slice goes first: the one needed first, or the one that was ready first.",
        _one_of("priority", "arrival"),
    ),
    Knob(
        "agreement",
        "HVD_ORDER_AGREEMENT",
        "",
        "`leader`, `negotiated` or `planned`",
        "How all ranks come to send the same slices in the same order. Not set: as the plan says, "
        "else `leader`.",
        _optional("leader", "negotiated", "planned"),
    ),
    Knob(
        "transport",
        "HVD_ORDER_TRANSPORT",
        "",
        "`c10d` or `horovod`",
        "What carries the slices: torch.distributed, or an installed Horovod. Not set: Horovod "
        "where horovodrun started the job and all ranks have it, else torch.distributed.",
        _optional("c10d", "horovod"),
    ),
    Knob(
        "backend",
        "HVD_ORDER_BACKEND",
        "",
        "`c10d` or `mpi`",
        "TensorFlow only: what carries the bytes, torch.distributed or MPI. Not set: the first of "
        "them that is installed.",
        _optional("c10d", "mpi"),
        formerly="HVD_ORDER_CARRIER",
    ),
    Knob(
        "comm",
        "HVD_ORDER_COMM",
        "allreduce",
        "`allreduce` or `ps`",
        "Who sums gradients: all ranks together, or parameter servers (docs/parameter-server.md).",
        _one_of("allreduce", "ps"),
    ),
    Knob(
        "server_store",
        "HVD_ORDER_SERVER_STORE",
        "",
        "host:port",
        "Where workers and parameter servers find each other; `hvd-order run --servers` sets it.",
        lambda text: text or None,
        may_differ=True,
    ),
    Knob(
        "servers",
        "HVD_ORDER_SERVERS",
        "",
        "number",
        "Parameter servers that a job begins with; `hvd-order run --servers` sets it.",
        _parse_count,
    ),
    Knob(
        "min_servers",
        "HVD_ORDER_MIN_SERVERS",
        "",
        "number",
        "Let servers go that nobody would miss, down to so many; `hvd-order run --min-servers` "
        "sets it. Not set: the fewest that work, if the other limit is set; else none goes.",
        _parse_count,
        may_differ=True,
    ),
    Knob(
        "max_servers",
        "HVD_ORDER_MAX_SERVERS",
        "",
        "number",
        "Ask the launcher for servers while they make steps shorter, up to so many; `hvd-order run "
        "--max-servers` sets it. Not set: none comes.",
        _parse_count,
        may_differ=True,
    ),
    Knob(
        "ps_update",
        "HVD_ORDER_PS_UPDATE",
        "worker",
        "`worker` or `server`",
        "Who applies gradients: servers answer with sums, or update and answer with parameters.",
        _one_of("worker", "server"),
    ),
    Knob(
        "ps_mode",
        "HVD_ORDER_PS_MODE",
        "sync",
        "`sync` or `async`",
        "Servers apply a step's gradients together, or each push as it comes (updates on servers "
        "only).",
        _one_of("sync", "async"),
    ),
    Knob(
        "ps_staleness",
        "HVD_ORDER_PS_STALENESS",
        "",
        "number",
        "With `async`: how many steps a worker may be ahead of the slowest. Not set: any.",
        _parse_count,
    ),
    Knob(
        "ps_delay_bound",
        "HVD_ORDER_PS_DELAY_BOUND",
        "",
        "number",
        "With `async`: no update is applied more than so many updates after the one that its "
        "worker had read; what would come later is not sent. Not set: all are sent.",
        _parse_count,
    ),
    Knob(
        "ps_aggregate",
        "HVD_ORDER_PS_AGGREGATE",
        "0",
        "`0` or `1`",
        "With a delay bound: where that is faster, another server adds up the updates of several "
        "workers and sends their sum to the owner of the slice.",
        _parse_bool,
    ),
    Knob(
        "ps_replicas",
        "HVD_ORDER_PS_REPLICAS",
        "0",
        "`0` or `1`",
        "Keep a copy of each slice on another server, which takes over when its owner is lost.",
        _parse_bool,
    ),
    Knob(
        "ps_divergence",
        "HVD_ORDER_PS_DIVERGENCE",
        "0",
        "norm",
        "How far a copy may lag: answers wait while the updates that it lacks have norms that add "
        "up to more. `0`: answers wait for the copy.",
        _parse_norm,
    ),
    Knob(
        "ps_silence",
        "HVD_ORDER_PS_SILENCE",
        "30",
        "seconds",
        "A server that gives no sign of life for so long, while a worker waits, counts as lost; at "
        "most half of HVD_ORDER_TIMEOUT.",
        _parse_seconds,
    ),
    Knob(
        "ps_assignment",
        "HVD_ORDER_PS_ASSIGNMENT",
        "even",
        "`even`, `round_robin`, `hash` or `mxnet`",
        "Which server holds which slice at the start.",
        _one_of("even", "round_robin", "hash", "mxnet"),
    ),
    Knob(
        "ps_balance",
        "HVD_ORDER_PS_BALANCE",
        "1",
        "`1` or `0`",
        "Move slices away from servers that are slow.",
        _parse_bool,
    ),
    Knob(
        "cross_iteration",
        "HVD_ORDER_CROSS_ITERATION",
        "1",
        "`1` or `0`",
        "Let the next forward pass of a layer start while other layers' gradients still travel.",
        _parse_bool,
    ),
    Knob(
        "timeout",
        "HVD_ORDER_TIMEOUT",
        "1800",
        "seconds",
        "Longest wait for another rank or a transfer before an error that names both.",
        _parse_seconds,
    ),
    Knob(
        "stall_warning",
        "HVD_ORDER_STALL_WARNING",
        "60",
        "seconds",
        "Wait after which a warning names the tensors and the ranks that are late.",
        _parse_seconds,
        may_differ=True,
    ),
    Knob(
        "timeline",
        "HVD_ORDER_TIMELINE",
        "",
        "file name",
        "Write what happened when as trace events (Perfetto opens them); empty: nowhere.",
        _parse_path,
        also="HOROVOD_TIMELINE",
        may_differ=True,
    ),
    Knob(
        "elastic_dir",
        "HVD_ORDER_ELASTIC_DIR",
        "",
        "directory",
        "Where an elastic job keeps its last commit, on every host or shared; a job that finds one "
        "there goes on from it. Not set: in memory of each host, for this job alone.",
        lambda text: text or None,
        may_differ=True,
    ),
    Knob(
        "check_ranks",
        "HVD_ORDER_CHECK_RANKS",
        "1",
        "`1` or `0`",
        "Compare the ranks' parameters and hyper-parameters after steps 1, 2, 4, 8, 16, ..., and "
        "stop with an error that names the first that differ.",
        _parse_bool,
    ),
    Knob(
        "alias",
        "HVD_ORDER_ALIAS",
        "0",
        "`1` or `0`",
        "Let `import horovod` give hvd_order, in scripts that stay as they are "
        "(docs/migration.md); takes effect when Python starts.",
        _parse_bool,
        may_differ=True,
    ),
)


@dataclass(frozen=True)
class Config:
    """The knobs of one process, checked.

    Attributes are explained in `KNOBS`, sizes are in bytes; None: chosen at run time.

    Raises:
        InvalidUsage: values that cannot work, alone or together.
    """

    slice_bytes: int | None = None
    credit_bytes: int | None = None
    plan: str | None = None
    tune: bool = True
    policy: Policy = "priority"
    agreement: Agreement | None = None
    transport: Transport | None = None
    backend: BackendName | None = None
    comm: Comm = "allreduce"
    server_store: str | None = None
    servers: int | None = None
    min_servers: int | None = None
    max_servers: int | None = None
    ps_update: Updater = "worker"
    ps_mode: Consistency = "sync"
    ps_staleness: int | None = None
    ps_delay_bound: int | None = None
    ps_aggregate: bool = False
    ps_replicas: bool = False
    ps_divergence: float = 0.0
    ps_silence: timedelta = timedelta(seconds=30)
    ps_assignment: AssignmentName = "even"
    ps_balance: bool = True
    cross_iteration: bool = True
    timeout: timedelta = timedelta(seconds=1800)
    stall_warning: timedelta = timedelta(seconds=60)
    timeline: str | None = None
    elastic_dir: str | None = None
    check_ranks: bool = True
    alias: bool = False

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
        if self.policy not in ("priority", "arrival"):
            raise InvalidUsage(f"policy is {self.policy!r}; expected priority or arrival")
        if self.agreement not in (None, "leader", "negotiated", "planned"):
            raise InvalidUsage(
                f"agreement is {self.agreement!r}; expected leader, negotiated or planned"
            )
        if self.transport not in (None, "c10d", "horovod"):
            raise InvalidUsage(f"transport is {self.transport!r}; expected c10d or horovod")
        if self.backend not in (None, "c10d", "mpi"):
            raise InvalidUsage(f"backend is {self.backend!r}; expected c10d or mpi")
        self._check_servers()
        for name in ("timeout", "stall_warning", "ps_silence"):
            value: timedelta = getattr(self, name)
            if value <= timedelta(0):
                raise InvalidUsage(f"{name} is {value.total_seconds():g} s; it must be positive")

    def _check_servers(self) -> None:
        if self.comm not in ("allreduce", "ps"):
            raise InvalidUsage(f"comm is {self.comm!r}; expected allreduce or ps")
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
        for knob in KNOBS:
            names = (knob.env, knob.also, knob.formerly)
            found = next((n for n in names if n is not None and n in environ), None)
            if found is None:
                continue
            if found == knob.formerly:
                warnings.warn(
                    f"{found} is {knob.env} now; the old name goes with the next release",
                    FutureWarning,
                    stacklevel=2,
                )
            try:
                values[knob.field] = knob.parse(environ[found])
            except ValueError as error:
                raise InvalidUsage(f"{found}: {error}") from None
        _warn_about_unknown(environ)
        return cls(**values)

    def to_environment(self) -> dict[str, str]:
        """The variables that make `from_environment` return an equal `Config` elsewhere."""
        texts: dict[str, str] = {}
        for knob in KNOBS:
            value = getattr(self, knob.field)
            if isinstance(value, bool):
                texts[knob.env] = "1" if value else "0"
            elif isinstance(value, timedelta):
                texts[knob.env] = repr(value.total_seconds())
            else:
                texts[knob.env] = "" if value is None else str(value)
        return texts

    def common_settings(self) -> dict[str, str]:
        """Of `to_environment` what all ranks need alike."""
        texts = self.to_environment()
        return {knob.env: texts[knob.env] for knob in KNOBS if not knob.may_differ}

    def with_values(self, **changes: Any) -> Config:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)


# Read by hvd_order.server.access.secret alone, so that no one shows a secret among the settings.
_NOT_KNOBS = ("HVD_ORDER_SECRET", "HVD_ORDER_SECRET_FILE")


def _warn_about_unknown(environ: Mapping[str, str]) -> None:
    known = [knob.env for knob in KNOBS]
    former = [knob.formerly for knob in KNOBS]
    for name in environ:
        if not name.startswith("HVD_ORDER_") or name in (*known, *former, *_NOT_KNOBS):
            continue
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        warnings.warn(
            f"environment variable {name} is not known to hvd_order and has no effect{hint}",
            RuntimeWarning,
            stacklevel=3,
        )


def reference_page() -> str:
    """The text of ``docs/config.md``."""
    lines = [
        "# Configuration",
        "",
        "<!-- Made by `python -m hvd_order.config > docs/config.md`; edit hvd_order/config.py. -->",
        "",
        "Environment variables are read once, in `init()`. All ranks need the same values, which",
        "`init()` compares, but for those marked with *.",
        "Sizes accept `B`, `KB`, `MB`, `GB` (powers of 1000) and `KiB`, `MiB`, `GiB` (of 1024).",
        "",
        "| variable | accepts | default | what it does |",
        "| --- | --- | --- | --- |",
    ]
    for knob in KNOBS:
        name = f"`{knob.env}`" + (f" (also `{knob.also}`)" if knob.also else "")
        name += " *" if knob.may_differ else ""
        default = f"`{knob.default}`" if knob.default else "not set"
        lines.append(f"| {name} | {knob.kind} | {default} | {knob.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference_page())
