"""Plain modules for `benchmarks/models.py`, written as people write them.

No base class, no thought of how they are split.
"""

# mypy: disable-error-code="no-any-return, attr-defined, index, union-attr, operator, arg-type, misc"

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from models_data import CLASSES, FEATURES, TOKENS, VOCAB

WIDTH, HEADS = 32, 4


def mlp() -> nn.Module:
    """Three layers in a Sequential."""
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES))


class Convolutions(nn.Module):
    """Convolutions, batch norm, pooling and a flat classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        )
        self.classifier = nn.Linear(16 * 4 * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).view(x.size(0), -1))


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(4, after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(4, after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(4, after))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResidualNet(nn.Module):
    """Residual blocks with group norm, some of which shrink the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList([_Residual(8, 8, 1), _Residual(8, 16, 2), _Residual(16, 16, 1)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(dim=(2, 3)))


class UNet(nn.Module):
    """Down and up again, with what was seen on the way down joined on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.bottom = nn.Conv2d(16, 16, 3, padding=1)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.join2, self.join1 = nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.down1(x))
        second = F.relu(self.down2(F.max_pool2d(first, 2)))
        x = F.relu(self.bottom(F.max_pool2d(second, 2)))
        x = F.relu(self.join2(torch.cat([self.up2(x), second], dim=1)))
        x = F.relu(self.join1(torch.cat([self.up1(x), first], dim=1)))
        return self.out(x)


class EncoderClassifier(nn.Module):
    """torch's own TransformerEncoder, and the mean of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(1, TOKENS, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens) + self.position).mean(1))


class _GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (y.view(n, t, HEADS, c // HEADS).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(n, t, c))
        return x + self.mlp(self.ln_2(x))


class SmallGPT(nn.Module):
    """A GPT with learned positions counted inside, and the embedding's weight as its head."""

    def __init__(self) -> None:
        super().__init__()
        modules = {"wte": nn.Embedding(VOCAB, WIDTH), "wpe": nn.Embedding(64, WIDTH)}
        self.transformer = nn.ModuleDict(
            {**modules, "h": nn.ModuleList([_GPTBlock() for _ in range(2)]), "ln_f": nn.LayerNorm(WIDTH)}
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer["wte"](idx) + self.transformer["wpe"](pos)
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


class _HandMade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH),
        )
        self.register_buffer("mask", torch.tril(torch.ones(TOKENS, TOKENS)))

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(n, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("nhid,nhjd->nhij", q, k) / math.sqrt(c // HEADS)
        scores = scores.masked_fill(self.mask[:t, :t] == 0, float("-inf"))
        mixed = torch.einsum("nhij,nhjd->nhid", scores.softmax(-1), v)
        return x + self.out(mixed.transpose(1, 2).reshape(n, t, c))


class EinsumAttention(nn.Module):
    """Attention by einsum and softmax, with a causal mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(_HandMade() for _ in range(2)))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))))


class RotaryGQA(nn.Module):
    """A Llama of one's own: RMS norm, rotary positions as complex numbers, fewer keys than queries, gated MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([_RotaryBlock() for _ in range(2)])
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        angles = torch.outer(torch.arange(64).float(), 1.0 / 10_000 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("freqs", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.freqs[: tokens.shape[1]])
        return self.output(self.norm(x))


class _RotaryBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wq, self.wkv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.w1, self.w2, self.w3 = (nn.Linear(a, b, bias=False) for a, b in ((WIDTH, 64), (64, WIDTH), (WIDTH, 64)))

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        n, t, c = x.shape
        h = self.norm1(x)
        q, (k, v) = self.wq(h).view(n, t, HEADS, 8), self.wkv(h).view(n, t, 2, HEADS // 2, 8).unbind(2)
        q, k = _rotated(q, freqs), _rotated(k, freqs)
        q, k, v = (
            q.transpose(1, 2),
            k.transpose(1, 2).repeat_interleave(2, 1),
            v.transpose(1, 2).repeat_interleave(2, 1),
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(h.transpose(1, 2).reshape(n, t, c))
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def _rotated(x: Tensor, freqs: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * freqs[:, None]
    return torch.view_as_real(turned).flatten(3).type_as(x)


class LanguageLSTM(nn.Module):
    """A language model with a two-layer LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.lstm(self.embedding(x))
        return self.head(output)


class SeriesGRU(nn.Module):
    """A class from the last state of a bidirectional GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, 16, batch_first=True, bidirectional=True)
        self.fc1, self.fc2 = nn.Linear(32, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        _, state = self.gru(x)
        return self.fc2(torch.tanh(self.fc1(torch.cat([state[0], state[1]], 1))))


class Autoencoder(nn.Module):
    """An encoder and a decoder of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1), nn.LeakyReLU(0.2)
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class Mixer(nn.Module):
    """MLPs over patches and over channels in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.ModuleList([_MixerBlock(16) for _ in range(2)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class _MixerBlock(nn.Module):
    def __init__(self, patches: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.over_patches = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.over_channels = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.norm1(x).mT).mT
        return x + self.over_channels(self.norm2(x))


class Bare(nn.Module):
    """Weights in ParameterLists on the model itself, used by matrix products."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(FEATURES, 32), (32, 32), (32, CLASSES)]
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(a, b) / math.sqrt(a)) for a, b in sizes])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(b)) for _, b in sizes])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = torch.tanh(x @ weight + bias)
        return x * self.scale


class Siamese(nn.Module):
    """One trunk for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(64, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self.trunk(left), self.trunk(right)
        return self.head(torch.cat([(a - b).abs(), a * b], dim=-1))


def weight_normed() -> nn.Module:
    """Linear layers whose weight is a direction and a length."""
    first, second = weight_norm(nn.Linear(FEATURES, 32)), weight_norm(nn.Linear(32, 32))
    return nn.Sequential(first, nn.ELU(), second, nn.ELU(), nn.Linear(32, CLASSES))


def discriminator() -> nn.Module:
    """Convolutions under spectral norm, whose buffers change in every forward pass."""
    first, second = spectral_norm(nn.Conv2d(3, 8, 4, 2, 1)), spectral_norm(nn.Conv2d(8, 16, 4, 2, 1))
    return nn.Sequential(
        first, nn.LeakyReLU(0.1), second, nn.LeakyReLU(0.1), nn.Flatten(), spectral_norm(nn.Linear(256, CLASSES))
    )


class PositionBias(nn.Module):
    """Attention over a grid with a bias per head, which an MLP makes of a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias_mlp = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, HEADS, bias=False))
        self.head = nn.Linear(WIDTH, CLASSES)
        place = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij"), -1).view(16, 2)
        self.register_buffer("relative", (place[:, None] - place[None]) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        bias = self.bias_mlp(self.relative).permute(2, 0, 1)
        x = x + self.proj(((q @ k.mT / 3 + bias).softmax(-1) @ v).transpose(1, 2).reshape(n, t, c))
        return self.head(x.mean(1))


class TiedByUse(nn.Module):
    """The embedding's weight is used outside of it, as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(self.embedding(x)), self.embedding.weight)


class Universal(nn.Module):
    """One block that is applied again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(VOCAB, WIDTH), _GPTBlock(), nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


class TwicePlaced(nn.Module):
    """A list of blocks in which one block stands twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([_GPTBlock() for _ in range(4)])
        self.blocks[2] = self.blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recommender(nn.Module):
    """Tables for what is counted, an MLP for what is measured, and their products (DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(VOCAB, 16, mode="sum") for _ in range(4)])
        self.bottom = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + 10, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, measured: Tensor, counted: Tensor) -> Tensor:
        x = self.bottom(measured)
        rows = torch.stack([x, *(table(counted[:, i : i + 1]) for i, table in enumerate(self.tables))], dim=1)
        i, j = torch.tril_indices(5, 5, -1)
        return self.top(torch.cat([x, torch.bmm(rows, rows.mT)[:, i, j]], dim=1))


class NestedHeads(nn.Module):
    """Modules by name within modules by name, and an output that is a mapping."""

    def __init__(self) -> None:
        super().__init__()
        stages = {name: nn.ModuleDict({"fc": nn.Linear(32, 32), "norm": nn.LayerNorm(32)}) for name in ("low", "high")}
        self.stem, self.stages = nn.Linear(FEATURES, 32), nn.ModuleDict(stages)
        self.heads = nn.ModuleDict({"classes": nn.Linear(32, CLASSES), "size": nn.Linear(32, 1)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        for stage in self.stages.values():
            x = x + F.silu(stage["norm"](stage["fc"](x)))
        return {name: head(x) for name, head in self.heads.items()}


def two_losses(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """The classes, and the size of the class number."""
    return F.cross_entropy(output["classes"], target) + 0.1 * F.mse_loss(
        output["size"].squeeze(-1), target.to(output["size"].dtype)
    )


class Temporal(nn.Module):
    """Dilated causal convolutions over a series."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(FEATURES if i == 0 else 16, 16, 3, dilation=2**i) for i in range(3)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for i, conv in enumerate(self.convs):
            x = F.relu(conv(F.pad(x, (2 * 2**i, 0))))
        return self.head(x[:, :, -1])


class ListOfExperts(nn.Module):
    """A mixture whose experts are modules in a list, each given the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gate, self.head = (
            nn.Embedding(VOCAB, WIDTH),
            nn.Linear(WIDTH, 4, bias=False),
            nn.Linear(WIDTH, VOCAB),
        )
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(4)]
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        flat = x.view(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            out.index_add_(0, rows, expert(flat[rows]) * weights[rows, slots, None])
        return self.head(x + out.view_as(x))


class Translator(nn.Module):
    """torch's own Transformer, encoder and decoder, with the masks that it wants."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 64, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        return self.generator(
            self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        )


class CausalMultihead(nn.Module):
    """nn.MultiheadAttention with a causal mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.attention = nn.ModuleList([nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        x, t = self.embedding(tokens), tokens.shape[1]
        mask = torch.triu(torch.ones(t, t, dtype=torch.bool, device=tokens.device), 1)
        for attention, norm in zip(self.attention, self.norms, strict=True):
            h = norm(x)
            x = x + attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return self.head(x)


class Patches(nn.Module):
    """A vision transformer of one's own, with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.blocks = nn.ModuleList([_PatchBlock() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class _PatchBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(n, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c)
        x = x + self.gamma * self.proj(y)
        return x + self.gamma * self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Separable(nn.Module):
    """Depthwise and pointwise convolutions with squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.depthwise, self.pointwise = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 32, 1)
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.pointwise(self.depthwise(F.hardswish(self.stem(x)))))
        x = x * torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        return self.head(x.mean((2, 3)))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class OwnFunction(nn.Module):
    """An autograd function of one's own between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(FEATURES, 32), nn.Linear(32, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(_Square.apply(self.second(_Square.apply(self.first(x)))))


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward pass, by torch's own checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([_GPTBlock() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)
