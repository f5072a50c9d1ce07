"""tf.distribute.MultiWorkerMirroredStrategy, with a worker for each rank."""

from __future__ import annotations

import json
import os

import tensorflow as tf
from mirrored import train
from work import Work


def main() -> None:
    """Train as one of the workers that TF_CONFIG names."""
    work = Work()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    train(work, strategy)
    work.write(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


if __name__ == "__main__":
    main()
