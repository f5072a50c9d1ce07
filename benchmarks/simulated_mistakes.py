"""The list of planted mistakes for simulated_mutations.py: each an edit of one place in `src/paceline`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """One edit.

    Attributes:
        name: what is wrong then.
        file: below `src/paceline`.
        old, new: text that stands there once, and what takes its place.
        trainings: those of the table that reach the place, by `Case.training`.
        harmless: why it changes nothing, where it does not.
    """

    name: str
    file: str
    old: str
    new: str
    trainings: tuple[str, ...]
    harmless: str = ""


_BUCKETS = "gpt dp=2 + small buckets + checkpoints"
_LOCAL = "gpt dp=2 sync=local:3 + evaluate + checkpoints"
_OVERLAP = "gpt dp=2 sync=diloco:3,fragments=2,overlap=1"
_RING = "gpt dp=2 fsdp=2 sync=allreduce:ring"
_SEQUENCE = "gpt tp=2 sequence=on"
_PIPELINE = "gpt pp=2 microbatches=4"

_WAITS = (
    Mistake(
        "an all-reduce is not waited for",
        "comm/group.py",
        "self._reduce(whole, op, waits=True).wait()",
        "self._reduce(whole, op, waits=False)",
        ("gpt dp=2", "gpt tp=2"),
    ),
    Mistake(
        "a pending collective is not waited for",
        "comm/group.py",
        "            for work in self.works:\n                work.wait()",
        "            pass",
        (_BUCKETS, _RING),
    ),
    Mistake(
        "a broadcast is not waited for",
        "comm/group.py",
        "dist.broadcast(tensor, group_src=root, group=self.backend)",
        "dist.broadcast(tensor, group_src=root, group=self.backend, async_op=True)",
        ("gpt dp=2",),
    ),
    Mistake(
        "tokens are used before they have come to their expert",
        "comm/group.py",
        "received, rows, receives and list(receives), sends and list(sends), group=self.backend\n",
        "received, rows, receives and list(receives), sends and list(sends), group=self.backend, async_op=True\n",
        ("moe ep=2",),
    ),
    Mistake(
        "messages between ranks are not waited for",
        "comm/group.py",
        "self.start_exchange(send, receive).wait()",
        "self.start_exchange(send, receive)",
        ("gpt dp=2 compress=int8", "gpt dp=2 compress=powersgd:2"),
    ),
    Mistake(
        "a piece of a ring is added before it is there",
        "comm/ring.py",
        "            exchange.wait()",
        "            pass",
        (_RING,),
    ),
    Mistake(
        "buckets that were sent are not waited for",
        "sync/allreduce.py",
        "                bucket.pending.wait()",
        "                pass",
        (_BUCKETS,),
    ),
    Mistake(
        "the stream beside the computation is not waited for",
        "comm/comm_thread.py",
        "        current_stream(self.done.device).wait_event(self.done)",
        "        pass",
        (_OVERLAP,),
    ),
    Mistake(
        "the stream beside the computation sends what is not computed",
        "comm/comm_thread.py",
        "        self._stream.wait_stream(current_stream(self._stream.device))\n",
        "",
        (_OVERLAP,),
    ),
    Mistake(
        "gathered tokens are used at once (tensor parallel)",
        "split/tensor_layers.py",
        "_all_gather(shards, x.contiguous(), group=group.backend)",
        "_all_gather(shards, x.contiguous(), group=group.backend, async_op=True)",
        (_SEQUENCE,),
    ),
    Mistake(
        "scattered sums are used at once (tensor parallel)",
        "split/tensor_layers.py",
        "_reduce_scatter(own, shards.flatten(0, 1), group=group.backend)",
        "_reduce_scatter(own, shards.flatten(0, 1), group=group.backend, async_op=True)",
        (_SEQUENCE,),
    ),
    Mistake(
        "keys and values are used before they have come round the ring",
        "split/ring.py",
        "        pending.wait()\n        return pair",
        "        return pair",
        ("gpt cp=2",),
    ),
    Mistake(
        "the last gradients of keys and values are read early",
        "split/ring.py",
        "    gradients = travelling()\n    return",
        "    received = dict(zip(travelling.__code__.co_freevars, travelling.__closure__))['received'].cell_contents\n"
        "    gradients = gradients.with_packed(received)\n    return",
        ("gpt cp=2",),
    ),
    Mistake(
        "tied gradients of stages are added before they have come",
        "split/pipeline.py",
        "        self._pp.exchange([(r, own_gradient) for r in received]",
        "        self._pp.start_exchange([(r, own_gradient) for r in received]",
        (_PIPELINE,),
    ),
    Mistake(
        "a stage evaluates what it has not received",
        "split/pipeline.py",
        "self._pp.exchange([], [(self._rank_of(i - 1), t) for t in carried])",
        "self._pp.start_exchange([], [(self._rank_of(i - 1), t) for t in carried])",
        ("gpt pp=2 microbatches=2 + resume + evaluate",),
    ),
    Mistake(
        "what a stage sends in an evaluation is let go early",
        "split/pipeline.py",
        "        for sent in self._sending:\n            sent.wait()\n",
        "",
        ("gpt pp=2 microbatches=2 + resume + evaluate",),
        "the library holds what it sends, and the memory is reused behind it",
    ),
    Mistake(
        "the loss and norm of all ranks are read early",
        "engine/reduction.py",
        "split.gradient_square()])\n        self.world.all_reduce(together)",
        "split.gradient_square()])\n        self.world.start_all_reduce(together)",
        ("gpt fsdp=2", "gpt pp=2 microbatches=4"),
    ),
    Mistake(
        "the meter reads an event that has not come",
        "engine/meter.py",
        "        self._clock.reach(events[-1][1] if events else previous)\n",
        "",
        ("mlp dp=1 + rewind", "gpt dp=2"),
        "the loss, which the host has read since, was queued behind the event",
    ),
    Mistake(
        "the loss is read before it has come to the host",
        "device.py",
        "        if not self._arrived.query():\n            self._arrived.synchronize()\n        found",
        "        found",
        ("gpt dp=2", "cnn dp=1 + checkpoints"),
    ),
    Mistake(
        "the event of a copy to the host is recorded before it",
        "device.py",
        "        self._host.copy_(numbers, non_blocking=True)\n"
        "        self._arrived = event(numbers.device)\n        self._arrived.record()\n",
        "        self._arrived = event(numbers.device)\n        self._arrived.record()\n"
        "        self._host.copy_(numbers, non_blocking=True)\n",
        ("gpt dp=2", "cnn dp=1 + checkpoints"),
    ),
    Mistake(
        "the pipeline's timer reads an event that has not come",
        "split/pipeline.py",
        "        self._clock.reach(self._whole[1])\n",
        "",
        (_PIPELINE,),
        "the loss, which the host has read since, was queued behind the event",
    ),
)

_STREAMS = (
    Mistake(
        "a checkpoint is copied before the weights are computed",
        "state/shard.py",
        "        self._stream.wait_stream(current_stream(device))\n",
        "",
        ("cnn dp=1 + checkpoints", "gpt fsdp=2 + resume + checkpoints"),
    ),
    Mistake(
        "a checkpoint is written before it is copied",
        "state/shard.py",
        "            self._copied.synchronize()\n",
        "",
        ("cnn dp=1 + checkpoints", "gpt fsdp=2 + resume + checkpoints"),
    ),
    Mistake(
        "weights are updated before the checkpoint has copied them",
        "state/shard.py",
        ".wait_event(self._copied)",
        "",
        ("cnn dp=1 + slow disk + evaluate", "gpt fsdp=2 + slow disk + evaluate"),
    ),
)

_STAGING = (
    Mistake(
        "a bucket is sent before all of its gradients are there",
        "sync/allreduce.py",
        "                if len(bucket.whole) < len(bucket.parameters):",
        "                if not bucket.whole:",
        (_BUCKETS,),
    ),
    Mistake(
        "buckets are sent before the last microbatch",
        "sync/allreduce.py",
        "        if self.overlap and self.replica.backward.last:\n            bucket.whole",
        "        if self.overlap:\n            bucket.whole",
        ("gpt dp=2 microbatches=2 + small buckets + clip",),
    ),
    Mistake(
        "a bucket keeps an old gradient where there is no new one",
        "comm/group.py",
        "        torch._foreach_zero_([self.views[i] for i in unseen])",
        "        pass",
        ("branches dp=2 + small buckets",),
    ),
    Mistake(
        "a replica's own parameters are kept in the memory that the agreed ones take",
        "sync/local.py",
        "        own = [p.detach().clone() for p in self.parameters]",
        "        own = [p.detach() for p in self.parameters]",
        (_LOCAL,),
    ),
    Mistake(
        "a checkpoint holds the agreed parameters of a moment that is over",
        "state/checkpoint.py",
        "own.clone() if engine.local_steps else own",
        "own",
        (_LOCAL,),
    ),
    Mistake(
        "buffers are remembered in their own memory",
        "engine/guard.py",
        "[(buffer, buffer.clone()) for buffer in self.model.buffers()]",
        "[(buffer, buffer) for buffer in self.model.buffers()]",
        ("mlp dp=1 + skip", "mlp dp=2 + skip + loader processes"),
    ),
    Mistake(
        "an update is made although its gradient overflowed",
        "engine/guard.py",
        "        if math.isfinite(loss) and (isinstance(norm, LateNorm) or math.isfinite(norm)):",
        "        if math.isfinite(loss):",
        ("fp16_with_a_loss_scale dp=1",),
    ),
)

_DEVICES = (
    Mistake(
        "batches stay on the host",
        "job/batch.py",
        '    if device.type == "cpu" and dtype is None and not channels_last:',
        "    if dtype is None and not channels_last:",
        ("mlp dp=1 + rewind",),
    ),
    Mistake(
        "the buffer of the gradients is in the host's memory",
        "comm/group.py",
        "        return torch.zeros(numel, dtype=dtype, device=self.device)",
        "        return torch.zeros(numel, dtype=dtype)",
        ("gpt dp=2",),
    ),
    Mistake(
        "coded gradients are in the host's memory",
        "sync/compress/compressor.py",
        "dtype=torch.uint8, device=group.device)",
        "dtype=torch.uint8)",
        ("gpt dp=2 compress=int8",),
    ),
    Mistake(
        "the rounding of a codec draws from the host's generator",
        "sync/compress/compressor.py",
        "torch.Generator(group.device).manual_seed",
        "torch.Generator().manual_seed",
        ("gpt dp=2 compress=int8", "gpt dp=2 compress=int4"),
    ),
    Mistake(
        "the flags of used parameters are on the host",
        "split/fsdp.py",
        "torch.float32, torch.device(devices.device_type)",
        'torch.float32, torch.device("cpu")',
        ("gpt fsdp=2",),
    ),
    Mistake(
        "counts of an expert's tokens are on the host",
        "job/zoo/models.py",
        "torch.zeros(len(self.taken) + 1, dtype=torch.int64, device=index.device)",
        "torch.zeros(len(self.taken) + 1, dtype=torch.int64)",
        ("moe ep=2",),
    ),
    Mistake(
        "a loop's own weights of its losses are on the host",
        "run/own_loop/optimizer_steps.py",
        "mean = (own * share).to(self.device) if share",
        "mean = (own * share).cpu() if share",
        ("own_backward dp=2",),
    ),
    Mistake(
        "an evaluation moves the device's random numbers on",
        "engine/evaluation.py",
        "                forked_random(compute.device),\n",
        "",
        ("dropout dp=2 + resume + evaluate",),
    ),
    Mistake(
        "the device's random numbers are not restored",
        "state/rank_state.py",
        "set_random_state(",
        "(lambda *_: None)(",
        ("dropout dp=1 + resume + checkpoints", "dropout dp=2 + resume + evaluate"),
    ),
)

MISTAKES = (*_WAITS, *_STREAMS, *_STAGING, *_DEVICES)
