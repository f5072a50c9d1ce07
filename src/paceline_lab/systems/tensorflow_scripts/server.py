"""tf.distribute.ParameterServerStrategy: a coordinator, a parameter server, and a worker for each rank.

Workers update on their own: it is asynchronous, so its losses are its own as well.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import tensorflow as tf
from work import Work


def main() -> None:
    """Be what TF_CONFIG says: the chief, or a server until it is killed."""
    config = json.loads(os.environ["TF_CONFIG"])
    kind, number = config["task"]["type"], config["task"]["index"]
    work = Work()
    if kind != "chief":
        tf.distribute.Server(config["cluster"], job_name=kind, task_index=number, protocol="grpc", start=True).join()
        return
    coordinate(work)
    work.write()


def coordinate(work: Work) -> None:
    """Schedule an update for each part of a batch, and read the losses in order."""
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model, optimizer = work.model(), work.optimizer(updates=work.ranks)
        optimizer.build(model.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step(iterator: Any) -> Any:
        def update(inputs: Any, target: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = work.loss(model(inputs), target) * work.ranks  # of its own samples alone
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.run(update, args=next(iterator))

    def parts() -> Any:
        return work.dataset(work.order.reshape(-1, work.batch // work.ranks)).repeat()

    iterator = iter(coordinator.create_per_worker_dataset(parts))
    coordinator.schedule(step, args=(iterator,))  # the first traces the function
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


BLOCK = 10  # steps whose updates are under way at once

if __name__ == "__main__":
    main()
