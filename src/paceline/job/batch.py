"""Functions that move a batch to a device, split it, and find its target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.errors import DataError

# A tuple (inputs …, target), or a mapping of keyword arguments for the model, in which "labels" is the target.
Batch: TypeAlias = tuple[Tensor, ...] | list[Tensor] | Mapping[str, Tensor]


def rows(batch: Batch | None) -> int:
    """Return the number of samples in the batch (dim 0); 0 for None.

    None is the share of a rank without samples.
    """
    if type(batch) is tuple and batch and isinstance(batch[-1], Tensor) and batch[-1].dim():
        return batch[-1].shape[0]
    if batch is None:
        return 0
    whole = _tensors(batch) if isinstance(batch, (tuple, list, Mapping)) else ()
    *_, last = whole or [None]
    if not isinstance(last, Tensor):
        inside = f" that ends with a {type(last).__name__}" if whole else ""
        raise DataError(
            "data.batch_form",
            'a batch must be a tuple of tensors (inputs …, target) or a dict of tensors with "labels", but this '
            "batch is a {class_name}{inside}. Change the dataset so that it returns such samples, or change the "
            "collate_fn so that it returns such batches.",
            class_name=type(batch).__name__,
            inside=inside,
        )
    return len(last)


def split(batch: Batch, microbatches: int) -> Iterator[Batch]:
    """Split a batch in order into `microbatches` of nearly equal size, and omit empty ones."""
    if microbatches == 1:
        yield batch
        return
    columns = [t.tensor_split(microbatches) for t in _tensors(batch)]
    for i in range(min(microbatches, rows(batch))):
        own = [column[i] for column in columns]
        yield dict(zip(batch, own, strict=True)) if isinstance(batch, Mapping) else tuple(own)


def target_of(batch: Batch) -> Any:
    """Return the target, the tensor that the loss compares with the model's output.

    Raises:
        DataError: the batch is a mapping without "labels", or a tuple without a target.
    """
    if type(batch) is not tuple and isinstance(batch, Mapping):
        if "labels" not in batch:
            raise DataError(
                "data.dict_without_labels",
                'a dict sample needs its target under "labels", but this sample has the keys {keys}',
                keys=list(batch),
            )
        return batch["labels"]
    if len(batch) < 2:
        raise DataError(
            "data.sample_without_target",
            "a sample must be (input, target) or (input, …, target), but this one has a single part. If there is "
            "no target, repeat the input.",
        )
    return batch[-1]


def place(batch: Batch, device: torch.device, *, dtype: torch.dtype | None, channels_last: bool) -> Batch:
    """Move the batch to `device`.

    Floating-point tensors are converted to `dtype` if it is given. With `channels_last`, 4-D tensors (images) are
    converted to the channels-last memory format.
    """
    if device.type == "cpu" and dtype is None and not channels_last:
        return batch
    batch = _copied_together(batch, device) or batch

    def move(t: Tensor) -> Tensor:
        layout = torch.channels_last if channels_last and t.dim() == 4 else torch.preserve_format
        return t.to(device, dtype if t.is_floating_point() else None, non_blocking=True, memory_format=layout)

    if isinstance(batch, Mapping):
        return {k: move(v) for k, v in batch.items()}
    return tuple(move(t) for t in batch)


def on_device(batch: Any, device: torch.device) -> Any:
    """Move all tensors of a batch, however nested, to `device`."""
    if device.type == "cpu" or batch is None:
        return batch
    if (copied := _copied_together(batch, device)) is not None:
        return copied
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if callable(move := getattr(batch, "to", None)):  # for example a BatchEncoding of Hugging Face, or a PackedSequence
        return move(device)
    if isinstance(batch, Mapping):
        return {key: on_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        values = [on_device(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def pinned(batch: Any) -> Any:
    """Copy the tensors of a batch into one block of pinned memory.

    `place` and `on_device` then copy the whole batch to the device in one transfer. Batches other than a plain tuple,
    list or dict of contiguous tensors are pinned tensor by tensor.
    """
    tensors = _plain_tensors(batch)
    if tensors is None:
        from torch.utils.data._utils.pin_memory import pin_memory  # only with accelerators

        return pin_memory(batch)
    block = torch.empty(_block_bytes(tensors), dtype=torch.uint8, pin_memory=True)
    copies, start = [], 0
    for tensor in tensors:
        copies.append(block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor))
        start += _aligned(tensor.nbytes)
    return dict(zip(batch, copies, strict=True)) if type(batch) is dict else type(batch)(copies)


def _copied_together(batch: Any, device: torch.device) -> Any:
    """Copy a batch from `pinned` to the device in one transfer; return None for others."""
    tensors = None if device.type == "cpu" else _plain_tensors(batch)
    if tensors is None:
        return None
    storage = tensors[0].untyped_storage()
    if storage.nbytes() != _block_bytes(tensors) or any(t.untyped_storage()._cdata != storage._cdata for t in tensors):
        return None
    block = torch.empty(0, dtype=torch.uint8).set_(storage).to(device, non_blocking=True).untyped_storage()
    # `set_` instead of views, because autograd takes an in-place change of one view for a change of all views
    copies = [
        torch.empty(0, dtype=t.dtype, device=device).set_(block, t.storage_offset(), t.shape, t.stride())
        for t in tensors
    ]
    return dict(zip(batch, copies, strict=True)) if type(batch) is dict else type(batch)(copies)


def _plain_tensors(batch: Any) -> list[Tensor] | None:
    """Return the tensors of a batch that `pinned` packs; None for any other batch."""
    if type(batch) not in (tuple, list, dict) or len(batch) < 2:
        return None
    tensors = list(_tensors(batch))
    plain = all(type(t) is Tensor and t.device.type == "cpu" and t.layout == torch.strided for t in tensors)
    return tensors if plain and all(t.is_contiguous() and not t.requires_grad for t in tensors) else None


def _block_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


_ALIGNED_BYTES = 512  # alignment of torch's allocations on GPUs


def nonfinite_rows(batch: Batch | None) -> list[int]:
    """Return the indices of the samples that have NaN or Inf in any floating-point tensor."""
    if batch is None:
        return []
    bad: set[int] = set()
    for column in _tensors(batch):
        if column.is_floating_point():
            bad.update((~column.reshape(len(column), -1).isfinite().all(dim=1)).nonzero().flatten().tolist())
    return sorted(bad)


def _tensors(batch: Batch) -> Iterable[Any]:
    return batch.values() if isinstance(batch, Mapping) else batch
