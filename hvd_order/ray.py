"""Training on a Ray cluster, with Horovod's names: ``from hvd_order.ray import RayExecutor``.

    executor = RayExecutor(RayExecutor.create_settings(), num_workers=8, use_gpu=True)
    executor.start()
    losses = executor.run(train, args=[config])     # train() calls hvd.init(), as everywhere
    executor.shutdown()

Each worker is an actor, so Ray decides where it runs. With ``min_workers`` the job is elastic: see
`RayExecutor.run`.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

try:
    import ray
except ImportError as error:
    raise ImportError("hvd_order.ray needs Ray; install it with: pip install ray") from error
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hvd_order.base.errors import HorovodInternalError, InvalidUsage

__all__ = ["RayExecutor", "Settings"]


def __getattr__(name: str) -> NoReturn:
    if name == "ElasticRayExecutor":  # whose arguments differ from RayExecutor's
        raise ImportError(
            "hvd_order.ray has no ElasticRayExecutor; RayExecutor(settings, min_workers=4, "
            "max_workers=8) is elastic, as in Horovod 0.28 (documentation: Deployment)"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_POLL_S = 0.2  # between two looks whether the cluster has room
_SETTLE_S = 5.0


@dataclass(frozen=True)
class Settings:
    """Limits of time of an executor.

    Attributes:
        timeout_s: for the workers' processes to start.
        placement_group_timeout_s: for Ray to find room for all workers.
    """

    timeout_s: float = 60.0
    placement_group_timeout_s: float = 100.0


class _RankActor:
    """A rank's process."""

    def __init__(self) -> None:
        self._executable: Any = None

    def place(self) -> tuple[str, list[str]]:
        """This process's node, and the GPUs that Ray has given it."""
        context = ray.get_runtime_context()
        return context.get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]

    def meeting_place(self) -> tuple[str, int]:
        """Address of this node, and a free port there, for rank 0."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return ray.util.get_node_ip_address(), listener.getsockname()[1]

    def set_environment(self, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)

    def make_executable(self, cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._executable = cls(*args, **kwargs)

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return function(*args, **kwargs)

    def execute(self, function: Callable[[Any], Any]) -> Any:
        return function(self._executable)

    def remove_folder(self, folder: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)


class RayExecutor:
    """Starts workers on a Ray cluster and runs functions on all of them.

    Args:
        settings: limits of time, see `create_settings`.
        num_workers: how many workers, wherever there is room.
        num_hosts: how many hosts, each with ``num_workers_per_host`` workers; instead of
            ``num_workers``.
        num_workers_per_host: with ``num_hosts``.
        cpus_per_worker: processor cores that Ray reserves for a worker.
        use_gpu: whether a worker gets GPUs.
        gpus_per_worker: how many; default 1 with ``use_gpu``.
        use_current_placement_group: whether workers take the placement group that this code runs
            in, if it does.
        min_workers, max_workers: makes the job elastic: it goes on with as many workers as the
            cluster has room for, within these limits. ``max_workers``: default ``min_workers``.
        reset_limit: how often an elastic job forms anew; None: as often as needed.
        elastic_timeout: seconds that an elastic job waits for room for ``min_workers``.

    Raises:
        InvalidUsage: no number of workers, or several.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600.0,
    ) -> None:
        if sum(number is not None for number in (num_workers, num_hosts, min_workers)) != 1:
            raise InvalidUsage(
                "say how many workers there are by one of num_workers, num_hosts (with "
                "num_workers_per_host) and min_workers (elastic)"
            )
        if max_workers is not None and (min_workers is None or max_workers < min_workers):
            raise InvalidUsage("max_workers needs min_workers, and is not less than it")
        if gpus_per_worker and not use_gpu:
            raise InvalidUsage("gpus_per_worker needs use_gpu=True")
        self._settings = settings or Settings()
        self._hosts = num_hosts
        self._workers_per_host = num_workers_per_host if num_hosts is not None else 1
        self._wanted = num_workers or (num_hosts or 0) * num_workers_per_host
        self._limits = None if min_workers is None else (min_workers, max_workers or min_workers)
        self._reset_limit = reset_limit
        self._elastic_timeout = elastic_timeout
        gpus = (gpus_per_worker or 1) if use_gpu else 0
        self._resources = {"CPU": cpus_per_worker, **({"GPU": gpus} if gpus else {})}
        self._current_group = use_current_placement_group
        self._group: Any = None
        self._own_group = False
        self._workers: list[Any] = []
        self._job = f"hvd_order_ray_{uuid.uuid4().hex[:12]}"
        self._start: tuple[Any, Sequence[Any], Mapping[str, Any], Mapping[str, str]] | None = None

    @classmethod
    def create_settings(
        cls, timeout_s: float = 60.0, placement_group_timeout_s: float = 100.0, **_: Any
    ) -> Settings:
        """Makes `Settings`; Horovod's other arguments (ssh, interfaces) have no purpose here."""
        return Settings(timeout_s, placement_group_timeout_s)

    def start(
        self,
        executable_cls: Any = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the workers.

        Args:
            executable_cls: class of which each worker makes an object, for `execute`.
            executable_args, executable_kwargs: its arguments.
            extra_env_vars: variables for the workers, such as ``HVD_ORDER_...``.

        Raises:
            HorovodInternalError: the cluster has no room for the workers, or they did not start.
            InvalidUsage: workers run already.
        """
        if self._workers:
            raise InvalidUsage("workers run already; call shutdown() first")
        self._start = (
            executable_cls, executable_args or (), executable_kwargs or {}, extra_env_vars or {}
        )  # fmt: skip
        self._form(self._size_by_room() if self._limits else self._wanted)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Calls a function on all workers and returns what it returned, by rank.

        In an elastic job, the loss of a worker ends the others, and the function is called again on
        the workers that the cluster then has room for. A function wrapped by ``hvd.elastic.run``
        goes on from its last commit.

        Args:
            callbacks: not used; accepted for Horovod's signature.

        Raises:
            Exception: what the function raised on the rank that failed first; all workers have
                ended then, and `start` starts new ones.
            HorovodInternalError: a worker died, in a job that is not elastic; or there is no room
                for ``min_workers``.
        """
        resets = 0
        while True:
            try:
                return self._results(self.run_remote(fn, args, kwargs))
            except (HorovodInternalError, RayActorError) as error:
                self._end_workers()
                if self._limits is None or (
                    self._reset_limit is not None and resets >= self._reset_limit
                ):
                    raise HorovodInternalError(f"a worker was lost: {error}") from error
            except Exception:
                self._end_workers()
                raise
            resets += 1
            self._form(self._size_by_room())

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a function on all workers; returns Ray's references to the results, by rank."""
        return [worker.run.remote(fn, args or (), kwargs or {}) for worker in self._running()]

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Any] | None = None
    ) -> list[Any]:
        """Calls a function with each worker's object of ``executable_cls``; results by rank."""
        return self._results([worker.execute.remote(fn) for worker in self._running()])

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """The same on rank 0 alone."""
        return ray.get(self._running()[0].execute.remote(fn))

    def shutdown(self) -> None:
        """Ends the workers and gives their room back."""
        folder = str(self._commits())
        for worker in self._workers if self._limits else ():
            try:
                ray.get(worker.remove_folder.remote(folder), timeout=self._settings.timeout_s)
            except (RayActorError, GetTimeoutError):
                continue
        self._end_workers()

    # ---- workers --------------------------------------------------------------------------------

    def _running(self) -> list[Any]:
        if not self._workers:
            raise InvalidUsage("no workers run; call start() first")
        return self._workers

    @staticmethod
    def _results(references: Sequence[Any]) -> list[Any]:
        """Waits for all results; raises the first failure without waiting for the others."""
        left = list(references)
        while left:
            (done, *_), left = ray.wait(left, num_returns=1)
            ray.get(done)
        return list(ray.get(list(references)))

    def _size_by_room(self) -> int:
        """How many workers an elastic job gets now; waits until there is room for the fewest."""
        assert self._limits is not None
        fewest, most = self._limits
        began = time.monotonic()
        while True:
            free = ray.available_resources()
            room = min(int(free.get(kind, 0) // each) for kind, each in self._resources.items())
            waited = time.monotonic() - began
            # What workers that have just ended had becomes free a moment later.
            if room >= most or (room >= fewest and waited > _SETTLE_S):
                return min(room, most)
            if waited > self._elastic_timeout:
                raise HorovodInternalError(
                    f"in {self._elastic_timeout:g} s the cluster has had no room for {fewest} "
                    f"workers with {self._resources} each; it has {free} left"
                )
            time.sleep(_POLL_S)

    def _form(self, size: int) -> None:
        """Starts workers and gives each its rank: ranks of a node follow each other."""
        assert self._start is not None
        executable, args, kwargs, variables = self._start
        self._reserve(size)
        actor = ray.remote(_RankActor)
        started = [
            actor.options(
                num_cpus=self._resources["CPU"],
                num_gpus=self._resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, i // self._workers_per_host if self._own_group else -1
                ),
            ).remote()
            for i in range(size)
        ]
        self._workers = started
        places = self._answers([worker.place.remote() for worker in started])
        nodes = list(dict.fromkeys(node for node, _ in places))
        order = sorted(range(size), key=lambda i: nodes.index(places[i][0]))
        self._workers = [started[i] for i in order]
        ((address, port),) = self._answers([self._workers[0].meeting_place.remote()])
        local = dict.fromkeys(nodes, 0)
        calls = []
        for rank, i in enumerate(order):
            node = places[i][0]
            here = [gpus for other, gpus in places if other == node]
            told = {
                "RANK": str(rank), "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(local[node]), "LOCAL_WORLD_SIZE": str(len(here)),
                "GROUP_RANK": str(nodes.index(node)), "GROUP_WORLD_SIZE": str(len(nodes)),
                "MASTER_ADDR": address, "MASTER_PORT": str(port),
            }  # fmt: skip
            if here[0]:  # all GPUs of the node's workers; cuda:LOCAL_RANK is this worker's first
                firsts, others = [gpus[:1] for gpus in here], [gpus[1:] for gpus in here]
                visible = [gpu for gpus in (*firsts, *others) for gpu in gpus]
                told["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
            if self._limits:
                told["TORCHELASTIC_RUN_ID"] = self._job  # commits are kept, and failures reported
                told["HVD_ORDER_ELASTIC_DIR"] = str(self._commits())
            local[node] += 1
            calls.append(self._workers[rank].set_environment.remote({**told, **variables}))
        self._answers(calls)
        if executable is not None:
            made = [w.make_executable.remote(executable, args, kwargs) for w in self._workers]
            try:
                self._results(made)  # without a limit of time: it is the user's code
            except Exception:
                self._end_workers()
                raise

    def _answers(self, references: Sequence[Any]) -> list[Any]:
        """What workers answer while they start."""
        try:
            return list(ray.get(list(references), timeout=self._settings.timeout_s))
        except (GetTimeoutError, RayActorError) as error:
            workers = len(self._workers)
            self._end_workers()
            raise HorovodInternalError(
                f"{workers} workers did not start in {self._settings.timeout_s:g} s "
                f"(create_settings(timeout_s=...)): {error}"
            ) from error

    def _commits(self) -> Path:
        return Path(tempfile.gettempdir()) / self._job

    def _reserve(self, size: int) -> None:
        """Takes the placement group of this code, or makes one."""
        current = ray.util.get_current_placement_group() if self._current_group else None
        if current is not None:
            self._group = current
            return
        bundle = {kind: each * self._workers_per_host for kind, each in self._resources.items()}
        bundles = [bundle] * (size // self._workers_per_host)
        self._group = placement_group(bundles, "PACK" if self._hosts is None else "STRICT_SPREAD")
        self._own_group = True
        try:
            ray.get(self._group.ready(), timeout=self._settings.placement_group_timeout_s)
        except GetTimeoutError as error:
            self._end_workers()
            raise HorovodInternalError(
                f"the cluster has no room for {len(bundles)} times {bundle}"
                f"{' on different hosts' if self._hosts is not None else ''} within "
                f"{self._settings.placement_group_timeout_s:g} s; it has "
                f"{ray.available_resources()} left"
            ) from error

    def _end_workers(self) -> None:
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []
        if self._own_group:
            remove_placement_group(self._group)
            self._own_group = False
        self._group = None
