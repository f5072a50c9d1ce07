"""Accelerate and the Trainer of Transformers over shared memory and with a codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from paceline.errors import LaunchError, PlanError
from paceline.frameworks.accelerate import code_gradients
from ranks import Backend, Ranks
from refusals import raises

WAYS: tuple[tuple[str | None, Backend], ...] = ((None, "gloo"), (None, "shm"), ("int8", "shm"))


def accelerated(codec: str | None) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)])
    if codec is not None:
        code_gradients(accelerator, codec)
    torch.manual_seed(0)
    inputs = torch.randn(1024, 64)
    target = (inputs @ torch.randn(64, 10)).argmax(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, target), 32)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
    losses = []
    for _ in range(3):
        for batch, labels in loader:
            loss = F.cross_entropy(model(batch), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach()).mean()))
    late = ""
    if codec is not None:
        with pytest.raises(LaunchError) as raised:
            code_gradients(accelerator, codec)
        late = str(raised.value)
    return {"losses": losses, "bucket": model.bucket_bytes_cap, "backend": dist.get_backend(), "late": late}


def test_accelerate_trains_over_shared_memory_as_over_gloo_and_with_a_codec_nearly_so(ranks: Ranks) -> None:
    gloo, shared, coded = (ranks(2, accelerated, codec, backend=backend, deadline_s=90)[0] for codec, backend in WAYS)
    assert shared["backend"] == "shm"
    assert shared["losses"] == pytest.approx(gloo["losses"], rel=1e-5)
    assert coded["losses"] == pytest.approx(gloo["losses"], rel=0.02)
    assert coded["losses"] != shared["losses"]
    assert coded["bucket"] == 2**20  # what the user gave is kept
    assert "a model is already prepared" in coded["late"]


def trainers(codec: str | None, folder: str) -> tuple[float, str]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    rows = [torch.arange(first, first + 32).remainder(64) for first in range(64)]
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        max_steps=20,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    if codec is not None:
        code_gradients(trainer, codec)
    return trainer.train().training_loss, dist.get_backend()


def test_the_trainer_of_transformers_trains_so_too(ranks: Ranks, tmp_path: Path) -> None:
    (gloo, _), (shared, backend), (coded, _) = (
        ranks(2, trainers, codec, str(tmp_path), backend=backend, deadline_s=150)[0] for codec, backend in WAYS
    )
    assert backend == "shm"
    assert shared == pytest.approx(gloo, rel=1e-5)
    assert coded == pytest.approx(gloo, rel=0.02)
    assert coded != shared


def uneven_trainer(ranks: int, folder: str) -> float:
    """Train on rows with few and many labels; return the sum of the weights."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    rows = []
    for first in range(64):
        ids = torch.arange(first, first + 32).remainder(64)
        rows.append({"input_ids": ids, "labels": torch.where(torch.arange(32) < 31 * (first % 2), -100, ids)})
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8 // ranks,
        gradient_accumulation_steps=2,
        max_steps=6,
        optim="sgd",
        learning_rate=0.5,
        train_sampling_strategy="sequential",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    return sum(float(p.detach().double().abs().sum()) for p in model.parameters())


def test_the_trainer_weighs_every_label_of_all_ranks_equally(ranks: Ranks, tmp_path: Path) -> None:
    alone, (two, same) = (
        ranks(count, uneven_trainer, count, str(tmp_path), backend="shm", deadline_s=150) for count in (1, 2)
    )
    assert two == same == pytest.approx(alone[0], rel=1e-6)


def test_what_is_no_accelerator_and_a_codec_that_nobody_knows_are_refused() -> None:
    with raises(PlanError, "plan.compress_refused", text="int9"):
        code_gradients(None, "int9")
    with raises(LaunchError, "frameworks.not_an_accelerator", class_name="dict"):
        code_gradients({}, "int8")
