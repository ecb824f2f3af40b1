"""Rendezvous of the ranks of a job: each leaves a card in rank 0's store before anything else.

A rank takes its place, leaves its card and reads the other cards, rank 0's first. A card holds
what must be the same everywhere: the job, its size, versions and settings. So a wrong setting, or
another job at the same port, raises an error that names it, instead of a failed transfer later.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch._C._distributed_c10d import Store

import hvd_order
from hvd_order.base.bounded import answer_s, notice_times, within
from hvd_order.base.config import Config
from hvd_order.base.errors import InvalidUsage, TransferTimeout
from hvd_order.base.same_model import check_same_settings
from hvd_order.base.store_errors import first_line
from hvd_order.launch.environment import RankInfo

__all__ = ["Card", "check_cards", "every_rank_has_a_device", "meet"]

Answer = TypeVar("Answer")

_OTHERS_MAY_READ_S = 5.0
_LOOK_S = 0.05
_log = logging.getLogger("hvd_order")
_JOB_SIZE = "the number of processes (WORLD_SIZE)"


@dataclass(frozen=True)
class Card:
    """A rank's description of itself for the other ranks.

    Attributes:
        host: its host name.
        process: its process id.
        device_count: number of CUDA devices that it sees.
        visible_devices: the devices that it sees.
        job: the launcher's name of the job, the number of ranks and the versions; a rank that
            differs here has connected to the wrong job.
        settings: values by variable, as text.
    """

    host: str
    process: int
    device_count: int
    visible_devices: str
    job: Mapping[str, str]
    settings: Mapping[str, str]

    @classmethod
    def of_this_process(cls, size: int, config: Config, job: str) -> Card:
        """Describes this process; ``job`` is the launcher's name of the job, empty if unknown."""
        release = ".".join(torch.__version__.split(".")[:2])
        return cls(
            host=socket.gethostname(),
            process=os.getpid(),
            device_count=torch.cuda.device_count() if torch.cuda.is_available() else 0,
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            job={
                "the launcher's job": job,
                _JOB_SIZE: str(size),
                "the version of hvd_order": hvd_order.__version__,
                "the version of PyTorch": release,
            },
            settings={
                **config.common_settings(),
                "GLOO_DEVICE_TRANSPORT": os.environ.get("GLOO_DEVICE_TRANSPORT", ""),
            },
        )

    def to_text(self) -> str:
        """Returns text that `from_text` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: bytes) -> Card:
        """Parses a card; any process that reaches the store may have written it.

        Raises:
            ValueError: the text is not a card.
        """
        try:
            told = json.loads(text)
            card = cls(**told)
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        numbers = (card.process, card.device_count)
        texts = [card.host, card.visible_devices]
        for items in (card.job, card.settings):
            if not isinstance(items, dict):
                raise ValueError("a list of settings is none")
            texts += items.values()
        if not all(type(each) is int for each in numbers) or not all(
            isinstance(each, str) for each in texts
        ):
            raise ValueError("a value has another type than it should")
        return card


def every_rank_has_a_device(cards: Sequence[Card]) -> bool:
    """Returns whether no two ranks must share a CUDA device, which NCCL does not allow.

    Either a host shows all its devices to all its ranks and has enough of them, or the launcher
    shows one device to each rank.
    """
    for host in {card.host for card in cards}:
        local = [card for card in cards if card.host == host]
        enough = all(card.device_count >= len(local) for card in local)
        one_each = all(card.device_count == 1 for card in local) and len(
            {card.visible_devices for card in local}
        ) == len(local)
        if not (enough or one_each):
            return False
    return True


def check_cards(cards: Mapping[int, Card]) -> None:
    """Checks that the cards agree where they must.

    Args:
        cards: by rank.

    Raises:
        InvalidUsage: something differs; names it, its values and the ranks that have them.
    """
    _check_jobs(cards)
    check_same_settings({rank: card.settings for rank, card in cards.items()})


def _check_jobs(cards: Mapping[int, Card]) -> None:
    check_same_settings(
        {rank: card.job for rank, card in cards.items()},
        "they do not belong together: is another job using MASTER_PORT, or was one rank started "
        "with other variables, or on a host with other libraries?",
    )


def meet(store: Store, info: RankInfo, config: Config) -> list[Card]:
    """Returns every rank's card, in rank order; all ranks have arrived then. Collective.

    Args:
        store: store whose keys belong to this ``init()`` alone.
        info: this rank's place in the job.
        config: the knobs.

    Raises:
        InvalidUsage: the ranks do not fit together, or another process has this rank's place.
        TransferTimeout: not all ranks arrived within ``HVD_ORDER_TIMEOUT``; names the missing
            ones.
    """
    meeting = _Meeting(store, info, config)
    mine = Card.of_this_process(info.size, config, info.job)
    meeting.take_place(mine)
    cards = {0: meeting.card_of(0)}
    try:
        _check_jobs({0: cards[0], info.rank: mine})
        for rank in range(info.size):
            cards[rank] = mine if rank == info.rank else meeting.card_of(rank)
            # Check each card at once: not all ranks of a job of another size may ever arrive.
            _check_jobs({0: cards[0], rank: cards[rank]})
        check_cards(cards)
    except InvalidUsage:
        if info.rank == 0:
            meeting.let_others_read()  # the store ends with this process
        with contextlib.suppress(TransferTimeout):  # rank 0 is gone, so no rank reads the count
            meeting.has_read()
        raise
    meeting.has_read()
    return [cards[rank] for rank in range(info.size)]


class _Meeting:
    """One rank's view of the store during the rendezvous."""

    def __init__(self, store: Store, info: RankInfo, config: Config) -> None:
        self._store = store
        self._info = info
        self._timeout = config.timeout
        self._begin = time.monotonic()
        self._deadline = self._begin + config.timeout.total_seconds()
        self._notices = notice_times(config.stall_warning)
        self._next_notice = self._begin + next(self._notices)

    def take_place(self, mine: Card) -> None:
        """Leaves this rank's card, unless its place is taken.

        Raises:
            InvalidUsage: the place is taken; names the process that has it.
        """
        rank = self._info.rank
        if self._ask(lambda: self._store.add(f"place/{rank}", 1)) != 1:
            other = self.card_of(rank)
            # The same process may call init() again after a failure.
            if (other.host, other.process) != (mine.host, mine.process):
                raise InvalidUsage(
                    f"rank {rank} (process {mine.process} on {mine.host}) has come to "
                    f"{self._where()}, where process {other.process} on {other.host} is rank "
                    f"{rank} already: another job uses that address and port, or this rank was "
                    "started twice. Give each job a MASTER_PORT of its own; a rank that has died "
                    "comes back only with all others"
                )
        self._ask(lambda: self._store.set(f"card/{rank}", mine.to_text()))

    def card_of(self, rank: int) -> Card:
        """Waits for a card.

        Raises:
            InvalidUsage: the content is not a card.
            TransferTimeout: the card does not arrive, or rank 0 is gone.
        """
        key = f"card/{rank}"
        while not self._comes(key):
            if time.monotonic() > self._deadline - _LOOK_S:
                raise TransferTimeout(
                    f"init(): rank {self._info.rank} waited {self._timeout.total_seconds():g} s "
                    f"for {self._missing()}, which did not arrive; look at their output"
                )
            if self._info.rank == 0:  # the others wait for the same ranks
                _log.warning("init(): rank 0 waits for %s", self._missing())
            passed_s = time.monotonic() - self._begin
            self._next_notice = self._begin + next(s for s in self._notices if s > passed_s)
        text = self._ask(lambda: self._store.get(key))
        try:
            return Card.from_text(text)
        except ValueError as error:
            raise InvalidUsage(
                f"rank {self._info.rank} found something at {self._where()} that no rank of this "
                f"version of hvd_order leaves, as the card of rank {rank} ({error}): another "
                "version of hvd_order runs there, or another program uses the port"
            ) from None

    def _comes(self, key: str) -> bool:
        """Waits for a key until it is time for a notice, or for the end; whether it is there."""
        until = min(self._next_notice, self._deadline)
        left_s = max(0.001, until - time.monotonic())
        try:
            within(
                left_s + answer_s(self._timeout),
                lambda: self._store.wait([key], timedelta(seconds=left_s)),
            )
        except TimeoutError as error:
            raise self._rank_0_silent() from error
        except RuntimeError as error:
            if time.monotonic() < until - 0.5:
                raise self._rank_0_gone(error) from error
            return False
        return True

    def has_read(self) -> None:
        """Records that this rank no longer needs the store to report an error."""
        self._ask(lambda: self._store.add("read", 1))

    def let_others_read(self) -> None:
        """Waits a moment until the other ranks have read the cards."""
        end = time.monotonic() + _OTHERS_MAY_READ_S
        while time.monotonic() < end and self._store.add("read", 0) < self._info.size - 1:
            time.sleep(_LOOK_S)

    def _ask(self, request: Callable[[], Answer]) -> Answer:
        try:
            return within(answer_s(self._timeout), request)
        except TimeoutError as error:
            raise self._rank_0_silent() from error
        except RuntimeError as error:
            raise self._rank_0_gone(error) from error

    def _where(self) -> str:
        return f"{self._info.master_addr}:{self._info.master_port}"

    def _rank_0_gone(self, error: Exception) -> TransferTimeout:
        return TransferTimeout(
            f"rank {self._info.rank} lost rank 0 at {self._where()} while waiting for the other "
            f"ranks ({first_line(error)}); the output of rank 0 says why"
        )

    def _rank_0_silent(self) -> TransferTimeout:
        return TransferTimeout(
            f"init(): rank {self._info.rank} got no answer from rank 0 at {self._where()}, where "
            "the ranks meet: its process is stopped, or its host cannot be reached any more"
        )

    def _missing(self) -> str:
        def absent() -> list[int]:
            ranks = range(self._info.size)
            return [rank for rank in ranks if not self._store.check([f"card/{rank}"])]

        return f"ranks {self._ask(absent)} of {self._info.size}"
