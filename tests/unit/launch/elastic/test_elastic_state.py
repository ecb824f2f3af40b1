"""Commits, states and the loop around training, without processes."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import RankPool

import hvd_order.torch as hvd
from hvd_order.base.errors import CommitLost, HorovodInternalError, HostsUpdatedInterrupt
from hvd_order.launch.elastic.agent import agent_folders, sweep
from hvd_order.launch.elastic.commits import CommitFolder
from hvd_order.launch.elastic.run import run_fn
from hvd_order.launch.elastic.state import ObjectState


def put(folder: CommitFolder, number: int, content: Any = None) -> None:
    folder.write(number, lambda file: pickle.dump(content, file))


def alone(**objects: Any) -> ObjectState:
    """The state of a job of one process."""
    return ObjectState(lambda obj, root_rank=0: obj, lambda: 0, lambda obj: [obj], **objects)


# ---- commits ----


def test_the_newest_whole_commit_is_found(tmp_path: Path) -> None:
    folder = CommitFolder([tmp_path / "a"], durable=True)
    assert folder.newest() is None
    put(folder, 1, "one")
    put(folder, 2, "two")
    newest = folder.newest()
    assert newest is not None
    assert (newest.number, folder.read(newest, pickle.load)) == (2, "two")
    assert len(list((tmp_path / "a").iterdir())) == 1, "the one before is not kept"
    # Another host's, and one that was cut short by a crash.
    os.rename(newest.path, tmp_path / "a" / "other.commit")
    put(folder, 1, "old")
    whole = (tmp_path / "a" / "other.commit").read_bytes()
    (tmp_path / "a" / "cut.commit").write_bytes(whole.replace(b"commit 2\n", b"commit 3\n")[:-4])
    newest = folder.newest()
    assert newest is not None
    assert newest.number == 2


def test_a_killed_writer_leaves_the_commit_before(tmp_path: Path) -> None:
    put(CommitFolder([tmp_path], durable=True), 1, "one")
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from hvd_order.launch.elastic.commits import CommitFolder\n"
        "def dump(file):\n"
        "    file.write(b'x' * 10**6); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "CommitFolder([Path(sys.argv[1])], durable=True).write(2, dump)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60)
    assert done.returncode == -9
    newest = CommitFolder([tmp_path], durable=True).newest()
    assert newest is not None
    assert newest.number == 1


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_where_there_is_no_room_the_next_folder_is_used(tmp_path: Path, reason: int) -> None:
    def full(file: Any) -> None:
        raise OSError(reason, os.strerror(reason))

    folder = CommitFolder([tmp_path / "memory", tmp_path / "disk"], durable=True)
    put(folder, 1, "one")
    rooms = iter([full, lambda file: pickle.dump("two", file)])
    folder.write(2, lambda file: next(rooms)(file))
    assert list((tmp_path / "memory").iterdir()) == []
    newest = folder.newest()
    assert newest is not None
    assert newest.path.parent == tmp_path / "disk"
    with pytest.raises(CommitLost, match=r"commit 3 does not fit .* HVD_ORDER_ELASTIC_DIR"):
        folder.write(3, full)
    assert folder.newest() == newest, "a commit that failed takes nothing away"


FULL_MEMORY = """
import subprocess, sys
from pathlib import Path
import torch
import hvd_order.torch as hvd
from hvd_order.launch.elastic.commits import CommitFolder
memory, disk = Path(sys.argv[1], "memory"), Path(sys.argv[1], "disk")
memory.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", memory], check=True)
folder = CommitFolder([memory, disk], durable=True)
state = {"w": torch.ones(1_000_000)}
folder.write(1, lambda file: hvd.elastic.TorchState.dump(None, state, file))
newest = folder.newest()
assert newest.path.parent == disk, newest
found = folder.read(newest, lambda file: hvd.elastic.TorchState.load(None, file))
assert torch.equal(found["w"], state["w"])
assert list(memory.iterdir()) == []
"""


def test_state_of_torch_that_memory_has_no_room_for_goes_to_the_disk(tmp_path: Path) -> None:
    private = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run(
        [*private, "mount", "-t", "tmpfs", "tmpfs", tmp_path], check=False
    ).returncode:
        pytest.skip("this machine lets nobody mount a file system of his own")
    done = subprocess.run(
        [*private, sys.executable, "-c", FULL_MEMORY, tmp_path],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_others_could_have_written_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CommitFolder([tmp_path], durable=True)
    put(folder, 9, "theirs")
    (own,) = tmp_path.iterdir()
    forged = own.rename(tmp_path / "forged.commit")
    put(folder, 1, "ours")
    newest = folder.newest()
    assert newest is not None
    assert newest.number == 9, "it is ours so far"
    forged.chmod(0o622)
    found = folder.newest()
    assert found is not None
    assert found.number == 1
    assert "could have been written by somebody else" in caplog.text
    with pytest.raises(CommitLost, match="could have been written by somebody else"):
        folder.read(newest, pickle.load)
    forged.chmod(0o600)
    elsewhere = forged.rename(tmp_path / "elsewhere")
    forged.symlink_to(elsewhere)
    assert folder.newest() == found, "a link leads to what others choose"
    if os.getuid() == 0:  # only root may give a file away
        forged.unlink()
        elsewhere.rename(forged)
        os.chown(forged, 1234, -1)
        assert folder.newest() == found


def test_somebody_elses_folder_is_not_trusted(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    put(CommitFolder([theirs], durable=True), 5)
    theirs.chmod(0o777)
    ours = CommitFolder([theirs], durable=False)
    assert ours.newest() is None
    with pytest.raises(CommitLost, match="belongs to somebody else"):
        put(ours, 6)


def test_the_users_directory_is_one_where_nobody_else_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read, nothing written, and training does not start at the beginning."""
    directory = tmp_path / "commits"
    put(CommitFolder([directory], durable=True), 5)
    directory.chmod(0o755)  # others may read it: it may be on a shared disk
    put(CommitFolder([directory], durable=True), 6)

    def check(named: Path, reason: str) -> None:
        monkeypatch.setenv("HVD_ORDER_ELASTIC_DIR", str(named))
        folder = CommitFolder([named], durable=True)
        with pytest.raises(CommitLost, match=reason):
            folder.newest()
        with pytest.raises(CommitLost, match=reason):
            put(folder, 7)
        with pytest.raises(CommitLost, match=f"rank 0: commits cannot be kept .* {reason}"):
            run_fn(lambda s: s.step, lambda: None)(alone(step=0))

    directory.chmod(0o2775)  # as a volume of Kubernetes: of the pod's own group
    put(CommitFolder([directory], durable=True), 6)
    for mode in (0o757, 0o1777):
        directory.chmod(mode)
        check(directory, "chmod go-w")
    directory.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(directory)
    check(link, "it is a link")
    (tmp_path / "file").touch()
    check(tmp_path / "file", "it is no directory")
    if os.getuid() == 0:  # only root may give a folder away
        os.chown(directory, 1234, -1)
        check(directory, "it belongs to user 1234")
        os.chown(directory, 0, 4321)
        directory.chmod(0o775)
        check(directory, "chmod go-w")
        os.chown(directory, 0, 0)
        directory.chmod(0o700)
    newest = CommitFolder([directory], durable=True).newest()
    assert newest is not None
    assert newest.number == 6


