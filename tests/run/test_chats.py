"""Supervised fine-tuning has the losses of a loop by hand, whatever the plan."""

from __future__ import annotations

import json
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from paceline.cli.train import summary
from paceline.job.job import Job
from paceline.run.record.run import Run
from ranks import Ranks
from small_jobs import new_run, train_as_rank, train_here
from small_tokenizers import save_chat_tokenizer

ROWS = [
    [("user", f"Where were {n} boats?"), ("assistant", "On the sand. " * (1 + 3 * (n % 3)))]
    + ([("user", "And the river?"), ("assistant", "It was low.")] if n % 2 else [])
    for n in range(7)
] + [[("user", "Nobody answers.")]]
STEPS, LR = 3, 0.5
MARGIN = 1e-12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model, its tokenizer, and `chats.jsonl`."""
    folder = save_chat_tokenizer(tmp_path_factory.mktemp("base"))
    torch.manual_seed(0)
    # the norms of other models are computed in float32, which hides differences below 1e-9
    config = GPT2Config(
        vocab_size=360,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=160,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats()))
    return folder


def chats() -> list[list[dict[str, str]]]:
    return [[{"role": role, "content": content} for role, content in row] for row in ROWS]


@pytest.fixture(scope="module")
def by_hand(folder: Path) -> list[float]:
    """Losses of a loop that computes one conversation at a time, without padding."""
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    samples = [tokens_and_labels(tokenizer, chat) for chat in chats()]
    total = sum(int((labels != -100).sum()) for _, labels in samples)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for ids, labels in samples:
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            loss = loss + F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum") / total
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def tokens_and_labels(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor(tokenizer.apply_chat_template(messages, return_dict=False))
    labels = torch.full_like(ids, -100)
    for n, message in enumerate(messages):
        if message["role"] == "assistant":
            first, end = (
                len(tokenizer.apply_chat_template(messages[:upto], return_dict=False, add_generation_prompt=asks))
                for upto, asks in ((n, True), (n + 1, False))
            )
            labels[first:end] = ids[first:end]
    return ids, labels


def job(folder: Path, **data: Any) -> Job:
    return Job(
        task="sft",
        model={"hf": str(folder)},
        data={"kind": "chat", "path": str(folder / "chats.jsonl"), "context": 160, "held_out": 0, **data},
        optimizer={"name": "sgd", "lr": LR},
        global_batch=3 if data.get("pack") else len(ROWS),  # all samples, so that their order does not matter
        precision="fp64",
        stop={"steps": STEPS},
        deadline_s=60,
    )


class Noted(nn.Module):
    """A model without attention that notes the shape of each batch in a file."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file, self.layers = Path(file), nn.Sequential(nn.Embedding(360, 8), nn.Linear(8, 360))

    def forward(self, ids: Tensor) -> Tensor:
        with self.file.open("a") as file:
            file.write(f"{tuple(ids.shape)}\n")
        logits: Tensor = self.layers(ids)
        return logits


def test_positions_after_the_last_label_of_a_microbatch_are_not_computed(tmp_path: Path, folder: Path) -> None:
    model = {"factory": f"{__file__}:Noted", "args": {"file": str(tmp_path / "shapes")}}
    values = job(folder).model_dump(mode="json", exclude_defaults=True)
    values["data"]["tokenizer"] = str(folder)
    train_here(tmp_path / "run", Job(**{**values, "model": model, "precision": "fp32"}), "dp=1 microbatches=8")
    ids_and_labels = [tokens_and_labels(AutoTokenizer.from_pretrained(folder), m) for m in chats()]
    lasts = [int((labels != -100).nonzero()[-1]) if (labels != -100).any() else 1 for _, labels in ids_and_labels]
    wanted = sorted((1, -(-last // 8) * 8) for last in lasts)
    found = [literal_eval(line) for line in (tmp_path / "shapes").read_text().splitlines()]
    assert sorted(found[-len(ROWS) :]) == wanted
    counts = Run(tmp_path / "run").steps()[-1]["data"]
    labelled = sum(last for last in lasts if last > 1)
    assert counts["positions"] == sum(length for _, length in wanted)
    assert counts["padding"] == counts["positions"] - labelled


def test_the_summary_counts_the_conversations_that_were_cut_and_those_without_a_label(
    tmp_path: Path, folder: Path
) -> None:
    run = train_here(tmp_path / "run", job(folder, context=40), "dp=1")
    tokens_and = [tokens_and_labels(AutoTokenizer.from_pretrained(folder), messages) for messages in chats()]
    shortened = sum(len(tokens) > 40 for tokens, _ in tokens_and)
    untrained = sum(not (labels[1:40] != -100).any() for _, labels in tokens_and)
    assert shortened > untrained > 0
    counts = [step["data"] for step in run.steps()]
    assert [(c["shortened"], c["untrained"]) for c in counts] == [(shortened, untrained)] * STEPS
    for number in (shortened, untrained):
        assert f"{number * STEPS} of {len(ROWS) * STEPS} samples" in summary(run)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("plan", ["dp=1", "dp=1 microbatches=3"])
def test_one_process_has_the_losses_of_a_loop_without_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, by_hand: list[float], plan: str, pack: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = train_here(tmp_path / "run", job(folder, pack=pack), plan)
    assert [step["loss"] for step in run.steps(0)] == pytest.approx(by_hand, rel=MARGIN)


@pytest.mark.parametrize(
    "plan", ["dp=2 microbatches=3", "fsdp=2 microbatches=2", "tp=2 microbatches=2", "pp=2 microbatches=2"]
)
def test_two_ranks_have_the_losses_of_a_loop_without_padding(
    tmp_path: Path, folder: Path, by_hand: list[float], ranks: Ranks, plan: str
) -> None:
    new_run(tmp_path / "run", job(folder), plan)
    ranks(2, train_as_rank, tmp_path / "run", deadline_s=120)
    assert [step["loss"] for step in Run(tmp_path / "run").steps(0)] == pytest.approx(by_hand, rel=MARGIN)
