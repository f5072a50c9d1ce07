"""Decoder-only transformer in plain PyTorch, shaped like GPT-2 (Radford et al., 2019).

Pre-norm, with a tied head.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from paceline.errors import DataError, JobError


class GPT(nn.Module):
    """Tokens (n, t) with t up to `context`, to the logits of each next token (n, t, vocab).

    About 3.3 M parameters by default.

    Raises:
        JobError: `hidden` is not a multiple of `heads`.
    """

    def __init__(
        self,
        *,
        vocab: PositiveInt = 256,
        context: PositiveInt = 128,
        layers: PositiveInt = 4,
        hidden: PositiveInt = 256,
        heads: PositiveInt = 4,
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    ) -> None:
        super().__init__()
        if hidden % heads:
            name, fitting = type(self).__name__.lower(), heads * max(1, round(hidden / heads))
            raise JobError(
                f"model {name}: hidden ({hidden}) should be a multiple of heads ({heads}), such as {fitting}"
            )
        self.context = context
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(context, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise(layers)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits (n, t, vocab) of the token after each of `tokens` (n, t), whole numbers below `vocab`.

        `position_ids` (1, t) are the tokens' places below `context`, where they are not 0 to t - 1: a rank may hold a
        part of a sequence.

        Raises:
            DataError: a sequence longer than `context`.
        """
        length = tokens.shape[1]
        if length > self.context:
            raise DataError(
                f"a sequence of {length} tokens is longer than the model's context of {self.context}; give the "
                f"model context: {length}"
            )
        if position_ids is None:
            position_ids = torch.arange(length, device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(position_ids))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _initialise(self, layers: int) -> None:
        """Initialise as GPT-2: residual projections are scaled down by the number of residual additions."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                added = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class Block(nn.Module):
    """Attention and an MLP, each added to the residual stream (n, t, hidden) and normalised before."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, hidden) to (n, t, hidden)."""
        x = x + self.attention(self.attention_norm(x))
        added: Tensor = self.mlp(self.mlp_norm(x))
        return x + added


class Attention(nn.Module):
    """Causal self-attention with `heads` heads."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.out_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, hidden) to (n, t, hidden); position i sees positions up to i."""
        n, t, hidden = x.shape
        query, key, value = (
            self.query_key_value(x).view(n, t, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        out: Tensor = self.out_dropout(self.out(mixed.transpose(1, 2).reshape(n, t, hidden)))
        return out
