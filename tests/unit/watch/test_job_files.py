"""Files by which tools find the jobs of a host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.watch.channel import job_files
from hvd_order.watch.channel.job_files import JobFile, announce, began_at, jobs_here, withdraw
from hvd_order.watch.channel.reader import find_job


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "hvd_order"
    monkeypatch.setattr(job_files, "_folders", lambda: [found])
    return found


def this_process(began: int | None = None) -> JobFile:
    process = os.getpid()
    at = began_at(process) if began is None else began
    return JobFile(process, at, "127.0.0.1:29500", "ab" * 32, 4, "train.py")


def test_a_job_is_found_until_it_is_withdrawn(folder: Path) -> None:
    assert jobs_here() == []
    assert announce(this_process())
    assert jobs_here() == [this_process()]
    assert (folder / f"{os.getpid()}.json").stat().st_mode & 0o777 == 0o600
    withdraw(os.getpid())
    assert list(folder.iterdir()) == []


def test_what_an_earlier_process_of_this_number_has_left_is_removed(folder: Path) -> None:
    announce(this_process(began=1))
    assert jobs_here() == []
    assert list(folder.iterdir()) == []


def test_a_folder_that_others_may_read_gets_no_key(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    assert not announce(this_process())
    assert list(folder.iterdir()) == []


def test_a_job_must_be_named_where_it_is_not_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HVD_ORDER_SECRET", "HVD_ORDER_SECRET_FILE"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(InvalidUsage, match="no job of this user has its rank 0 on"):
        find_job("")
    with pytest.raises(InvalidUsage, match="the key of the job at node9:29500 is not known here"):
        find_job("node9:29500")
    announce(this_process())
    with pytest.raises(InvalidUsage, match=f"no job 17 runs here.*\n  {os.getpid()}  127"):
        find_job("17")


def test_a_file_that_is_none_is_passed_over(folder: Path) -> None:
    announce(this_process())
    (folder / "1.json").write_text("[")
    assert jobs_here() == [this_process()]
