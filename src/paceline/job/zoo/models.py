"""Models of the zoo: GPT, mixtures of experts, a perceptron and a convolutional network."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch._compile import _disable_dynamo as _not_compiled
from torch.autograd.function import Function, FunctionCtx

from paceline.device import widest_float
from paceline.errors import DataError, JobError
from paceline.job.experts import by_expert, combined, without_values
from paceline.job.zoo.packed import attend, causal_documents, lengths, numbered


class GPT(nn.Module):
    """GPT, which maps tokens (n, t), t ≤ `context`, to next-token logits (n, t, vocab).

    The default model has about 3.3 M parameters.

    Attributes:
        pieces: number of ranks over which each sequence is divided (cp).

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
                "model.hidden_not_multiple",
                "model {name}: hidden ({hidden}) should be a multiple of heads ({heads}), such as {fitting}",
                name=name,
                hidden=hidden,
                heads=heads,
                fitting=fitting,
            )
        self.context, self.heads, self.pieces = context, heads, 1
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(context, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise(layers)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return logits (n, t, vocab) for the token that follows each token of `input_ids` (n, t).

        Args:
            input_ids: tokens, integers from 0 to `vocab` - 1.
            position_ids: positions of the tokens; the default is 0 to t - 1. Positions (n, t) that start again within a
                sequence divide it into documents, and a token attends only to its own document. If the rank holds
                only a part of each sequence (cp), the positions (1, t) are those of the rank's tokens.

        Raises:
            DataError: the sequences are longer than `context`.
        """
        length = input_ids.shape[1]
        if length > self.context:
            raise DataError(
                "model.context_exceeded",
                "a sequence of {length} tokens is longer than the model's context of {context}. Give the model "
                "context: {length}.",
                length=length,
                context=self.context,
            )
        has_documents = position_ids is not None and self.pieces == 1
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device)
        x = self.dropout(self.tokens(input_ids) + self.positions(position_ids))
        within = self._within(numbered(position_ids.expand(input_ids.shape)), x) if has_documents else ()
        for block in self.blocks:
            x = block(x, *within)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _within(self, documents: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """Return the documents of packed sequences in the form that the blocks take."""
        return (causal_documents(documents, x, self.heads, self.dropout.p if self.training else 0.0),)

    def _initialise(self, layers: int) -> None:
        """Initialise like GPT-2, which scales residual projections down with the number of residual additions."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                added = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class Block(nn.Module):
    """Attention and an MLP with pre-normalization, both added to the residual stream (n, t, hidden)."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, within: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Map (n, t, hidden) to (n, t, hidden).

        Args:
            within: the documents of packed sequences, in the form that `attend` takes.
            documents: number of each token's document, shape (n, t), for a mixture of experts.
        """
        x = x + self.attention(self.attention_norm(x), within)
        normed = self.mlp_norm(x)
        added: Tensor = self.mlp(normed) if documents is None else self.mlp(normed, documents)
        return x + added


class Attention(nn.Module):
    """Causal self-attention with `heads` heads."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.out_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, within: Tensor | None = None) -> Tensor:
        """Map (n, t, hidden) to (n, t, hidden); each position attends to itself and earlier positions.

        `within` limits attention to documents (see `attend`).
        """
        n, t, hidden = x.shape
        projected = self.query_key_value(x).view(n, t, 3, self.heads, hidden // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = attend(query, key, value, within, self.dropout if self.training else 0.0)
        out: Tensor = self.out_dropout(self.out(mixed.transpose(1, 2).reshape(n, t, hidden)))
        return out


def mlp(*, hidden: PositiveInt = 1024, classes: PositiveInt = 10) -> nn.Module:
    """Build a perceptron with ReLU and the layer sizes 784, `hidden` and `classes`.

    The perceptron maps images of 1 x 28 x 28 to logits (n, classes).
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def cifar_cnn(*, classes: PositiveInt = 10) -> nn.Module:
    """Build two convolutions and two linear layers for images of 3 x 32 x 32.

    The output has the shape (n, classes). With 10 classes, the network has 268,650 parameters.
    """
    head = nn.Sequential(nn.Linear(CIFAR_FEATURES, 128), nn.ReLU(), nn.Linear(128, classes))
    return nn.Sequential(*cifar_convolutions(), *head)


CIFAR_FEATURES = 32 * 8 * 8


def cifar_convolutions() -> nn.Sequential:
    """Build the convolutional part of `cifar_cnn`, which maps (n, 3, 32, 32) to (n, 2048)."""
    return nn.Sequential(
        nn.Conv2d(3, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )


class MoE(GPT):
    """GPT with mixtures of experts, which maps tokens (n, t) to next-token logits (n, t, vocab).

    A sequence has at most `context` tokens. The default model has about 18 M parameters.

    Args:
        experts: number of MLPs in each block.
        top_k: number of experts for each token.
        capacity: factor for the maximum load of an expert. Of a sequence of t tokens, an expert processes at most the
            first ceil(capacity * t * top_k / experts) tokens that chose it, so no token depends on later tokens.
            Further tokens skip the expert. In a packed sequence, this limit applies to each document. 0 means no limit.
        balance: weight of the load-balancing loss (see `Router`), which is added to the job's loss for training but is
            not included in the reported loss.

    Raises:
        JobError: `hidden` is not a multiple of `heads`, or `top_k` is larger than `experts`.
    """

    def __init__(
        self,
        *,
        vocab: PositiveInt = 256,
        context: PositiveInt = 128,
        layers: PositiveInt = 4,
        hidden: PositiveInt = 256,
        heads: PositiveInt = 4,
        experts: PositiveInt = 8,
        top_k: PositiveInt = 2,
        capacity: Annotated[float, Field(ge=0)] = 0.0,
        balance: Annotated[float, Field(ge=0)] = 0.01,
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    ) -> None:
        if top_k > experts:
            raise JobError(
                "model.top_k",
                "model moe: top_k is {top_k}, but a token can go to at most {experts} experts",
                top_k=top_k,
                experts=experts,
            )
        super().__init__(vocab=vocab, context=context, layers=layers, hidden=hidden, heads=heads, dropout=dropout)
        for block in self.blocks:
            assert isinstance(block, nn.Module)
            block.mlp = Mixture(
                Router(hidden, experts, top_k, capacity, balance), Experts(experts, hidden, 4 * hidden, layers), dropout
            )

    def _within(self, documents: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (*super()._within(documents, x), documents)


class Mixture(nn.Module):
    """Mixture of experts, which returns the weighted sum (n, t, hidden) of each token's experts.

    For a token without an expert, the sum is zero.
    """

    def __init__(self, router: Router, experts: Experts, dropout: float) -> None:
        super().__init__()
        self.router, self.experts, self.dropout = router, experts, nn.Dropout(dropout)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        n, t, hidden = x.shape
        top_k_index, top_k_weights = self.router(x, documents)
        k = top_k_index.shape[-1]
        mixed = self.experts(x.reshape(n * t, hidden), top_k_index.view(n * t, k), top_k_weights.view(n * t, k))
        out: Tensor = self.dropout(mixed.view(n, t, hidden))
        return out


class Router(nn.Module):
    """Router that chooses the `top_k` most probable experts for each token.

    The probabilities are the softmax of a linear projection of the token.

    *Load-balancing loss.* A sequence, or a document of a packed sequence, of t tokens makes t * top_k choices. f_i is
    the fraction of these choices that select expert i, and P_i is the mean probability of expert i. The loss is
    `experts` times the sum of f_i * P_i over all experts. It is 1 for a balanced load, and `experts` if one expert gets
    all tokens (Fedus et al., 2021, eq. 4; per sequence as in DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20). A loss from
    means over a batch would depend on how the batch is divided; a mean over sequences does not. The backward pass adds
    the gradient of this loss without its value (see `_Besides`), so every pipeline stage adds the loss of its own
    layers. If a sequence is divided over ranks (cp), the fractions f_i cover the whole sequence, but the capacity
    applies to each part.
    """

    taken: Tensor
    dropped: Tensor

    def __init__(self, hidden: int, experts: int, top_k: int, capacity: float, balance: float) -> None:
        super().__init__()
        self.top_k, self.capacity, self.balance = top_k, capacity, balance
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(experts, hidden), std=0.02))
        self.register_buffer("taken", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), persistent=False)
        # for the next forward pass; not a buffer, because its values may differ between ranks
        self.sequence_weight: Tensor | None = None
        self.token_weight: Tensor | None = None
        self.pieces = 1  # number of ranks over which each sequence is divided
        self.sum_over_pieces: Callable[[Tensor], object] = lambda counts: None

    def forward(self, x: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return experts and weights, both (n, t, top_k), for tokens (n, t, hidden).

        `documents` has the number of each token's document, shape (n, t), if the sequences are packed.

        A dropped choice has the expert index `experts`. The weights of a token's experts sum to 1 before choices are
        dropped. With `top_k` = 1, the weight is the expert's probability, because a constant weight would give the
        router no gradient.
        """
        experts = len(self.weight)
        # routing in bfloat16 is unstable (Fedus et al., 2021, section 2.4)
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            probabilities = F.linear(x.to(wide), self.weight.to(wide)).softmax(-1)
        weights, index = probabilities.topk(self.top_k, dim=-1)
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.training and self.balance and torch.is_grad_enabled():
            weights = _Besides.apply(weights, self._balance_loss(probabilities, index, documents))
        if self.capacity:
            full = self._beyond_capacity(index, experts, documents)
            weights, index = weights.masked_fill(full, 0.0), index.masked_fill(full, experts)
        if self.training:
            self._count(index)
        return index, weights

    def _beyond_capacity(self, index: Tensor, experts: int, documents: Tensor | None) -> Tensor:
        """Return a mask (n, t, k) of the choices that exceed an expert's capacity.

        The capacity applies to each sequence, or to each document of a packed sequence.
        """
        n, t, _ = index.shape
        if documents is None:
            rows = torch.arange(n, device=index.device).view(n, 1, 1)
            return _earlier(index + experts * rows) >= math.ceil(self.capacity * t * self.top_k / experts)
        tokens = lengths(documents).to(widest_float(index.device))
        most = (self.capacity * tokens * self.top_k / experts).ceil()
        return _earlier(index + experts * documents.unsqueeze(2)) >= most.unsqueeze(2)

    def _balance_loss(self, probabilities: Tensor, index: Tensor, documents: Tensor | None) -> Tensor:
        if documents is not None:
            return self.balance * self._loss_of_documents(probabilities, index, documents)
        n, t, experts = probabilities.shape
        chosen = index.reshape(n, t * self.top_k)
        ones = torch.ones_like(chosen, dtype=probabilities.dtype)
        share = torch.zeros_like(probabilities[:, 0]).scatter_add(1, chosen, ones)
        if self.pieces > 1 and not without_values(share):
            self.sum_over_pieces(share)
        tokens = t * self.pieces
        of_sequence = experts * (share / (tokens * self.top_k) * probabilities.sum(1) / tokens).sum(-1)
        given = self.sequence_weight
        weight = 1 / max(n, 1) if given is None else given.to(of_sequence.dtype)
        return self.balance * (weight * of_sequence).sum()

    def _loss_of_documents(self, probabilities: Tensor, index: Tensor, documents: Tensor) -> Tensor:
        """Return the weighted sum of the documents' load-balancing losses."""
        n, t, experts = probabilities.shape
        dtype, numbers = probabilities.dtype, documents.flatten()
        ones = torch.ones(index.numel(), dtype=dtype, device=index.device)
        chosen = torch.zeros(n * t * experts, dtype=dtype, device=index.device)
        chosen = chosen.scatter_add(0, (index + experts * documents.unsqueeze(2)).flatten(), ones).view(-1, experts)
        tokens = lengths(documents).to(dtype)
        # summed over the tokens of a document, this is the document's loss
        of_token = experts / self.top_k * (chosen[documents] * probabilities).sum(-1) / tokens.square()
        if self.token_weight is not None:
            of_document = torch.zeros(n * t, dtype=dtype, device=index.device)
            weight = of_document.scatter_add(0, numbers, self.token_weight.to(dtype).flatten())[documents]
        else:
            given = self.sequence_weight
            of_sequence = 1 / max(n, 1) if given is None else given.to(dtype).reshape(-1, 1)
            weight = of_sequence * tokens / t
        return (weight * of_token).sum()

    @_not_compiled
    @torch.no_grad()
    def _count(self, index: Tensor) -> None:
        if torch._C._current_graph_task_id() != -1 or without_values(index):
            # a recomputation in the backward pass must not count the tokens again
            return
        chosen = index.flatten()
        counts = torch.zeros(len(self.taken) + 1, dtype=torch.int64, device=index.device)
        counts.index_add_(0, chosen, torch.ones_like(chosen))
        self.taken += counts[:-1]
        self.dropped += counts[-1]


class _Besides(Function):
    """Autograd function that returns `x` and adds the gradient of `loss` in the backward pass."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(ctx.saved_tensors[0])


def _earlier(groups: Tensor) -> Tensor:
    """Return the number of earlier choices in the group of each choice (n, t, k)."""
    place = groups.flatten()
    of_place, order = place.sort(stable=True)
    first = torch.searchsorted(of_place, of_place)  # position in `order` at which each choice's group begins
    before = torch.arange(len(order), device=groups.device) - first
    return torch.empty_like(before).scatter(0, order, before).view(groups.shape)


class Experts(nn.Module):
    """MLPs with GELU, in which one parameter has the matrices of all experts.

    The module has the same calling convention as the mixtures of transformers.

    Attributes:
        num_experts: number of experts on this rank.
        up: input projections, shape (experts, inner, hidden).
        down: output projections, shape (experts, hidden, inner).
    """

    def __init__(self, experts: int, hidden: int, inner: int, layers: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(nn.init.normal_(torch.empty(experts, inner, hidden), std=0.02))
        self.down = nn.Parameter(nn.init.normal_(torch.empty(experts, hidden, inner), std=0.02 / math.sqrt(2 * layers)))

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs for each token.

        `hidden` has the tokens, shape (tokens, hidden). `top_k_index` and `top_k_weights` have the experts of each
        token and their weights, shape (tokens, k).

        The expert index `num_experts` means no expert.
        """
        order, counts = by_expert(top_k_index, self.num_experts)
        sizes = counts.tolist()
        order = order[: sum(sizes)]
        rows = hidden[order // top_k_index.shape[1]].split(sizes)
        made = [
            F.linear(F.gelu(F.linear(r, up)), down)
            for r, up, down in zip(rows, self.up.unbind(), self.down.unbind(), strict=True)
        ]
        return combined(torch.cat(made), order, top_k_weights).to(hidden.dtype)
