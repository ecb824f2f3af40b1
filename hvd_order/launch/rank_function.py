"""A pickled function on the ranks of a host, and what each rank leaves of it: a value or an error.

The host's agent writes the function into a folder; each rank (`main`) reads it there and writes its
outcome beside it; the agent sends outcomes to the launcher. So no rank needs another port, and the
launcher no folder that the hosts share.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_order.base.errors import HorovodInternalError, InvalidUsage

__all__ = ["FunctionCall", "FunctionFolder", "RankOutcome", "main"]

_FOLDER = "HVD_ORDER_FUNCTION_FOLDER"
_PART = 48 << 10


@dataclass(frozen=True)
class RankOutcome:
    """What a function did on a rank.

    Attributes:
        value: what it returned, pickled; None: it raised.
        said: class and text of the exception.
        trace: traceback of the exception.
        error: the exception, pickled; None: it cannot be.
        follows: whether the exception only says that another rank failed.
    """

    value: bytes | None = None
    said: str = ""
    trace: str = ""
    error: bytes | None = None
    follows: bool = False


@dataclass
class FunctionCall:
    """A call that a launch request carries to the ranks, and what comes back.

    Attributes:
        payload: from `pickled`.
        outcomes: host and outcome of ranks that have ended, by rank.
        messages: what the launcher said about the job.
    """

    payload: bytes
    outcomes: dict[int, tuple[str, RankOutcome]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    _parts: dict[int, bytes] = field(default_factory=dict)

    @staticmethod
    def pickled(
        function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bytes:
        """The payload for a function and its arguments.

        Raises:
            InvalidUsage: they cannot be sent to other processes.
        """
        dumps = _dumps()
        try:
            if dumps is pickle.dumps and function.__module__ == "__main__":
                raise TypeError("it is of the script or notebook itself")
            return pickle.dumps(sys.path) + dumps((function, tuple(args), dict(kwargs)))
        except Exception as error:
            cure = "; pip install cloudpickle" if dumps is pickle.dumps else ""
            raise InvalidUsage(
                f"{function!r} with its arguments cannot be sent to other processes: {error}{cure}"
            ) from error

    def take(self, host: str, message: Mapping[str, Any]) -> None:
        """Takes a part of an outcome from the agent of a host."""
        rank = message["rank"]
        content = self._parts.pop(rank, b"") + base64.b64decode(message["part"])
        if message["last"]:
            self.outcomes[rank] = (host, pickle.loads(content))
        else:
            self._parts[rank] = content


class FunctionFolder:
    """An agent's folder for a call on its ranks.

    Args:
        payload: `FunctionCall.payload` in base64; empty: there is no call, and no folder.
    """

    def __init__(self, payload: str) -> None:
        self._path: Path | None = None
        if payload:
            self._path = Path(tempfile.mkdtemp(prefix="hvd_order_function_"))
            (self._path / "call").write_bytes(base64.b64decode(payload))
            os.environ[_FOLDER] = str(self._path)  # the ranks inherit it

    def messages(self) -> Iterator[dict[str, Any]]:
        """The outcomes that have come, each once, in parts for `FunctionCall.take`."""
        for path in sorted(self._path.glob("*.outcome")) if self._path else ():
            content = path.read_bytes()
            path.unlink()
            for begin in range(0, len(content), _PART):
                part = base64.b64encode(content[begin : begin + _PART]).decode()
                last = begin + _PART >= len(content)
                yield {"rank": int(path.stem), "part": part, "last": last}

    def remove(self) -> None:
        """Removes the folder."""
        if self._path:
            shutil.rmtree(self._path, ignore_errors=True)


def main() -> None:
    """Calls the function; what each rank runs."""
    folder, rank = Path(os.environ.pop(_FOLDER)), os.environ["RANK"]
    dumps = _dumps()
    try:
        with (folder / "call").open("rb") as file:
            sys.path += [path for path in pickle.load(file) if path not in sys.path]
            function, args, kwargs = pickle.load(file)
        outcome = RankOutcome(dumps(function(*args, **kwargs)))
    except Exception as error:
        said = traceback.format_exception_only(error)[-1].strip()
        pickled = None
        with contextlib.suppress(Exception):
            pickled = dumps(error)
        follows = isinstance(error, HorovodInternalError)
        _write(folder, rank, RankOutcome(None, said, traceback.format_exc(), pickled, follows))
        raise
    _write(folder, rank, outcome)


def _write(folder: Path, rank: str, outcome: RankOutcome) -> None:
    (folder / rank).write_bytes(pickle.dumps(outcome))
    (folder / rank).rename(folder / f"{rank}.outcome")  # the agent sees whole files only


def _dumps() -> Callable[[Any], bytes]:
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps
    dumps: Callable[[Any], bytes] = cloudpickle.dumps  # also what a script or notebook defines
    return dumps
