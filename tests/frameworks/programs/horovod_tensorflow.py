"""Trains a linear model with Horovod's ring all-reduce; every rank starts with other weights and has other data."""

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
tf.random.set_seed(hvd.rank())
weights = tf.Variable(tf.random.normal([4, 1]))
hvd.broadcast_variables([weights], root_rank=0)
for _ in range(20):
    inputs = tf.random.normal([32, 4])
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        error = tf.matmul(inputs, weights) - tf.reduce_sum(inputs, axis=1, keepdims=True)
        loss = tf.reduce_mean(error**2)
    (gradient,) = tape.gradient(loss, [weights])
    weights.assign_sub(0.1 * gradient)
values = [round(float(w), 5) for w in weights.numpy().flatten()]
print(f"RESULT rank={hvd.rank()} size={hvd.size()} weights={values}", flush=True)
hvd.shutdown()