def test_a_new_directory_is_the_users_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        folder = CommitFolder([tmp_path / "new" / "commits"], durable=True)
        put(folder, 1)
        assert folder.newest() is not None
    finally:
        os.umask(before)


def test_folders_of_agents_that_have_ended_are_removed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine, theirs = agent_folders(os.getpid()), agent_folders(child.pid)
    try:
        for folder in (*mine, *theirs):
            folder.mkdir(mode=0o700)
        sweep()
        assert all(folder.is_dir() for folder in (*mine, *theirs))
        child.communicate()
        sweep()
        assert all(folder.is_dir() for folder in mine)
        assert not any(folder.exists() for folder in theirs)
    finally:
        child.kill()
        child.wait()
        for folder in mine:
            folder.rmdir()


# ---- state and loop ----


def test_attributes_are_committed_and_restored() -> None:
    state = alone(epoch=1, batch=0)
    state.epoch = 2
    state.commit()
    state.epoch, state.batch = 3, 9
    state.restore()
    assert (state.epoch, state.batch) == (2, 0)


def test_a_job_goes_on_from_the_users_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_ORDER_ELASTIC_DIR", str(tmp_path))
    calls: list[str] = []
    state = alone(step=0)
    assert run_fn(lambda s: s.step, lambda: None)(state) == 0
    state.step = 7
    state.commit()
    again = alone(step=0, added=5)
    again.register_reset_callbacks([lambda: calls.append(f"reset at {again.step}")])
    assert run_fn(lambda s: (s.step, s.added), lambda: None)(again) == (7, 5)
    assert calls == ["reset at 7"]
    again.step = 8
    again.commit()
    newest = CommitFolder([tmp_path], durable=True).newest()
    assert newest is not None
    assert newest.number == 2, "numbers go on"


