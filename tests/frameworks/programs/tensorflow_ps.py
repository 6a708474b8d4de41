"""Trains with parameter servers: the chief coordinates, workers compute, variables are on the parameter servers."""

import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
    ).join()

strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weights = tf.Variable(tf.zeros([4, 1]))


@tf.function
def step():
    def replica():
        inputs = tf.random.normal([32, 4])
        with tf.GradientTape() as tape:
            error = tf.matmul(inputs, weights) - tf.reduce_sum(inputs, axis=1, keepdims=True)
            loss = tf.reduce_mean(error**2)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))

    strategy.run(replica)


for _ in range(20):
    coordinator.schedule(step)
coordinator.join()
values = [round(float(w), 5) for w in weights.numpy().flatten()]
size = sum(len(tasks) for tasks in resolver.cluster_spec().as_dict().values())
print(f"RESULT rank=0 size={size} weights={values} device={weights.device}", flush=True)
