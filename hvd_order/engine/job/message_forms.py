"""The forms of the messages of the star: what each kind holds, and who sends it. Pure.

Nothing in a message of another rank is believed before it has been compared with these forms: a
number that is no rank, or a list in place of a text, would end a thread that all ranks wait for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Malformed", "Message", "malformed", "parsed"]

Message = list[Any]  # any JSON value; the first element is the kind of message

Test = Callable[[Any, int], bool]
"""Whether a value is of some form, in a job of so many ranks."""


class Malformed(Exception):  # noqa: N818  (says what it tells)
    """A message is none that its sender may send; the text names the sender and the problem."""


def malformed(sender: int, problem: str) -> Malformed:
    """Returns the error."""
    return Malformed(
        f"rank {sender} sent a malformed message: {problem}. All ranks must run the same version "
        "of hvd_order"
    )


def _rank(value: Any, size: int) -> bool:
    return type(value) is int and 0 <= value < size


def _number(value: Any, _: int) -> bool:
    return type(value) is int and value >= 0


def _text(value: Any, _: int) -> bool:
    return type(value) is str


def _error(value: Any, _: int) -> bool:
    return value in ("PeerLost", "TransferTimeout")


def _verdict(value: Any, _: int) -> bool:
    return value in ("go", "differ", "refused")


def _whether(value: Any, _: int) -> bool:
    return value is None or type(value) is bool


def _list_of(test: Test) -> Test:
    return lambda value, size: type(value) is list and all(test(each, size) for each in value)


def _table(key: Callable[[str], bool], test: Test) -> Test:
    return lambda value, size: (
        type(value) is dict and all(key(name) and test(each, size) for name, each in value.items())
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _is_key(text: str) -> bool:
    return _is_number(text.partition("/")[0])


def _key(value: Any, _: int) -> bool:
    return type(value) is str and _is_key(value)


_COUNTS = _table(_is_key, _number)
_EVENTS = ("begin", "give_up", "sparse", "loss", "end", "pass")


def _event(value: Any, _: int) -> bool:
    return value in _EVENTS


_STEP: tuple[Test, ...] = (_key, _number, _event)


def _step(value: Any, size: int) -> bool:
    return type(value) is list and value[:1] == ["step"] and _fits(value[1:], _STEP, size)


_LEAVE: tuple[Test, ...] = ()
_ROLL: tuple[Test, ...] = (_rank, _number)
_HERE: tuple[Test, ...] = (
    _rank, _number, _rank, _table(lambda _: True, _number), _list_of(_rank),
)  # fmt: skip

TO_RANK_0: Mapping[str, tuple[Test, ...]] = {
    "request": (_number, _text, _text, _whether),
    "join": (_COUNTS, _list_of(_step), _table(_is_number, _number)),
    "step": _STEP,
    "roll": _ROLL,
    "here": _HERE,
    "clock": (_number, _whether),
    "trace": (_number, _number, _text),
    "leave": _LEAVE,
}
"""What follows the kind, by kind, in messages to rank 0."""

FROM_RANK_0: Mapping[str, tuple[Test, ...]] = {
    "go": (_number, _text, _verdict, _list_of(_rank)),
    "late": (_number, _text, _list_of(_rank)),
    "failed": (_number, _error, _text),
    "joined": (_rank, _COUNTS),
    "step": _STEP,
    "all_joined": (_rank, _table(_is_number, _number)),
    "roll": _ROLL,
    "here": _HERE,
    "clock": (),
    "trace": (_number,),
    "leave": _LEAVE,
}
"""The same, from rank 0 to another rank."""


def _fits(values: list[Any], tests: tuple[Test, ...], size: int) -> bool:
    return len(values) == len(tests) and all(
        test(value, size) for test, value in zip(tests, values, strict=True)
    )


def parsed(sender: int, text: bytes) -> Message:
    """Returns the message of a text, whose form is still to be compared.

    Raises:
        Malformed: it is no message.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise malformed(sender, f"it is no JSON ({str(error)[:60]})") from error
    if type(message) is not list or not message or type(message[0]) is not str:
        raise malformed(sender, "it is no list that begins with a kind")
    return message


def check(message: Message, forms: Mapping[str, tuple[Test, ...]], sender: int, size: int) -> None:
    """Compares a message with the form of its kind.

    Args:
        message: as `parsed`.
        forms: of all kinds that the sender may send.
        sender: the sending rank.
        size: number of ranks.

    Raises:
        Malformed: the kind is unknown, or something else is in a place than belongs there.
    """
    kind, *values = message
    form = forms.get(kind)
    if form is None:
        raise malformed(sender, f"there is no kind {kind[:40]!r}")
    if not _fits(values, form, size):
        raise malformed(sender, f"the kind {kind!r} does not hold what is in it")
    # Rank 0 forwards the questions and answers of others.
    asked_for = {"roll": 0, "here": 2}.get(kind)
    if asked_for is not None and sender != 0 and values[asked_for] != sender:
        raise malformed(sender, f"the kind {kind!r} speaks for rank {values[asked_for]}")
