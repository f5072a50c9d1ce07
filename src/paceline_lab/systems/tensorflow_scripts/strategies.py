"""Training with tf.distribute as in TensorFlow's guides: `python strategies.py STRATEGY FOLDER`.

Before a script starts, `table.py` writes the job's data, weights and settings to the folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf

BLOCK = 10  # number of steps that are scheduled together


class Work:
    """A job for TensorFlow, and the record of its steps.

    Attributes:
        ranks: number of replicas.
        batch: global batch size, in samples of all replicas together.
        order: sample indices of each step, shape (steps, batch); each replica trains on an equal slice of each row.
    """

    def __init__(self) -> None:
        self.folder = Path(sys.argv[2])
        self.about: dict[str, Any] = json.loads((self.folder / "tensorflow.json").read_text())
        self.ranks, self.steps = self.about["ranks"], self.about["steps"]
        self.order = np.load(self.folder / "order.npy")
        self.batch = self.order.shape[1]
        self.inputs, self.target = np.load(self.folder / "inputs.npy"), np.load(self.folder / "target.npy")
        tf.config.threading.set_intra_op_parallelism_threads(self.about["threads"])
        self._losses: list[float] = []
        self._ended_s: list[float] = []

    def model(self) -> Any:
        """Build the job's model with the initial weights from torch."""
        from keras_models import MODELS

        with np.load(self.folder / "weights.npz") as held:
            return MODELS[self.about["model"]](dict(held), self.about["args"])

    def optimizer(self, updates: int = 1) -> Any:
        """Build the job's optimizer with its learning-rate schedule.

        Args:
            updates: number of optimizer updates per training step.
        """
        rates = tf.constant(self.about["rates"], tf.float32)

        class Schedule(tf.keras.optimizers.schedules.LearningRateSchedule):
            def __call__(self, step: Any) -> Any:
                return tf.gather(rates, tf.minimum(tf.cast(step, tf.int32) // updates, len(rates) - 1))

        made = getattr(tf.keras.optimizers, self.about["optimizer"])
        return made(learning_rate=Schedule(), **self.about["optimizer_args"])

    def dataset(self, order: Any) -> Any:
        """Return a data set with one batch for each row of sample indices."""
        inputs, target = tf.constant(self.inputs), tf.constant(self.target)
        rows = tf.data.Dataset.from_tensor_slices(order)
        return rows.map(lambda row: (tf.gather(inputs, row), tf.gather(target, row))).prefetch(2)

    def part(self, rank: int) -> Any:
        """Return the sample indices of one replica, shape (steps, batch / replicas)."""
        each = self.batch // self.ranks
        return self.order[:, rank * each : (rank + 1) * each]

    def loss(self, output: Any, target: Any) -> Any:
        """Return the sum of a replica's cross-entropy losses, divided by the global batch size."""
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=target, logits=output)
        return tf.reduce_mean(each) / self.ranks

    def took(self, loss: float, ended_s: float | None = None) -> None:
        """Record the loss and the end time of a step. The default end time is now."""
        self._losses.append(float(loss))
        self._ended_s.append(time.time() if ended_s is None else ended_s)

    def write(self, rank: int = 0) -> None:
        """Write the recorded losses and times to the folder."""
        part = self.folder / f"rank-{rank}.part"
        part.write_text(json.dumps({"losses": self._losses, "ended_s": self._ended_s}))
        part.rename(self.folder / f"rank-{rank}.json")


def mirrored(work: Work) -> None:
    """Train with MirroredStrategy, with one replica on each logical CPU device."""
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(work.ranks)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    train(work, tf.distribute.MirroredStrategy([f"/cpu:{number}" for number in range(work.ranks)]))
    work.write()


def multiworker(work: Work) -> None:
    """Train with MultiWorkerMirroredStrategy, as the worker that TF_CONFIG specifies."""
    train(work, tf.distribute.MultiWorkerMirroredStrategy())
    work.write(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


def train(work: Work, strategy: Any) -> None:
    """Run the custom training loop of a synchronous strategy."""
    with strategy.scope():
        model, optimizer = work.model(), work.optimizer()
        optimizer.build(model.trainable_variables)

    def step_of_replica(batch: Any) -> Any:
        inputs, target = batch
        with tf.GradientTape() as tape:
            loss = work.loss(model(inputs), target)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def step(batch: Any) -> Any:
        losses = strategy.run(step_of_replica, args=(batch,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def part(context: Any) -> Any:
        if context.num_input_pipelines > 1:
            return work.dataset(work.part(context.input_pipeline_id))
        parts = work.order.reshape(-1, work.batch // work.ranks)  # each replica reads the next slice in turn
        return work.dataset(parts)

    for batch in strategy.distribute_datasets_from_function(part):
        work.took(step(batch).numpy())


def server(work: Work) -> None:
    """Train with ParameterServerStrategy as the chief, or serve as a worker or server until killed.

    Workers update asynchronously, so the losses differ from those of the synchronous strategies.
    """
    config = json.loads(os.environ["TF_CONFIG"])
    kind, number = config["task"]["type"], config["task"]["index"]
    if kind != "chief":
        tf.distribute.Server(config["cluster"], job_name=kind, task_index=number, protocol="grpc", start=True).join()
        return
    coordinate(work)
    work.write()


def coordinate(work: Work) -> None:
    """Schedule one update for each worker's slice of a batch, and record the losses."""
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model, optimizer = work.model(), work.optimizer(updates=work.ranks)
        optimizer.build(model.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step(iterator: Any) -> Any:
        def update(inputs: Any, target: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = work.loss(model(inputs), target) * work.ranks  # mean over the worker's own samples only
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.run(update, args=next(iterator))

    def parts() -> Any:
        return work.dataset(work.order.reshape(-1, work.batch // work.ranks)).repeat()

    iterator = iter(coordinator.create_per_worker_dataset(parts))
    coordinator.schedule(step, args=(iterator,))  # the first call traces the function, which is not timed
    coordinator.join()
    for done in range(0, work.steps, BLOCK):
        taken = min(BLOCK, work.steps - done)
        began = time.time()
        updates = [coordinator.schedule(step, args=(iterator,)) for _ in range(taken * work.ranks)]
        coordinator.join()
        losses = [float(update.fetch()) for update in updates]
        each_s = (time.time() - began) / taken
        for number in range(taken):
            of_step = losses[number * work.ranks : (number + 1) * work.ranks]
            work.took(sum(of_step) / work.ranks, began + (number + 1) * each_s)


STRATEGIES: dict[str, Callable[[Work], None]] = {"mirrored": mirrored, "multiworker": multiworker, "server": server}

if __name__ == "__main__":
    STRATEGIES[sys.argv[1]](Work())
