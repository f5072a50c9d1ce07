"""tf.distribute.MirroredStrategy over cores, as TensorFlow's page on custom training loops uses it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from work import Work


def main() -> None:
    """Train with a replica on each logical CPU device."""
    work = Work()
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(work.ranks)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    strategy = tf.distribute.MirroredStrategy([f"/cpu:{number}" for number in range(work.ranks)])
    train(work, strategy)
    work.write()


def train(work: Work, strategy: Any) -> None:
    """The custom loop of a synchronous strategy."""
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
        parts = work.order.reshape(-1, work.batch // work.ranks)  # each replica takes the next
        return work.dataset(parts)

    for batch in strategy.distribute_datasets_from_function(part):
        work.took(step(batch).numpy())


if __name__ == "__main__":
    main()
