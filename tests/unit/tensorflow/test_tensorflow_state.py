"""What a commit of TensorFlow's elastic state holds."""

from __future__ import annotations

from helpers.training.keras_jobs import MARKS

pytestmark = MARKS


def test_restore_returns_to_the_last_save() -> None:
    import tensorflow as tf

    from hvd_order.tensorflow.elastic import TensorFlowState

    weight = tf.Variable(1.0)
    state = TensorFlowState([weight], epoch=0)
    weight.assign(2.0)
    state.epoch = 1
    state.save()
    weight.assign(3.0)
    state.epoch = 2
    state.restore()
    assert (float(weight), state.epoch) == (2.0, 1)
