"""A Hugging Face model on texts of different lengths: batches are padded, and every token that counts counts the same.

python padded_hf.py
torchrun --nproc-per-node 2 padded_hf.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import paceline

IGNORED = -100


def collate(texts: list[Tensor]) -> dict[str, Tensor]:
    """A batch as long as its longest text; what is filled up is neither attended to nor predicted."""
    tokens = pad_sequence(texts, batch_first=True)
    filled = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    return {"input_ids": tokens, "attention_mask": filled, "labels": tokens.where(filled == 1, IGNORED)}


def main() -> None:
    """Train for two epochs, with gradients of two batches in each update."""
    torch.manual_seed(0)
    texts = [
        (torch.randint(60, (1,)) + 3 * torch.arange(length)) % 64 for length in torch.randint(4, 28, (96,)).tolist()
    ]
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader: DataLoader[Any] = DataLoader(texts, batch_size=12, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]

    engine = paceline.setup(model, optimizer, loader=loader)
    for epoch in range(2):
        for i, batch in enumerate(engine.loader):
            predicted = (batch["labels"][:, 1:] != IGNORED).sum()  # what the model's loss is the mean of
            mean = engine.backward(model(**batch).loss / 2, items=predicted, sync=i % 2 == 1)
            if i % 2 == 1:
                result = engine.update(clip_norm=1.0)
        engine.print(f"epoch {epoch + 1}  step {result.step}  loss {2 * mean:.5f}  gradient {result.grad_norm:.4f}")


if __name__ == "__main__":
    main()
