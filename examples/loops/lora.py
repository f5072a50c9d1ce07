"""LoRA by peft: a small language model whose weights are frozen, but for adapters of low rank.

(A model from the hub is tuned likewise.)

pip install peft
python lora.py
torchrun --nproc-per-node 2 lora.py
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import paceline


def main() -> None:
    """Tune for two epochs."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    config.initializer_range, config.resid_pdrop, config.embd_pdrop, config.attn_pdrop = 0.2, 0.0, 0.0, 0.0
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    model = get_peft_model(GPT2LMHeadModel(config), lora)
    starts = torch.randint(64, (96, 1))
    samples = [{"input_ids": (start + 5 * torch.arange(24)) % 64} for start in starts]  # counting by fives
    loader: DataLoader[Any] = DataLoader(samples, batch_size=16, shuffle=True)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=2 * len(loader))

    engine = paceline.setup(model, optimizer, loader=loader)
    for epoch in range(2):
        for batch in engine.loader:
            engine.backward(model(**batch, labels=batch["input_ids"]).loss)
            result = engine.update(clip_norm=1.0)
            scheduler.step()
        engine.print(f"epoch {epoch + 1}  loss {result.loss:.5f}  lr {scheduler.get_last_lr()[0]:.6f}")
    size = sum(tensor.square().sum().item() for tensor in get_peft_model_state_dict(model).values())
    engine.print(f"adapters {size:.4f}")


if __name__ == "__main__":
    main()
