"""Profiles of a real job with ParameterServerStrategy: a coordinator, a worker and a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.launching import run_cli
from helpers.ranks import free_port
from helpers.training.keras_jobs import MARKS

from hvd_order.planning.files.profile import Profile, read_profile

pytestmark = MARKS

# One task of the cluster; it traces itself when it is told to.
TASK = """
import json
import os
import sys

import tensorflow as tf

cluster, job, folder = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=0, protocol="grpc")
print("ready", flush=True)
sys.stdin.readline()
tf.profiler.experimental.start(folder)
print("traces", flush=True)
sys.stdin.readline()
tf.profiler.experimental.stop()
print("traced", flush=True)
sys.stdin.readline()
os._exit(0)
"""

# Of both coordinators: what they train, and how.
TRAINING = """
import json
import os
import shutil
import sys
from pathlib import Path

import keras
import tensorflow as tf

from hvd_order.base.errors import InvalidUsage
from hvd_order.tensorflow.strategy import profile_of_strategy

cluster, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(cluster), rpc_layer="grpc", task_type="chief", task_id=0
)
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    first = tf.Variable(tf.ones((256, 256)), name="first")
    second = tf.Variable(tf.ones((256, 128)), name="second")
    table = tf.Variable(tf.ones((50, 8)), name="table")
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64), keras.layers.Dense(4)])
    optimizer = keras.optimizers.SGD(1e-3)
    optimizer.build(model.trainable_variables)
plain = [second, first]


@tf.function
def plain_step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.tanh(x @ first) @ second)
    for variable, gradient in zip(plain, tape.gradient(loss, plain)):
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.handle, alpha=1e-3, delta=gradient
        )


@tf.function
def keras_step():
    def replica():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.random.normal((8, 32))) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    strategy.run(replica)


@tf.function
def sparse_step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.embedding_lookup(table, [3, 4]))
    table.scatter_sub(tape.gradient(loss, table))


@tf.function
def never_scheduled():
    first.assign_sub(tf.random.uniform((256, 256)) * first)


def run(count):
    for _ in range(count):
        coordinator.schedule(plain_step, args=(tf.ones((16, 256)),))
        coordinator.schedule(keras_step)
    coordinator.join()
"""

COORDINATOR = (
    TRAINING
    + """
run(2)
print("warm", flush=True)
sys.stdin.readline()
run(12)
print("done", flush=True)
sys.stdin.readline()
worker, server = folder / "worker", folder / "server"
traces = {"worker": worker, "servers": [server]}
given = (tf.ones((16, 256)),)
profile = profile_of_strategy(strategy, plain_step, plain, given, **traces, model="plain")
profile.write(folder / "plain.json")
weights = model.trainable_variables
profile_of_strategy(strategy, keras_step, weights, **traces, warm_up=2).write(folder / "keras.json")
(file,) = worker.rglob("*.xplane.pb")
cut = folder / "cut.xplane.pb"
cut.write_bytes(file.read_bytes()[:-40])
both = folder / "both"
both.mkdir()
for name in ("a", "b"):
    shutil.copy(file, both / f"{name}.xplane.pb")
loose = tf.Variable(1.0)
for step, variables, args, options in (
    (plain_step, plain, given, {"warm_up": 9}),
    (never_scheduled, [first], (), {}),
    (plain_step, plain, given, {"worker": cut}),
    (plain_step, plain, given, {"worker": both}),
    (plain_step, plain, given, {"servers": [worker]}),
    (sparse_step, [table], (), {}),
    (plain_step, [loose], given, {}),
    (plain_step, [table], given, {}),
    (plain_step, [], given, {}),
):
    try:
        profile_of_strategy(strategy, step, variables, args, **{**traces, **options})
        print("error: none", flush=True)
    except InvalidUsage as error:
        print("error:", str(error).replace("\\n", " "), flush=True)
os._exit(0)
"""
)

# A training program that knows nothing of profiles.
SCRIPT = (
    TRAINING
    + """
while True:
    run(10)
