"""Asynchronous updates of TensorFlow's ParameterServerStrategy, for `server.py`.

    PYTHON server_tensorflow.py WORKERS FEATURES HIDDEN CLASSES BATCH      # coordinator: answers lines on stdin

Runs under a Python of its own that has TensorFlow (2.21); it imports nothing of paceline. The coordinator starts a
process per worker and one parameter server on loopback. For each number of updates that it reads it schedules as many,
and answers with the seconds that they took and the newest loss, as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
LR = 0.05
SAMPLES = 4096
WARM_UP = 20


def main() -> None:
    """Be the coordinator, or a server that it has started."""
    if sys.argv[1] == "server":
        serve(json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
        return
    workers, features, hidden, classes, batch = map(int, sys.argv[1:6])
    ports = [free_port() for _ in range(workers + 2)]
    cluster = {
        "worker": [f"127.0.0.1:{port}" for port in ports[:workers]],
        "ps": [f"127.0.0.1:{ports[workers]}"],
        "chief": [f"127.0.0.1:{ports[workers + 1]}"],
    }
    tasks = [("worker", i) for i in range(workers)] + [("ps", 0)]
    servers = [
        subprocess.Popen(
            [sys.executable, __file__, "server", json.dumps(cluster), kind, str(number)], stdin=subprocess.PIPE
        )
        for kind, number in tasks
    ]
    try:
        coordinate(cluster, features, hidden, classes, batch)
    finally:
        for server in servers:
            server.kill()
            server.wait()


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(cluster: dict[str, list[str]], kind: str, number: int) -> None:
    """Be a worker, or the parameter server."""
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=2, intra_op_parallelism_threads=1)
    server = tf.distribute.Server(cluster, job_name=kind, task_index=number, protocol="grpc", config=config, start=True)
    del server
    sys.stdin.read()  # until the coordinator ends


def coordinate(cluster: dict[str, list[str]], features: int, hidden: int, classes: int, batch: int) -> None:
    """Schedule updates on request."""
    import tensorflow as tf

    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        shapes = [(features, hidden), (hidden,), (hidden, classes), (classes,)]
        weights = [tf.Variable(tf.random.stateless_normal(shape, (1, i)) * 0.05) for i, shape in enumerate(shapes)]

    def dataset() -> Any:
        inputs = tf.random.stateless_normal((SAMPLES, features), (7, 7))
        labels = tf.argmax(inputs[:, :classes], axis=1)
        data = tf.data.Dataset.from_tensor_slices((inputs, labels))
        return data.shuffle(SAMPLES).repeat().batch(batch, drop_remainder=True).prefetch(4)

    @tf.function  # type: ignore[untyped-decorator]
    def step(iterator: Any) -> Any:
        def replica(inputs: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                hidden_units = tf.nn.relu(inputs @ weights[0] + weights[1])
                logits = hidden_units @ weights[2] + weights[3]
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(LR * gradient)
            return loss

        return strategy.run(replica, args=next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    result = None
    for _ in range(WARM_UP):
        result = coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        for _ in range(int(line)):
            result = coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        assert result is not None
        answer = {"seconds": time.perf_counter() - begun, "loss": float(result.fetch())}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
