"""Profiles of TensorFlow's steps, made of real runs, in a process of their own."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.training.keras_jobs import MARKS

from hvd_order.planning.files.profile import read_profile

pytestmark = MARKS

PROGRAM = """
import sys
import keras
import numpy as np
from hvd_order.base.errors import InvalidUsage
from hvd_order.tensorflow.profiler import record_profile

layers = keras.layers
last, second, first = layers.Dense(10), layers.Dense(64, activation="tanh"), layers.Dense(64)
table, unused = layers.Embedding(50, 64), layers.Dense(3)
entry = keras.Input((20,), dtype="int32")
model = keras.Model(entry, last(second(first(layers.Flatten()(table(entry))))))
unused.build((1, 2))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
x, y = np.ones((64, 20), "i4"), np.zeros(64, "i4")


def loss_of(x, y):
    return loss(y, model(x, training=True))


names = {layer: name for layer, name in
         ((last, "last"), (second, "second"), (first, "first"), (table, "table"))}
variables = [v for layer in (*names, unused) for v in layer.trainable_variables]
profile = record_profile(loss_of, variables, [x, y], model="words", runs=5)
profile.write(sys.argv[1])
for layer, name in names.items():
    print(name, *(v.path for v in layer.trainable_variables))
for wrong in (lambda: record_profile(loss_of, variables, [x, y], runs=4),
              lambda: record_profile(loss_of, unused.trainable_variables, [x, y])):
    try:
        wrong()
    except InvalidUsage as error:
        print("error", error)
"""


@pytest.mark.timeout(200)
def test_a_profile_has_the_graph_of_the_step(tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(path)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True,
        timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    of_layer = {words[0]: words[1:] for words in lines if words[0] != "error"}
    assert done.stdout.count("error") == 2
    profile = read_profile(path)
    graph = profile.graph()
    assert {p.name for p in graph.parameters} == {n for names in of_layer.values() for n in names}
    first_read = {
        parameter.name: readers[0]
        for parameter, readers in zip(graph.parameters, graph.readers, strict=True)
    }
    last_produced = {
        parameter.name: producers[-1]
        for parameter, producers in zip(graph.parameters, graph.producers, strict=True)
    }
    in_order = [of_layer[name] for name in ("table", "first", "second", "last")]
    for before, after in itertools.pairwise(in_order):
        assert max(first_read[name] for name in before) < min(first_read[name] for name in after)
        assert min(last_produced[name] for name in before) > min(
            last_produced[name] for name in after
        )
    sizes = {parameter.name: parameter.size_bytes for parameter in graph.parameters}
    assert sizes[of_layer["table"][0]] == 50 * 64 * 4
    phases = {op.phase for op in graph.ops}
    assert phases == {"forward", "backward"}
    assert sum(op.duration_s > 0 for op in graph.ops) >= 8, "most operations were timed"
    advice = subprocess.run(
        [sys.executable, "-m", "hvd_order.tools.cli", "advise", str(path), "--bandwidth", "1gbit",
         "--workers", "2"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert advice.returncode == 0, advice.stderr
