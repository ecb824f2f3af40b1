"""The training of TensorFlow jobs: ``train_tensorflow.py STEPS PACE_S``."""

from __future__ import annotations

import sys
import time

from chaos.programs.diary import Diary, become_odd


def main(steps: int, pace_s: float) -> None:
    become_odd()
    diary = Diary()
    diary.note("import")
    import keras
    import tensorflow as tf
    from chaos.programs import problem

    import hvd_order.tensorflow as hvd

    diary.note("init")
    hvd.init()
    diary.note("up")
    variables = [tf.Variable(value, dtype=tf.float64) for value in problem.initial()]
    w1, b1, w2, b2, w3, b3 = variables
    optimizer = keras.optimizers.SGD(problem.LEARNING_RATE, momentum=problem.MOMENTUM)
    optimizer.build(variables)

    @tf.function
    def take_step(x: tf.Tensor, y: tf.Tensor) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            h1 = tf.tanh(tf.matmul(x, w1, transpose_b=True) + b1)
            h2 = tf.tanh(tf.matmul(h1, w2, transpose_b=True) + b2)
            out = tf.matmul(h2, w3, transpose_b=True) + b3
            loss = tf.reduce_mean(tf.square(tf.squeeze(out, 1) - y))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for step in range(steps):
        x, y = problem.batch(step, hvd.rank(), hvd.size())
        take_step(tf.constant(x), tf.constant(y))
        diary.note(f"step {step + 1}")
        time.sleep(pace_s)
    diary.keep([variable.numpy() for variable in variables])
    diary.note("trained")
    hvd.shutdown()
    diary.note("end")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
