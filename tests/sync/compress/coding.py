"""Code and decode numbers in one process, for the tests of the codecs."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sync.compress.codecs import ALIGNMENT, Codec


def coded_and_back(codec: Codec, rows: Tensor) -> Tensor:
    """What `codec` makes of `rows` (k, numel). The coded rows lie in a larger message, as they do on their way."""
    message = torch.full((len(rows), codec.nbytes(rows.shape[1]) + 2 * ALIGNMENT), 77, dtype=torch.uint8)
    part = message[:, ALIGNMENT:-ALIGNMENT]
    codec.encode(rows.clone(), part)
    back = torch.full_like(rows, torch.nan)
    codec.decode(part, back)
    assert (message[:, :ALIGNMENT] == 77).all(), "bytes before the coded row were written"
    assert (message[:, -ALIGNMENT:] == 77).all(), "bytes after the coded row were written"
    return back
