"""What Ray's workers are told, with a cluster that is nothing but a list of places."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from hvd_order.compat.horovod import finder

Places = Sequence[tuple[str, list[str]]]
"""Node and GPUs of each worker, as Ray gives them."""


class Actor:
    """A worker that does at once what it is asked, in an environment of its own."""

    def __init__(self, ray: FakeRay, cls: type) -> None:
        self._ray = ray
        self._place = ray.places[len(ray.actors)]
        self._object = cls()
        self.environment: dict[str, str] = {}
        ray.actors.append(self)

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self._ray.running_at = self._place
            with patch.dict(os.environ, self.environment, clear=True):
                answer = getattr(self._object, name)(*arguments)
                self.environment = dict(os.environ)
            return answer

        return SimpleNamespace(remote=remote)


class FakeRay(ModuleType):
    """The part of Ray that starts workers."""

    def __init__(self, places: Places) -> None:
        super().__init__("ray")
        self.places = places
        self.running_at = places[0]
        self.actors: list[Actor] = []
        self.util = SimpleNamespace(
            get_node_ip_address=lambda: "10.0.0.1", get_current_placement_group=lambda: None
        )

    def remote(self, cls: type) -> Any:
        made = SimpleNamespace(remote=lambda: Actor(self, cls))
        return SimpleNamespace(options=lambda **_: made)

    def get(self, references: Any, timeout: float | None = None) -> Any:
        return references

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: self.running_at[0])

    def get_gpu_ids(self) -> list[str]:
        return self.running_at[1]

    def kill(self, actor: Actor) -> None:
        self.actors.remove(actor)


@pytest.fixture
def ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    fake = FakeRay(request.param)
    parts: Mapping[str, dict[str, Any]] = {
        "ray.exceptions": {"GetTimeoutError": TimeoutError, "RayActorError": RuntimeError},
        "ray.util": {},
        "ray.util.placement_group": {
            "placement_group": lambda *_: SimpleNamespace(ready=lambda: None),
            "remove_placement_group": lambda _: None,
        },
        "ray.util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": lambda *_: None},
    }
    monkeypatch.setitem(sys.modules, "ray", fake)
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "hvd_order.ray", raising=False)
    yield fake
    sys.modules.pop("hvd_order.ray", None)  # it has the fake


@pytest.mark.parametrize(
    "ray",
    [[("a", ["0", "1"]), ("b", ["4", "5"]), ("a", ["2", "3"]), ("b", ["6", "7"])]],
    indirect=True,
)
def test_each_rank_has_its_own_gpus_first(ray: FakeRay) -> None:
    from hvd_order.ray import RayExecutor

    executor = RayExecutor(num_workers=4, use_gpu=True, gpus_per_worker=2)
    executor.start()
    told = sorted((actor.environment for actor in ray.actors), key=lambda each: int(each["RANK"]))
    assert [(one["GROUP_RANK"], one["LOCAL_RANK"]) for one in told] == [
        ("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")
    ]  # fmt: skip
    # A rank takes cuda:LOCAL_RANK; all devices of its node's ranks are visible, for NCCL.
    first = [one["CUDA_VISIBLE_DEVICES"].split(",")[int(one["LOCAL_RANK"])] for one in told]
    assert first == ["0", "2", "4", "6"]
    assert [sorted(one["CUDA_VISIBLE_DEVICES"].split(",")) for one in told] == [
        *2 * [["0", "1", "2", "3"]], *2 * [["4", "5", "6", "7"]]
    ]  # fmt: skip
    executor.shutdown()
    assert ray.actors == []


@pytest.mark.parametrize("ray", [[("a", [])]], indirect=True)
def test_the_alias_finds_it_and_says_what_stands_for_the_elastic_one(ray: FakeRay) -> None:
    finder.install()
    try:
        import hvd_order.ray

        found = importlib.import_module("horovod.ray")
        assert found.RayExecutor is hvd_order.ray.RayExecutor
        with pytest.raises(ImportError, match="min_workers=4, max_workers=8"):
            exec("from horovod.ray import ElasticRayExecutor")
        assert not hasattr(found, "no_such_name")
    finally:
        finder.uninstall()
