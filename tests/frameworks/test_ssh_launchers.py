"""horovodrun starts its processes in other tasks, with SSH between the tasks."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from tests.frameworks.images import ensure_framework_image
from tests.slurm.batch_harness import BatchHarness
from tests.slurm.batch_harness import batch_harness as batch_harness

pytestmark = pytest.mark.cluster

HOROVOD = textwrap.dedent(
    """
    import os
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    tf.random.set_seed(hvd.rank())
    weights = tf.Variable(tf.random.normal([4]))
    hvd.broadcast_variables([weights], root_rank=0)
    for step in range(3):
        x = tf.random.normal([8, 4])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.linalg.matvec(x, weights) - x[:, 0]) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        weights.assign_sub(0.1 * tape.gradient(loss, [weights])[0])
    print("result", hvd.rank(), hvd.size(), os.environ.get("SLUICE_SSH_SESSION", "task"), *(f"{w:.6f}" for w in weights.numpy()), flush=True)
    """
)


def read_results(text: str) -> list[list[str]]:
    lines = [line.partition("result ")[2].split() for line in text.splitlines()]
    return sorted(words for words in lines if words)


@pytest.mark.parametrize(
    "more",
    [
        {"framework": {"name": "horovod", "strategy": "horovodrun"}},
        {"jobssh": True},
    ],
    ids=["strategy", "jobssh"],
)
def test_horovodrun_trains_in_other_tasks(
    batch_harness: BatchHarness, more: dict[str, Any]
) -> None:
    image = str(ensure_framework_image("tensorflow"))
    command = "horovodrun --gloo -np 3 -H main-0:1,worker-0:1,worker-1:1 python3 train.py"
    common = {"memoryMB": 1500, "placement": "separate"}
    roles = [
        {"name": "main", "command": command, "minSucceededTaskCount": 1, **common},
        {"name": "worker", "command": "sleep infinity", "taskNumber": 2, **common},
    ]
    job = batch_harness.submit(
        {"image": image, "placement": "separate", "taskRoles": roles, **more},
        files={"train.py": HOROVOD},
        own_addresses=True,
    )
    assert job.wait_for_end(180) == ("COMPLETED", "0:0"), job.log_text("main")
    results = read_results(job.log_text("main"))
    assert [row[:2] for row in results] == [[str(i), "3"] for i in range(3)]
    # Sessions of three tasks: each task has its own directory. With `own_addresses` main-0 is not local for Horovod.
    assert len({row[2] for row in results} - {"task"}) == 3
    assert len({tuple(row[3:]) for row in results}) == 1
