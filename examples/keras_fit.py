"""Trains a model of Keras 3 by ``fit``, on data that is made here.

hvd-order run -np 2 python examples/keras_fit.py
"""

import keras
import numpy as np

import hvd_order.keras as hvd

hvd.init()
keras.utils.set_random_seed(1 + hvd.rank())  # the callback below gives all ranks rank 0's weights

rows = np.random.default_rng(0).standard_normal((4096, 16)).astype("float32")
labels = (rows[:, :8].sum(1) > rows[:, 8:].sum(1)).astype("float32")
mine = slice(hvd.rank(), None, hvd.size())  # each rank has rows of its own

model = keras.Sequential([
    keras.Input((16,)),
    keras.layers.Dense(64, activation="relu"),
    keras.layers.Dense(1, activation="sigmoid"),
])  # fmt: skip
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size())),
    loss="binary_crossentropy",
    metrics=["accuracy"],
)
history = model.fit(
    rows[mine],
    labels[mine],
    batch_size=32,
    epochs=5,
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),  # over the ranks
    ],
)
if hvd.rank() == 0:
    accuracy = history.history["accuracy"][-1]
    print(f"{hvd.size()} ranks, accuracy {accuracy:.3f}", flush=True)
