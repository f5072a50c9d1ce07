"""Embeddings with `max_norm`: all ranks renormalise the rows that any rank looked up."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


def has_max_norm(module: nn.Module) -> bool:
    """True if a module is an embedding that renormalises the rows that it looks up."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


class MaxNorm:
    """Renormalises embedding rows in agreement, in place of torch's forward pass.

    A row is shortened once per step, before it is looked up for the first time, and before the update on the ranks that
    did not look it up. All ranks do the same to the same bits, so they keep the same parameters.
    """

    def __init__(self, engine: Engine) -> None:
        self.group = engine.group
        alone = engine.local_steps or engine.split is not None or self.group.size == 1
        self.tables = [] if alone else [_Table(module) for module in engine.model.modules() if has_max_norm(module)]

    def agree(self) -> None:
        """Shorten the rows that only other ranks looked up since the last update."""
        for table in self.tables:
            anywhere = table.seen.clone()
            self.group.all_reduce(anywhere, "max")
            table.shorten((anywhere > table.seen).nonzero()[:, 0])
            table.seen.zero_()

    def close(self) -> None:
        """Let the embeddings do it themselves again."""
        for table in self.tables:
            table.close()
        self.tables = []


class _Table:
    """One embedding.

    Attributes:
        seen: 1 for each row that this rank has looked up since the last update, else 0.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.max_norm = module, module.max_norm
        module.max_norm = None
        self.seen = torch.zeros(module.num_embeddings, device=module.weight.device)
        self._hook = module.register_forward_pre_hook(partial(_look_up, self), with_kwargs=True)

    def shorten(self, rows: Tensor) -> None:
        """Bring rows that are longer than `max_norm` to that length."""
        if len(rows):
            with torch.no_grad():
                torch.embedding_renorm_(self.module.weight.detach(), rows, self.max_norm, self.module.norm_type)

    def close(self) -> None:
        self._hook.remove()
        self.module.max_norm = self.max_norm


def _look_up(table: _Table, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    given: Tensor = args[0] if args else keywords["input"]
    rows = given.detach().reshape(-1).unique().long()
    rows = rows[table.seen[rows] == 0]
    table.shorten(rows)
    table.seen[rows] = 1.0
