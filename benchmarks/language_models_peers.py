"""Train a language model with TRL's SFTTrainer, or with a loop over transformers and peft; run by TRL's interpreter.

    PYTHON benchmarks/language_models_peers.py TASK    (started by language_models_sft.py)

TASK is a JSON object with the fields of `Task`. The last line of the output has the loss and the time of each step.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True)
class Task:
    """What a peer trains.

    Attributes:
        system: `trl` or `loop`.
        model: the model folder.
        chat: conversations, which TRL tokenizes itself.
        samples: file with the tensors that the loop trains on: `input_ids`, `labels`, and `position_ids` if packed.
        lora: settings of peft; None for all weights.
        adapters: safetensors file with the first values of the adapters.
    """

    system: str
    model: str
    chat: str
    samples: str
    context: int
    batch: int
    steps: int
    lr: float
    lora: dict[str, Any] | None
    adapters: str
    folder: str


def main(task: Task) -> None:
    """Train, and print losses and times."""
    torch.manual_seed(0)
    losses, ends = (_with_trl if task.system == "trl" else _with_a_loop)(task)
    times = [after - before for before, after in pairwise(ends)]
    print(json.dumps({"losses": losses, "times": times, "threads": torch.get_num_threads()}))


def _with_trl(task: Task) -> tuple[list[float], list[float]]:
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    losses: list[float] = []
    ends = []

    class Ends(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    class Recorded(SFTTrainer):  # type: ignore[misc, unused-ignore]
        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            found = super().compute_loss(*arguments, **named)
            losses.append(float((found[0] if isinstance(found, tuple) else found).detach()))
            return found

    settings = SFTConfig(
        output_dir=str(Path(task.folder) / "trl"),
        max_steps=task.steps,
        per_device_train_batch_size=task.batch,
        learning_rate=task.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        max_length=task.context,
        assistant_only_loss=True,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": torch.float32},
    )
    trainer = Recorded(
        model=task.model,
        args=settings,
        train_dataset=load_dataset("json", data_files=task.chat, split="train", cache_dir=f"{task.folder}/datasets"),
        processing_class=AutoTokenizer.from_pretrained(task.model),
        peft_config=None if task.lora is None else LoraConfig(**task.lora, task_type="CAUSAL_LM"),
        callbacks=[Ends()],
    )
    _first_adapters(trainer.model, task)
    trainer.train()
    return losses, ends


def _with_a_loop(task: Task) -> tuple[list[float], list[float]]:
    """Train with a loop by hand, which pads each batch to its longest sequence."""
    model: Any = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    if task.lora is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**task.lora, task_type="CAUSAL_LM"))
        _first_adapters(model, task)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=task.lr, weight_decay=0.0, fused=True)
    samples = torch.load(task.samples, weights_only=True)
    losses, ends = [], []
    for step in range(task.steps):
        rows = slice(step * task.batch, (step + 1) * task.batch)
        batch = {name: column[rows] for name, column in samples.items()}
        if "position_ids" not in batch:
            longest = int((batch["labels"] != -100).any(0).nonzero()[-1]) + 1
            batch = {name: column[:, :longest] for name, column in batch.items()}
        labels = batch.pop("labels")
        logits = model(**batch, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ends.append(time.perf_counter())
    return losses, ends


def _first_adapters(model: Any, task: Task) -> None:
    if task.lora is not None:
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        found: Any = set_peft_model_state_dict(model, load_file(task.adapters))
        assert not found.unexpected_keys


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
