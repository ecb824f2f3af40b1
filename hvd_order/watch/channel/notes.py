"""What ranks and tools leave in the store of a job. Pure::

    hvd_order/watch/newest          name of the newest job that has begun in this store
    hvd_order/watch/NAME/job        its ranks (`JobNote`); from rank 0
    hvd_order/watch/NAME/report     the newest reports (`ReportNote`); from rank 0
    hvd_order/watch/NAME/questions  number of questions so far
    hvd_order/watch/NAME/question/3 a tool asks where ranks are
    hvd_order/watch/NAME/answer/3/1 where rank 1 is (`PlaceNote`)

All but the name and the number are signed with the job's key, over the key in the store: whoever
reaches the store may write there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from hvd_order.base.account.step_stats import StepStats
from hvd_order.base.errors import NotTrusted
from hvd_order.engine.account.reports import StepReport
from hvd_order.servers.access.signed_records import read_record, signed_record

__all__ = ["NEWEST", "JobNote", "Names", "PlaceNote", "ReportNote", "opened", "signed"]

_PREFIX = "hvd_order/watch"
NEWEST = f"{_PREFIX}/newest"


class Names:
    """The keys of one job in its store."""

    def __init__(self, name: str) -> None:
        """Takes the name that `NEWEST` has."""
        begin = f"{_PREFIX}/{name}"
        self.job = f"{begin}/job"
        self.report = f"{begin}/report"
        self.questions = f"{begin}/questions"
        self._begin = begin

    def question(self, number: int) -> str:
        """Returns the key of a question."""
        return f"{self._begin}/question/{number}"

    def answer(self, number: int, rank: int) -> str:
        """Returns the key of a rank's answer to a question."""
        return f"{self._begin}/answer/{number}/{rank}"


def signed(key: bytes, name: str, content: Mapping[str, Any]) -> str:
    """Returns a record for the store."""
    return signed_record(key, name, content)


def opened(key: bytes, name: str, record: bytes) -> dict[str, Any]:
    """Returns the content of a record.

    Raises:
        NotTrusted: it was not signed with the key, for this place in the store.
    """
    return read_record(key, name, record)


@dataclass(frozen=True)
class JobNote:
    """The ranks of a job.

    Attributes:
        began: seconds since 1970, on rank 0's clock.
        hosts, processes: of each rank: host name and process id.
    """

    began: float
    hosts: Sequence[str]
    processes: Sequence[int]

    def content(self) -> dict[str, Any]:
        """Returns what `of` reads."""
        return asdict(self)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> JobNote:
        """Reads a note; NotTrusted, if it has another form."""
        note: JobNote = _read(cls, content)
        return note


@dataclass(frozen=True)
class ReportNote:
    """The newest reports of a job's optimizers.

    Attributes:
        at: when the newest came; seconds since 1970, on rank 0's clock.
        ranks: of each optimizer, ranks in the job by place.
        stats: of each optimizer, the account of each of these ranks.
    """

    at: float
    ranks: Mapping[str, Sequence[int]]
    stats: Mapping[str, Sequence[StepStats]]

    @classmethod
    def from_reports(cls, at: float, reports: Mapping[str, StepReport]) -> ReportNote:
        """Makes a note of the newest report of each optimizer."""
        return cls(
            at,
            {key: list(report.ranks) for key, report in reports.items()},
            {key: list(report.everyone) for key, report in reports.items()},
        )

    def content(self) -> dict[str, Any]:
        """Returns what `of` reads."""
        return asdict(self)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> ReportNote:
        """Reads a note; NotTrusted, if it has another form."""
        note = _read(cls, content)
        try:
            stats = {key: [StepStats(**each) for each in some] for key, some in note.stats.items()}
        except (TypeError, AttributeError) as error:
            raise NotTrusted(f"a report of another version of hvd_order: {error}") from None
        return cls(note.at, note.ranks, stats)


@dataclass(frozen=True)
class PlaceNote:
    """Where a rank is.

    Attributes:
        at: the innermost frame of the main thread that is in the program's own files.
        waits: what it waits in, as hvd_order knows; empty: nothing.
        stacks: of its Python threads, the main thread first; each from the outermost frame on.
    """

    at: str
    waits: str
    stacks: Mapping[str, Sequence[str]]

    def content(self) -> dict[str, Any]:
        """Returns what `of` reads."""
        return asdict(self)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> PlaceNote:
        """Reads a note; NotTrusted, if it has another form."""
        note: PlaceNote = _read(cls, content)
        return note


def _read(kind: Any, content: Mapping[str, Any]) -> Any:
    names = [field.name for field in fields(kind)]
    if sorted(content) != sorted(names):
        raise NotTrusted(
            f"a record of another version of hvd_order: it has {sorted(content)}, not {names}"
        )
    return kind(**content)
