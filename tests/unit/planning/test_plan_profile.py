"""Profiles survive their file, and a file that is none says where it is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.busy_union import LinkUse
from hvd_order.base.link.link_model import LinkModel
from hvd_order.planning.files.profile import MeasuredLink, Profile, Timing, read_profile
from hvd_order.planning.graph.graph import GraphOp, GraphParameter
from hvd_order.servers.costs import Cost, ServerCosts, StrategySteps

ROOT = Path(__file__).parents[3]


def example() -> Profile:
    return Profile(
        model="tiny",
        machine={"host": "a", "processor": "two cores", "torch": "2.13.0"},
        parameters=(GraphParameter("fc.weight", 4096), GraphParameter("fc.bias", 64)),
        ops=(
            GraphOp("fc", 0.0, reads=("fc.weight", "fc.bias")),
            GraphOp("fc.grad", 0.0, ("fc",), produces=("fc.weight", "fc.bias"), phase="backward"),
            GraphOp("copy", 0.0, resource="copy engine", phase="update"),
        ),
        timings={
            "fc": Timing.of([1e-3, 1.2e-3, 1.1e-3, 5e-3, 1.3e-3]),
            "fc.grad": Timing.of([0.1 + 0.2] * 5),  # a number that needs all its digits
            "copy": Timing.of([0] * 7),
        },
        link=MeasuredLink(LinkModel(5e-4, 3e-4, 8.7e-9), ranks=2, backend="gloo"),
    )


def with_servers() -> Profile:
    costs = ServerCosts(
        servers=2,
        workers=3,
        mode="async",
        updates="server",
        push=LinkUse(10, 4_160_000, 0.01, 4.16e8, at_least=True),
        answer=LinkUse(10, 41_600, 0.001, None, at_least=False),
        update=Cost(1e-5, 4e-10, apart=True),
        server_end=Cost(0.0, 0.0, apart=True),
        worker_end=Cost(0.0, 2e-10, apart=False),
        step_s=(0.021, 0.02, 0.022),
    )
    return replace(example(), servers=costs)


def of_strategy() -> Profile:
    profile = with_servers()
    assert profile.servers is not None
    steps = StrategySteps(((1, 0), (0, 1)), 2e-3)
    return replace(profile, servers=replace(profile.servers, strategy=steps))


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    empty = Profile("empty", {}, (), (), {}, clock="cuda_event")
    for profile in (example(), empty, with_servers(), of_strategy()):
        profile.write(path)
        assert read_profile(path) == profile
    assert list(tmp_path.iterdir()) == [path]


def test_runs_are_summed_up() -> None:
    seconds = (5.0, 1.0, 2.0, 3.0, 100.0)
    timing = Timing.of(seconds)
    assert timing == Timing(5, minimum_s=1.0, median_s=3.0, spread_s=3.0, seconds=seconds)
    for few in ([], [1.0] * 4):
        with pytest.raises(InvalidUsage, match="at least 5"):
            Timing.of(few)


def test_orders_take_the_minimum_and_predictions_the_median() -> None:
    profile = example()
    assert [op.duration_s for op in profile.graph().ops] == [1e-3, 0.1 + 0.2, 0.0]
    assert [op.duration_s for op in profile.graph("median").ops] == [1.2e-3, 0.1 + 0.2, 0.0]


def test_ops_and_timings_belong_together() -> None:
    timing = Timing.of([1.0] * 5)
    with pytest.raises(InvalidUsage, match="'a'"):
        Profile("m", {}, (), (GraphOp("a", 0.0),), {})
    with pytest.raises(InvalidUsage, match="'b'"):
        Profile("m", {}, (), (GraphOp("a", 0.0),), {"a": timing, "b": timing})


def changed(document: Any, path: list[Any], value: Any) -> str:
    at = document
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], "other", "no profile"),
        (["version"], 1, "version 1 of the format, this hvd_order reads 2 to 4"),
        (["model"], None, 'the profile lacks "model"'),
        (["colour"], "red", 'unknown fields: "colour"'),
        (["clock"], "sundial", "\"clock\": 'sundial'; expected one of wall, cuda_event"),
        (["machine", "cores"], 2, "'cores': 2; expected text"),
        (["link", "ranks"], 0, "0 ranks"),
        (["link", "seconds_per_byte"], -1.0, "times not negative"),
        (["link", "latency_s"], "fast", "\"latency_s\": 'fast'; expected a number"),
        (["parameters", 0, "size_bytes"], 1.5, "parameter 0 ('fc.weight')"),
        (["parameters", 1], 7, "parameter 1 is 7; expected an object"),
        (["ops", 0, "runs"], 4, "op 0 ('fc'): 4 runs; at least 5"),
        (["ops", 0, "runs"], True, "op 0 ('fc') has \"runs\": True; expected a whole number"),
        (["ops", 0, "minimum_s"], 9.0, "op 0 ('fc'): minimum 9.0 s"),
        (["ops", 1, "median_s"], None, "op 1 ('fc.grad') lacks \"median_s\""),
        (["ops", 1, "inputs"], ["nothing"], "the op 'fc.grad' needs the op 'nothing'"),
        (["ops", 1, "reads"], [3], "op 1 ('fc.grad') has \"reads\": [3]; expected names"),
        (["ops", 2, "phase"], "sideways", "expected one of forward, backward, update"),
        (["ops", 2, "name"], "fc", "the op 'fc' is listed 2 times"),
        (["servers"], 7, '"servers": 7; expected an object'),
        (["servers", "servers"], 0, "0 servers and 3 workers; expected 1 or more"),
        (["servers", "mode"], "late", "'late'; expected one of sync, async"),
        (["servers", "colour"], "red", '"servers" has unknown fields: "colour"'),
        (["servers", "push", "bytes_per_s"], 0, '"bytes_per_s": 0 in 0.01 s; expected more than 0'),
        (["servers", "push", "at_least"], 1, '"at_least": 1; expected true or false'),
        (["servers", "answer", "busy_s"], None, '"answer" of "servers" lacks "busy_s"'),
        (["servers", "answer", "transfers"], -1, "-1 transfers"),
        (["servers", "update", "seconds"], -1.0, '"update" of "servers" has -1.0 s'),
        (["servers", "worker_end"], None, '"servers" lacks "worker_end"'),
        (["servers", "step_s"], [0.1, "soon"], '"step_s" of "servers" has [0.1, \'soon\']'),
        (["servers", "step_s"], [-0.1], "expected times in seconds"),
        (["servers", "strategy", "between_s"], -1.0, "-1.0 s; expected a time, not negative"),
        (
            ["servers", "strategy", "fetch_orders"],
            [["fc.bias", "fc.weight"]],
            "not all numbers of parameters",
        ),
        (
            ["servers", "strategy", "fetch_orders"],
            [[0, 1], [0]],
            "an order of 1 fetches; expected each of the numbers 0",
        ),
        (
            ["servers", "strategy", "fetch_orders"],
            [[1, 1]],
            "an order of 2 fetches; expected each of the numbers 0 to 1",
        ),
        (["servers", "strategy", "colour"], "red", 'unknown fields: "colour"'),
    ],
)
def test_mistakes_in_a_file_are_named(
    tmp_path: Path, path: list[Any], value: Any, message: str
) -> None:
    file = tmp_path / "broken.json"
    of_strategy().write(file)
    file.write_text(changed(json.loads(file.read_text()), path, value))
    with pytest.raises(InvalidUsage) as raised:
        read_profile(file)
    assert message in str(raised.value)
    assert str(file) in str(raised.value)


def test_a_profile_without_servers_is_a_file_for_older_versions_too(tmp_path: Path) -> None:
    for profile, version in ((example(), 2), (with_servers(), 4), (of_strategy(), 4)):
        profile.write(tmp_path / "p.json")
        written = json.loads((tmp_path / "p.json").read_text())
        assert written["version"] == version
        assert ("servers" in written) == (version == 4)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"format": "hvd_order profile"}'])
def test_other_files_are_no_profiles(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(InvalidUsage, match=r"other\.json"):
        read_profile(file)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    example().write(path)
    before = path.read_bytes()
    broken = example()
    object.__setattr__(broken, "machine", {"host": object()})
    with pytest.raises(TypeError):
        broken.write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_example_in_the_document_is_a_profile(tmp_path: Path) -> None:
    document = (ROOT / "docs/guides/planning.md").read_text("utf-8")
    file = tmp_path / "example.json"
    file.write_text(document.split("```json\n")[1].split("```")[0])
    assert read_profile(file).model == "resnet50"


def test_planning_needs_neither_framework_nor_numpy() -> None:
    program = """if True:
        import pkgutil, sys, hvd_order.planning
        for module in pkgutil.iter_modules(hvd_order.planning.__path__):
            if module.name != "profiling":  # records programs of PyTorch
                __import__(f"hvd_order.planning.{module.name}")
        print([m for m in ("torch", "tensorflow", "numpy") if m in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
