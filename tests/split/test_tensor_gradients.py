"""No gradient loses the part of another rank, whichever path it takes out of a divided computation."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranks import Ranks
from tensor_parity import Made, gradients_agree

HIDDEN, HEADS, TOKENS = 16, 4, 6


class Attention(nn.Module):
    """Attention whose scores a subclass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def scores(self, scores: Tensor) -> Tensor:
        return scores

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        weights = self.scores(q @ k.transpose(-2, -1) / math.sqrt(c // HEADS)).softmax(-1)
        out: Tensor = self.out((weights @ v).transpose(1, 2).reshape(n, t, c))
        return out


class BiasOfBuffer(Attention):
    """Adds a bias that an MLP makes of a constant buffer: one for each head, or one for all."""

    def __init__(self, biases: int) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.randn(TOKENS * TOKENS, 2))
        self.net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, biases))

    def scores(self, scores: Tensor) -> Tensor:
        bias: Tensor = self.net(self.offsets).view(TOKENS, TOKENS, -1).permute(2, 0, 1)
        return scores + bias


class Cosine(BiasOfBuffer):
    """Swin V2's attention: normalised queries and keys, a scale for each head, and a bias made of a buffer."""

    def __init__(self) -> None:
        super().__init__(HEADS)
        self.scale = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        weights = self.scores(scores * self.scale.exp()).softmax(-1)
        out: Tensor = self.out((weights @ v).transpose(1, 2).reshape(n, t, c))
        return out


class Residual(nn.Module):
    """Modules added one after the other to what they read, and a head."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.ModuleList(modules), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 5)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.inner:
            x = x + module(self.norm(x))
        out: Tensor = self.head(x)
        return out


def tokens() -> Tensor:
    return torch.randn(2, TOKENS, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def batch() -> tuple[Tensor, Tensor]:
    return tokens(), tokens()


def bias_for_each_head() -> Made:
    return Residual(BiasOfBuffer(HEADS), BiasOfBuffer(HEADS)), batch()


def bias_for_all_heads() -> Made:
    return Residual(BiasOfBuffer(1), BiasOfBuffer(1)), batch()


def cosine() -> Made:
    return Residual(Cosine(), Cosine()), batch()


def swin_v2() -> Made:
    import transformers

    config = transformers.Swinv2Config(  # type: ignore[call-arg]
        image_size=16,
        patch_size=4,
        embed_dim=16,
        depths=[1],
        num_heads=[2],
        window_size=4,
        num_labels=5,
        drop_path_rate=0.0,
    )
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return transformers.Swinv2ForImageClassification(config).train(), {"pixel_values": pixels}


def all_agree(cases: list[Callable[[], Made]]) -> list[dict[str, str]]:
    """`gradients_agree` for several models in the same processes, as the start of these takes longest."""
    done = []
    for make in cases:
        try:
            done.append(gradients_agree(make).done)
        except Exception as error:
            raise AssertionError(f"{make.__name__}: {error}") from error
    return done


def test_what_is_made_of_a_constant_and_read_by_divided_heads_learns_as_in_one_process(ranks: Ranks) -> None:
    """The gradient of a bias that all heads read is a partial sum on each rank.

    Also where its own layers are divided.
    """
    for divided in ranks(2, all_agree, [bias_for_each_head, bias_for_all_heads, cosine])[0]:
        assert divided["inner.0.qkv"] == "column"


@pytest.mark.slow
def test_swin_v2_learns_as_in_one_process(ranks: Ranks) -> None:
    (divided,) = ranks(2, all_agree, [swin_v2])[0]
    assert any("attention" in path for path in divided)
