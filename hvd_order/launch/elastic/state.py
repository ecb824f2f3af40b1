"""The state that an elastic job must not lose, and how all ranks get the same one.

Classes and methods are those of Horovod 0.28.1 (horovod/common/elastic.py). In Horovod a state
survives in the memory of the remaining workers. Here all workers are restarted, so `commit` also
stores the state outside the process (commits.py), and `recover` restores it.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable
from typing import IO, Any

from hvd_order.base.config import Config
from hvd_order.base.errors import CommitLost, HostsUpdatedInterrupt
from hvd_order.launch.elastic.agent import restarts_workers
from hvd_order.launch.elastic.commits import Commit, CommitFolder

__all__ = ["ObjectState", "State"]

_REMOVED = 1  # Horovod's HostUpdateResult: 1 removed, 2 added, 3 both


class State:
    """Base class of all states: handles when to save; subclasses define what.

    Args:
        bcast_object: ``broadcast_object(obj, root_rank=0)`` of the framework.
        get_rank: returns this process's rank.
        allgather_object: of the framework; without it, only rank 0 can restore a commit and notice
            that the job is about to change.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any],
        get_rank: Callable[[], int],
        allgather_object: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._allgather_object = allgather_object
        # A deque, not a queue: a signal handler appends to it, and must not wait for a lock.
        self._host_messages: deque[tuple[float, int]] = deque()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = CommitFolder.of_this_process(Config.from_environment().elastic_dir)
        self._commit_number = 0

    # ---- methods of Horovod's State ----

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Registers functions to call when the job has formed anew, before `sync`.

        Use them for values that depend on the number of workers, for example the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Resets the state and runs the callbacks; called when the job has formed anew."""
        self._host_messages.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Records that the job is about to change; called from any thread or a signal handler.

        Args:
            timestamp: seconds since the epoch; messages older than the last one are ignored.
            update_res: 1 hosts were removed, 2 added, 3 both.
        """
        self._host_messages.append((timestamp, update_res))

    def commit(self) -> None:
        """Stores the current state: after any failure, training continues from here.

        All ranks must call it, in the same place. It copies the state, and one rank of each host
        writes it to memory outside the process, so call it every few dozen steps, not every step.

        Raises:
            HostsUpdatedInterrupt: the job is about to change; `run` handles it.
            CommitLost: the state could not be stored.
        """
        self.save()
        self.keep()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks if one of them was notified of a change.

        Cheaper than `commit`; all ranks must call it, in the same place, where the state is
        complete.
        """
        if not restarts_workers(os.environ):
            return  # no agent could have sent a message
        previous = newest = self._last_updated_timestamp
        update = 0
        while self._host_messages:
            timestamp, result = self._host_messages.popleft()
            if timestamp > newest:
                newest = timestamp
                update |= result
        told = self._from_all((previous, newest, update))
        previous = min(before for before, _, _ in told)
        self._last_updated_timestamp = max(after for _, after, _ in told)
        if self._last_updated_timestamp > previous:
            updates = {result for _, _, result in told} - {0}
            raise HostsUpdatedInterrupt(skip_sync=updates == {_REMOVED})

    def save(self) -> None:
        """Copies the state, in this process.

        All ranks must call it, in the same place, if the state differs between ranks
        (`hvd_order.torch.elastic.SamplerStateHandler`).
        """
        raise NotImplementedError

    def restore(self) -> None:
        """Reverts the state to the last `save`."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives all ranks the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts to another number of ranks, before `sync`."""

    # ---- storage outside the process ----

    def saved(self) -> Any:
        """Returns the copy that `save` made, for `dump`."""
        raise NotImplementedError

    def set_saved(self, saved: Any) -> None:
        """Inverse of `saved`; a later `restore` applies the copy."""
        raise NotImplementedError

    def dump(self, saved: Any, file: IO[bytes]) -> None:
        """Writes the result of `saved`."""
        pickle.dump(saved, file, protocol=pickle.HIGHEST_PROTOCOL)

    def load(self, file: IO[bytes]) -> Any:
        """Inverse of `dump`."""
        return pickle.load(file)

    def keep(self) -> None:
        """Stores the copy of `save` outside this process; one rank of each host writes it."""
        self._commit_number += 1
        if self._commits is None:
            return
        if self._rank() == 0 or os.environ.get("LOCAL_RANK") == "0":
            self._commits.write(self._commit_number, lambda file: self.dump(self.saved(), file))

    def recover(self) -> int:
        """Restores the newest commit that any rank can find; `sync` sends it to the other ranks.

        All ranks must call it.

        Returns:
            The commit's number; 0: there is none, so training starts at the beginning.

        Raises:
            CommitLost: the newest commit cannot be read, or others could write where commits are;
                raised on every rank.
        """
        own, error = None, ""
        try:
            own = self._commits.newest() if self._commits is not None else None
        except CommitLost as lost:
            error = str(lost)
        found = self._from_all((0 if own is None else own.number, error))
        for one, (_, text) in enumerate(found):
            if text:
                raise CommitLost(f"rank {one}: {text}")
        numbers = [number for number, _ in found]
        newest: int = max(numbers)
        if newest == 0:
            return 0
        root = numbers.index(newest)
        saved, error = None, ""
        if self._rank() == root and own is not None:
            saved, error = self._read(own)
        # sync() is about to send rank 0's state to all ranks, so only the outcome is sent now.
        message = (None if root == 0 else saved, error)
        message = self._bcast_object(message, root_rank=root)
        if message[1]:
            raise CommitLost(f"rank {root}: {message[1]}")
        if self._rank() != root:
            saved = message[0]
        if saved is not None:
            self.set_saved(saved)
            self.restore()
        self._commit_number = newest
        return newest

    def _read(self, commit: Commit) -> tuple[Any, str]:
        assert self._commits is not None
        try:
            return self._commits.read(commit, self.load), ""
        except CommitLost as error:
            return None, str(error)

    def _from_all(self, value: Any) -> list[Any]:
        """Returns every rank's value, or only rank 0's without an allgather function."""
        if self._allgather_object is not None:
            return self._allgather_object(value)
        return [self._bcast_object(value)]


class ObjectState(State):
    """State of plain Python objects, each an attribute.

    Args:
        bcast_object: see `State`.
        get_rank: see `State`.
        allgather_object: see `State`.
        kwargs: name and first value of each attribute; values must be picklable.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any],
        get_rank: Callable[[], int],
        allgather_object: Callable[[Any], list[Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank, allgather_object)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        """See `State`. Values are kept by reference, as in Horovod: replace them, or copy."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """See `State`."""
        self._set_attrs()

    def sync(self) -> None:
        """See `State`."""
        # Even without objects: those of a commit are only on the rank that has found it.
        self._saved_state = self._bcast_object(self._saved_state)
        self._set_attrs()

    def saved(self) -> Any:
        """See `State`."""
        return self._saved_state

    def set_saved(self, saved: Any) -> None:
        """See `State`. Attributes that the script has added since the commit keep their value."""
        self._saved_state = {**self._saved_state, **saved}

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)
