"""The job as TensorFlow's scripts use it: the arrays and settings that `tensorflow_system.py` laid out."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf


class Work:
    """A job, and the record of its steps.

    Attributes:
        ranks: replicas; `batch` samples of all of them in a step.
        order: of the samples, shape (steps, batch); the i-th part of a row is the i-th replica's.
    """

    def __init__(self) -> None:
        self.folder = Path(sys.argv[1])
        self.about: dict[str, Any] = json.loads((self.folder / "tensorflow.json").read_text())
        self.ranks, self.steps = self.about["ranks"], self.about["steps"]
        self.order = np.load(self.folder / "order.npy")
        self.batch = self.order.shape[1]
        self.inputs, self.target = np.load(self.folder / "inputs.npy"), np.load(self.folder / "target.npy")
        tf.config.threading.set_intra_op_parallelism_threads(self.about["threads"])
        self._losses: list[float] = []
        self._ended_s: list[float] = []

    def model(self) -> Any:
        """The job's model with the weights that torch's has at first."""
        from keras_models import MODELS

        with np.load(self.folder / "weights.npz") as held:
            return MODELS[self.about["model"]](dict(held), self.about["args"])

    def optimizer(self, updates: int = 1) -> Any:
        """The job's optimizer, with its schedule; a step may be several updates."""
        rates = tf.constant(self.about["rates"], tf.float32)

        class Schedule(tf.keras.optimizers.schedules.LearningRateSchedule):
            def __call__(self, step: Any) -> Any:
                return tf.gather(rates, tf.minimum(tf.cast(step, tf.int32) // updates, len(rates) - 1))

        made = getattr(tf.keras.optimizers, self.about["optimizer"])
        return made(learning_rate=Schedule(), **self.about["optimizer_args"])

    def dataset(self, order: Any) -> Any:
        """Batches of the samples in the rows of an order."""
        inputs, target = tf.constant(self.inputs), tf.constant(self.target)
        rows = tf.data.Dataset.from_tensor_slices(order)
        return rows.map(lambda row: (tf.gather(inputs, row), tf.gather(target, row))).prefetch(2)

    def part(self, rank: int) -> Any:
        """A replica's part of the order."""
        each = self.batch // self.ranks
        return self.order[:, rank * each : (rank + 1) * each]

    def loss(self, output: Any, target: Any) -> Any:
        """Sum of the cross-entropies of a replica's samples, over the samples of the whole batch."""
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=target, logits=output)
        return tf.reduce_mean(each) / self.ranks

    def took(self, loss: float, ended_s: float | None = None) -> None:
        """A step was taken, now where no other time is given."""
        self._losses.append(float(loss))
        self._ended_s.append(time.time() if ended_s is None else ended_s)

    def write(self, rank: int = 0) -> None:
        """Leave the record of the steps."""
        part = self.folder / f"rank-{rank}.part"
        part.write_text(json.dumps({"losses": self._losses, "ended_s": self._ended_s}))
        part.rename(self.folder / f"rank-{rank}.json")
