"""Flight recorder of the simulated accelerator: the newest collectives, in the form of torch's own recorder."""

from __future__ import annotations

import pickle
import time
import traceback
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch._C._distributed_c10d as c10d
from torch import Tensor

from simulated.lane import Operation, Progress

_NAMES = {"float32": "Float", "float64": "Double", "bfloat16": "BFloat16", "int64": "Long", "uint8": "Byte"}
# not the operations themselves, which keep the memory of their group
_entries: deque[tuple[dict[str, Any], Progress]] = deque(maxlen=2000)


def record(group: str, number: int, name: str, tensors: Sequence[Tensor], operation: Operation, *, p2p: bool) -> None:
    """Note a collective or message at its call, with the stack of the call."""
    kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    stack = list(reversed(traceback.extract_stack()[:-2]))
    entry = {
        "process_group": (group, ""),
        "collective_seq_id": number,
        "is_p2p": p2p,
        "profiling_name": f"simccl:{name.partition(' ')[0]}",
        "input_sizes": [list(tensor.shape) for tensor in tensors],
        "input_dtypes": [_NAMES.get(kind, kind) for kind in kinds],
        "time_created_ns": time.time_ns(),
        "retired": False,
        "frames": [{"name": frame.name, "filename": frame.filename, "line": frame.lineno} for frame in stack],
    }
    _entries.append((entry, operation.progress))


def dump(collectives: bool = True, stacks: bool = True, active: bool = False) -> bytes:
    """Dump the records in the form of torch's `_dump_nccl_trace`.

    An operation that failed stays unfinished, also when its handle is gone.
    """
    entries = [one | {"state": "completed" if progress.finished else "scheduled"} for one, progress in _entries]
    return pickle.dumps({"entries": entries})


def register() -> None:
    """Register the recorder beside torch's recorders of other devices; a second call does nothing."""
    c10d._dump_fr_trace = dump  # type: ignore[attr-defined]  # noqa: SLF001 - torch has no other place