def test_an_unreadable_commit_is_an_error_not_a_new_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_ORDER_ELASTIC_DIR", str(tmp_path))
    CommitFolder([tmp_path], durable=True).write(4, lambda file: file.write(b"no pickle"))
    with pytest.raises(CommitLost, match=r"rank 0: commit 4 in .* cannot be read: UnpicklingError"):
        run_fn(lambda s: s.step, lambda: None)(alone(step=0))


def test_without_an_agent_the_loop_is_horovods() -> None:
    state = alone(step=0)
    happened: list[str] = []

    def train(s: ObjectState) -> int:
        happened.append(f"train {s.step}")
        if len(happened) == 1:
            s.step = 5
            s.commit()
            s.step = 6
            raise HorovodInternalError("a peer is gone")
        if s.step < 9:
            s.step = 9
            raise HostsUpdatedInterrupt(skip_sync=True)
        return int(s.step)

    state.register_reset_callbacks([lambda: happened.append("callback")])
    assert run_fn(train, lambda: happened.append("reset"))(state) == 9
    assert happened == [
        "train 0", "reset", "callback", "train 5", "reset", "callback", "train 9"
    ]  # fmt: skip


def test_a_change_is_raised_once_by_all_ranks_if_one_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    others: list[Any] = [(0.0, 0.0, 0)]
    state = ObjectState(lambda o, root_rank=0: o, lambda: 0, lambda o: [o, *others], step=0)
    state.check_host_updates()
    state.on_hosts_updated(1.0, 1)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync
    others[0] = (1.0, 1.0, 0)
    state.check_host_updates()
    others[0] = (1.0, 2.0, 2)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert not caught.value.skip_sync


# ---- the shim, on ranks ----


def torch_state() -> list[Any]:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=hvd.rank())
    state.sync()
    weights = [float(w) for w in hvd.allgather(model.weight.detach()[:, 0])]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state.epoch = 7
    state.restore()
    found = [weights, float(model.weight[0, 0]) == weights[0], len(optimizer.state), state.epoch]
    state.model = torch.nn.Linear(2, 1)  # in place of the first, which a commit holds
    before = state.model.weight.detach().clone()
    torch.nn.init.zeros_(state.model.weight)
    state.restore()
    return [*found, torch.equal(state.model.weight, before)]


def test_torch_state_syncs_and_restores(two_ranks: RankPool) -> None:
    for weights, restored, states, epoch, other_restored in two_ranks.run(torch_state):
        assert weights[0] == weights[1]
        assert (restored, states, epoch) == (True, 0, 0)
        assert other_restored


def missing_commit_of_rank_0(folder: str) -> list[int]:
    os.environ["HVD_ORDER_ELASTIC_DIR"] = f"{folder}/{hvd.rank()}"
    try:
        model = torch.nn.Linear(2, 1)
        state = hvd.elastic.TorchState(model=model, step=0)
        numbers = [state.recover()]
        with torch.no_grad():
            model.weight.fill_(3.0)
        state.step = 5
        if hvd.rank() == 1:
            os.environ["LOCAL_RANK"] = "0"  # first of its host, so it stores as well
            state.save()
            state.keep()
        other = torch.nn.Linear(2, 1)
        state = hvd.elastic.TorchState(model=other, step=0)
        return [*numbers, state.recover(), state.step, int(other.weight.sum())]
    finally:
        del os.environ["HVD_ORDER_ELASTIC_DIR"]
        os.environ["LOCAL_RANK"] = str(hvd.rank())


def test_a_commit_that_only_another_rank_has_reaches_all(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    assert two_ranks.run(missing_commit_of_rank_0, str(tmp_path)) == [[0, 1, 5, 6]] * 2


def handlers() -> list[str]:
    state = hvd.elastic.state
    first = [kind.__name__ for kind, _ in state.get_handler_registry()]

    class Counter:
        count = 0

    class CounterHandler(state.StateHandler):
        def save(self) -> None:
            self.saved = self.value.count

        def restore(self) -> None:
            self.value.count = self.saved

        def sync(self) -> None:
            self.value.count = hvd.broadcast_object(self.value.count)

    before = state.get_handler_registry()
    state.set_handler_registry([(Counter, CounterHandler), *before])
    try:
        mine = state.TorchState(counter=Counter())
        mine.counter.count = 3
        mine.save()
        saved = mine.saved()
        mine.counter.count = 4
        mine.set_saved(saved)
        mine.restore()
    finally:
        state.set_handler_registry(before)
    return [*first, str(mine.counter.count)]


def test_users_can_add_handlers(one_rank: RankPool) -> None:
    assert one_rank.run(handlers) == [["Module", "Optimizer", "ElasticSampler", "3"]]
