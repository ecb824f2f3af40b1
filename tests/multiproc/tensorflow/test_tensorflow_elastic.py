"""An elastic job with Keras: a worker is killed, and training goes on from the last commit."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.launching import Job, launcher, launcher_environment, write_script
from helpers.training.keras_jobs import MARKS

pytestmark = MARKS

PROGRAM = """
import os
import pathlib
import signal
import sys

import keras
import numpy as np

import hvd_order.keras as hvd

EPOCHS = 4
random = np.random.default_rng(0)
x, y = random.normal(size=(32, 3)).astype("f4"), random.normal(size=(32, 2)).astype("f4")
killed = pathlib.Path(sys.argv[1])


def made(distributed):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)]
    )
    optimizer = keras.optimizers.Adam(0.01)
    if distributed:
        hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer, loss="mse", jit_compile=False)
    return model


class Die(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if hvd.rank() == 1 and state.epoch == 2 and batch == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state):
    print(f"rank {hvd.rank()} begins epoch {state.epoch}", flush=True)
    rank, size = hvd.rank(), hvd.size()
    mine = (rows.reshape(4, size, -1, rows.shape[1])[:, rank].reshape(-1, rows.shape[1])
            for rows in (x, y))
    state.model.fit(
        *mine, batch_size=8 // size, epochs=EPOCHS - state.epoch, shuffle=False, verbose=0,
        callbacks=[
            Die(),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
        ],
    )


hvd.init()
model = made(distributed=True)
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
train(state)
if hvd.rank() == 0:
    alone = made(distributed=False)
    alone.fit(x, y, batch_size=8, epochs=EPOCHS, shuffle=False, verbose=0)
    difference = max(
        float(np.abs(a - b).max())
        for a, b in zip(alone.get_weights(), model.get_weights(), strict=True)
    )
    print(f"differs by {difference:.3g} after {int(model.optimizer.iterations.numpy())} steps")
hvd.shutdown()
"""


@pytest.mark.long
def test_fit_goes_on_from_the_last_epoch(tmp_path: Path) -> None:
    script = write_script(tmp_path, PROGRAM)
    run = launcher("-np", "2", "--min-np", "2")
    env = launcher_environment({"TF_CPP_MIN_LOG_LEVEL": "3", "HVD_ORDER_TIMEOUT": "60"})
    with Job([*run, *script, str(tmp_path / "killed")], env) as job:
        job.wait_for("rank 1 was ended by SIGKILL; starting all again", timeout=120)
        job.wait_for(r"rank 0 begins epoch 2$", timeout=120)
        assert job.wait(timeout=120) == 0, job.text()
    (found,) = job.matches(r"differs by (\S+) after (\d+) steps")
    assert float(found[1]) < 1e-6
    assert int(found[2]) == 16