"""
)

ERRORS = (
    "has 12 whole runs of the step, 3 behind a warm-up of 9; at least 5 are needed",
    "has no run of the function __inference_never_scheduled",
    "cut.xplane.pb is no file of TensorFlow's profiler, or only a part of one",
    "has 2 files *.xplane.pb; expected one",
    "no update of 'second:0' and 1 others is in",
    "the variable 'table:0' is used by Resource",
    "not on a parameter server",
    "the step does not use the variable 'table:0'",
    "0 variables and traces of 1 servers",
)


@dataclass(frozen=True)
class Recorded:
    folder: Path
    output: str

    def profile(self, name: str) -> Profile:
        return read_profile(self.folder / f"{name}.json")


class Talk:
    """A process, told things and listened to line by line."""

    def __init__(self, program: str, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )  # fmt: skip

    def hear(self, word: str) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.strip() == word

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("strategy")
    cluster = json.dumps({job: [f"127.0.0.1:{free_port()}"] for job in ("chief", "worker", "ps")})
    tasks = [
        Talk(TASK, cluster, job, str(folder / name))
        for job, name in (("worker", "worker"), ("ps", "server"))
    ]
    coordinator = Talk(COORDINATOR, cluster, str(folder))
    try:
        for task in tasks:
            task.hear("ready")
        coordinator.hear("warm")
        for task in tasks:
            task.tell()
            task.hear("traces")
        coordinator.tell()
        coordinator.hear("done")
        for task in tasks:
            task.tell()
            task.hear("traced")
        output, _ = coordinator.process.communicate("\n", timeout=120)
        assert coordinator.process.returncode == 0
        script = folder / "train.py"
        script.write_text(SCRIPT)
        done = run_cli(
            "profile", "--tensorflow-servers", "--steps", 6, "-o", folder / "command.json", script,
            cluster, folder, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        yield Recorded(folder, output)
    finally:
        for each in (*tasks, coordinator):
            each.process.kill()
            each.process.communicate()


def test_the_worker_computes_and_the_server_updates(recorded: Recorded) -> None:
    profile = recorded.profile("plain")
    graph = profile.graph("median")
    assert [(p.name, p.size_bytes) for p in graph.parameters] == [
        ("second:0", 256 * 128 * 4), ("first:0", 256 * 256 * 4)
    ]  # fmt: skip
    ops = {op.name: op for op in graph.ops}
    assert not [name for name in ops if "Apply" in name], "updates are the server's"
    assert ops["matmul"].reads == ("first:0",)
    assert ops["matmul"].duration_s > 0
    first_s, second_s = (
        [op.name for op in graph.ops if name in op.produces] for name in ("first:0", "second:0")
    )
    names = [op.name for op in graph.ops]
    assert names.index(second_s[0]) < names.index(first_s[0]), "each gradient leaves by itself"
    assert {ops[name].phase for name in (*first_s, *second_s)} == {"backward"}
    seconds = profile.timings["matmul"].seconds
    assert len(seconds) == 12 - 3
    assert len(set(seconds)) > 1


def test_what_servers_cost_is_in_the_profile(recorded: Recorded) -> None:
    costs = recorded.profile("plain").servers
    assert costs is not None
    assert costs.strategy is not None
    assert len(costs.strategy.fetch_orders) == 12 - 3
    assert {tuple(sorted(order)) for order in costs.strategy.fetch_orders} == {(0, 1)}
    assert 0 < costs.strategy.between_s < 1
    assert 0 < costs.update.seconds + 256 * 256 * 4 * costs.update.seconds_per_byte < 0.05
    assert costs.answer.transfers == 2 * (12 - 3)
    assert costs.answer.at_least
    assert costs.push.bytes_per_s is None


def test_the_command_profiles_a_program_as_it_is(recorded: Recorded) -> None:
    mine, found = recorded.profile("plain"), recorded.profile("command")
    assert [p.name for p in found.parameters] == ["first:0", "second:0"]
    assert {op.name for op in found.ops} == {op.name for op in mine.ops}
    assert len(found.timings["matmul"].seconds) >= 6
    assert found.servers is not None
    assert found.servers.update.seconds + found.servers.update.seconds_per_byte > 0
    assert found.servers.strategy is not None
    assert {tuple(sorted(order)) for order in found.servers.strategy.fetch_orders} == {(0, 1)}


def test_keras_sends_no_gradient_before_the_last_one_is_there(recorded: Recorded) -> None:
    profile = recorded.profile("keras")
    (last,) = [op for op in profile.ops if op.produces]
    assert set(last.produces) == {parameter.name for parameter in profile.parameters}
    assert len(profile.parameters) == 4


def test_predict_reads_the_profile(recorded: Recorded) -> None:
    options = ["--workers", "1-8", "--servers", "1", "--system", "tensorflow",
               "--transmission", "round_robin", "--bandwidth", "1gbit"]  # fmt: skip
    for name in ("plain", "keras", "command"):
        done = run_cli("predict", recorded.folder / f"{name}.json", *options)
        assert done.returncode == 0, done.stderr
        said = " ".join(done.stdout.split())
        assert "updates (" in said
        assert "the orders in which parameters come" in said
        assert "No time is counted for both ends of a connection" in said


def test_what_does_not_match_is_named(recorded: Recorded) -> None:
    errors = [line for line in recorded.output.splitlines() if line.startswith("error:")]
    assert len(errors) == len(ERRORS)
    for error, expected in zip(errors, ERRORS, strict=True):
        assert expected in error
