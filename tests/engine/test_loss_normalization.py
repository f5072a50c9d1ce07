"""Losses in parts of a batch are those of one process, or the loss is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline
from model_families import hugging_face
from paceline.comm import Group
from paceline.errors import PlanError
from paceline.run.recovery.run import train_in
from ranks import Ranks
from refusals import raises
from small_jobs import new_run, small_job

SAMPLES, TOKENS, VOCAB, BATCH = 20, 6, 7, 8  # the last batch of an epoch has 4 samples
PARTS = ["dp=1 microbatches=2", "dp=1 microbatches=8"]


def slow(plan: str) -> ParameterSet:
    return pytest.param(plan, marks=pytest.mark.slow)


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def padded() -> tuple[Tensor, Tensor]:
    """Sequences, and labels of which a different number is left out of each."""
    tokens = torch.randint(1, VOCAB, (SAMPLES, TOKENS), generator=drawn(1))
    labels = torch.randint(1, VOCAB, (SAMPLES, TOKENS), generator=drawn(2))
    lengths = torch.randint(1, TOKENS + 1, (SAMPLES, 1), generator=drawn(3))
    return tokens, torch.where(torch.arange(TOKENS) < lengths, labels, -100)


class PerToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.embed(tokens)))
        return scores


def losses(
    loss: Any, plan: str, data: Any = None, model: Callable[[], nn.Module] = PerToken, steps: int = 4
) -> list[float]:
    torch.manual_seed(4)
    trained = model()
    dataset = data if data is not None else TensorDataset(*padded())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    engine = paceline.setup(trained, optimizer, loss=loss, loader=DataLoader(dataset, batch_size=BATCH), plan=plan)
    found: list[float] = []
    while len(found) < steps:
        found += [engine.step(batch).loss for batch in engine.loader]
    engine.close()
    return found[:steps]


def flat_cross_entropy(**settings: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), **settings)

    return loss


class Transposed(nn.Module):
    """Logits as torch's criteria want them: classes on dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = PerToken()

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.inner(tokens)
        return scores.transpose(1, 2)


WEIGHTS = torch.tensor([0.1, 5.0, 1.0, 0.2, 3.0, 1.0, 2.0])


# torch's own losses


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="sum"),
        F.cross_entropy,
        partial(F.cross_entropy, weight=WEIGHTS),
        partial(F.cross_entropy, reduction="sum"),
    ],
    ids=["module", "weights", "sum", "function", "function with weights", "function as sum"],
)
def test_torchs_losses_are_weighed_by_what_they_average_over(loss: Any) -> None:
    data = TensorDataset(*padded())
    steps = 2 if "sum" in str(getattr(loss, "reduction", loss)) else 4  # a sum of so many diverges later
    alone = losses(loss, "dp=1", data, Transposed, steps)
    for plan in PARTS:
        assert losses(loss, plan, data, Transposed, steps) == pytest.approx(alone, rel=1e-5), plan


def test_a_label_that_a_criterion_ignores_by_another_number_counts_for_nothing() -> None:
    tokens, labels = padded()
    data = TensorDataset(tokens, labels.clamp(min=0))
    loss = nn.CrossEntropyLoss(ignore_index=0)
    assert losses(loss, PARTS[0], data, Transposed) == pytest.approx(losses(loss, "dp=1", data, Transposed), rel=1e-5)


def test_a_part_without_a_single_label_counts_for_nothing() -> None:
    tokens, labels = padded()
    labels[:4] = -100
    data = TensorDataset(tokens, labels)
    assert losses(nn.CrossEntropyLoss(), PARTS[0], data, Transposed) == pytest.approx(
        losses(nn.CrossEntropyLoss(), "dp=1", data, Transposed), rel=1e-5
    )


# Losses of the user's own


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def compared(output: Tensor, target: Tensor) -> Tensor:
    """Every sample against all others of the batch."""
    summary = F.normalize(output.flatten(1), dim=1)
    return F.cross_entropy(summary @ summary.T, torch.arange(len(summary)))


def by_mask(output: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
    mask = target != -100
    return (each * mask).sum() / mask.sum()


class Wrapped(nn.Module):
    """A loss as people write it, with tensors in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", WEIGHTS)
        self.loss = nn.CrossEntropyLoss(weight=WEIGHTS)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        value: Tensor = self.loss(output.transpose(1, 2), target)
        return value


@pytest.mark.parametrize("plan", PARTS)
@pytest.mark.parametrize(
    ("loss", "code"),
    [
        (flat_cross_entropy(), "plan.loss_not_the_mean"),
        (by_mask, "plan.loss_not_the_mean"),
        (summed, "plan.loss_not_the_mean"),
        (compared, "plan.loss_not_the_mean"),
        (Wrapped(), "plan.loss_not_the_mean"),
    ],
)
def test_a_loss_that_is_not_the_mean_over_samples_is_refused_with_what_to_write(
    loss: Any, code: str, plan: str
) -> None:
    if loss is compared and plan == PARTS[1]:
        plan = "dp=1 microbatches=4"
    with raises(PlanError, code):
        losses(loss, plan)


def test_one_process_with_one_microbatch_takes_any_loss() -> None:
    assert len(losses(compared, "dp=1")) == 4
    assert len(losses(summed, "dp=1", steps=1)) == 1


def test_what_the_refusal_says_to_write_gives_the_losses_of_one_process() -> None:
    def counted(output: Tensor, target: Tensor) -> Tensor:
        return by_mask(output, target)

    alone = losses(by_mask, "dp=1")
    counted.items = lambda target: (target != -100).sum()  # type: ignore[attr-defined]
    assert losses(counted, PARTS[0]) == pytest.approx(alone, rel=1e-5)

    def added(output: Tensor, target: Tensor) -> Tensor:
        return summed(output, target)

    added.reduction = "sum"  # type: ignore[attr-defined]
    assert losses(added, PARTS[0], steps=2) == pytest.approx(losses(summed, "dp=1", steps=2), rel=1e-5)


def test_items_that_are_wrong_are_refused() -> None:
    def miscounted(output: Tensor, target: Tensor) -> Tensor:
        return by_mask(output, target)

    miscounted.items = lambda target: target.numel()  # type: ignore[attr-defined]
    with raises(PlanError, "plan.loss_not_the_mean"):
        losses(miscounted, PARTS[0])


def test_a_loss_that_only_later_leaves_labels_out_is_still_found() -> None:
    tokens, labels = padded()
    labels[:BATCH] = labels[:BATCH].clamp(min=0)
    with raises(PlanError, "plan.loss_not_the_mean"):
        losses(by_mask, PARTS[0], TensorDataset(tokens, labels))


def noisy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(output, 0.5).flatten(0, 1), target.clamp(min=0).flatten())


def test_a_loss_that_draws_at_random_is_no_false_alarm_but_is_said() -> None:
    with pytest.warns(UserWarning, match="the loss noisy draws random numbers"):
        assert len(losses(noisy, PARTS[0])) == 4


@pytest.mark.parametrize("plan", ["dp=2 microbatches=2", slow("dp=2"), slow("fsdp=2")])
def test_two_ranks_have_the_losses_of_one(ranks: Ranks, plan: str) -> None:
    loss = nn.CrossEntropyLoss(weight=WEIGHTS)
    alone = losses(loss, "dp=1", None, Transposed)
    for found in ranks(2, losses, loss, plan, None, Transposed):
        assert found == pytest.approx(alone, rel=1e-5)


def refusal(plan: str) -> str:
    """What ranks with one sample each are told."""
    try:
        torch.manual_seed(4)
        model = PerToken()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        data = DataLoader(TensorDataset(*padded()), batch_size=2, drop_last=True)
        engine = paceline.setup(model, optimizer, loss=by_mask, loader=data, plan=plan)
        for batch in engine.loader:
            engine.step(batch)
    except PlanError as error:
        return str(error)
    return ""


def test_ranks_with_a_single_sample_are_told_too(ranks: Ranks) -> None:
    for said in ranks(2, refusal, "dp=2"):
        assert "mean over the labels that are not -100" in said


# Losses that the model computes


class Sequences(Dataset[dict[str, Tensor]]):
    def __init__(self, labels: str = "labels") -> None:
        self.tokens, self.targets = padded()
        self.key = labels

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.tokens[i],
            "attention_mask": (self.targets[i] != -100).long(),
            self.key: self.targets[i],
        }


def gpt2() -> nn.Module:
    return hugging_face("GPT2LMHeadModel", vocab_size=VOCAB)


def bert_for(task: str) -> nn.Module:
    labels = 2 if task == "QuestionAnswering" else VOCAB
    return hugging_face(f"BertFor{task}", vocab_size=VOCAB, num_hidden_layers=1, num_labels=labels)


def t5() -> nn.Module:
    sizes = {"d_kv": 8, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 1}
    return hugging_face("T5ForConditionalGeneration", vocab_size=VOCAB, decoder_start_token_id=0, **sizes)


def of_the_model(output: Any, _: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "causal": gpt2,
    "masked": partial(bert_for, "MaskedLM"),
    "tokens": partial(bert_for, "TokenClassification"),
    "seq2seq": t5,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_models_own_loss_of_padded_batches_is_weighed_by_its_labels(family: str) -> None:
    alone = losses(of_the_model, "dp=1", Sequences(), FAMILIES[family])
    assert losses(of_the_model, PARTS[0], Sequences(), FAMILIES[family]) == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("plan", [slow("dp=2"), slow("fsdp=2"), "pp=2 microbatches=2"])
def test_a_models_own_loss_of_padded_batches_under_splits(ranks: Ranks, plan: str) -> None:
    alone = losses(of_the_model, "dp=1", Sequences(), gpt2)
    for found in ranks(2, losses, of_the_model, plan, Sequences(), gpt2):
        assert found == pytest.approx(alone, rel=1e-4)


class Answers(Sequences):
    """Where answers begin and end; some lie beyond the tokens, and are left out."""

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        at = torch.tensor([2, TOKENS + 3, 1, TOKENS + 1, 0][i % 5])
        return {"input_ids": self.tokens[i], "start_positions": at, "end_positions": at + 1 if at < TOKENS else at}


def test_answers_beyond_the_tokens_count_for_nothing() -> None:
    model = partial(bert_for, "QuestionAnswering")
    alone = losses(of_the_model, "dp=1", Answers(), model)
    assert losses(of_the_model, PARTS[0], Answers(), model) == pytest.approx(alone, rel=1e-4)


class InBatch(nn.Module):
    """Compares the samples that it sees with each other, as CLIP does."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self.inner, self.share = PerToken(), share

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.inner(input_ids)
        own = F.cross_entropy(scores.transpose(1, 2), labels)
        return {"loss": (1 - self.share) * own + self.share * compared(scores, labels), "logits": scores}


def test_a_model_that_compares_its_samples_is_refused_in_parts() -> None:
    def loss(output: Any, _: Any) -> Any:
        return output["loss"]

    assert len(losses(loss, "dp=1", Sequences(), InBatch)) == 4
    with raises(PlanError, "plan.loss_of_parts"):
        losses(loss, PARTS[0], Sequences(), InBatch)


def test_a_small_term_over_what_a_rank_sees_is_said() -> None:
    def loss(output: Any, _: Any) -> Any:
        return output["loss"]

    with pytest.warns(UserWarning, match="these terms are computed for each part separately"):
        assert len(losses(loss, PARTS[0], Sequences(), partial(InBatch, 1e-3))) == 4


# Sequences of which a rank has some of the tokens


def tiny_gpt() -> nn.Module:
    from paceline.job.zoo.models import GPT

    return GPT(vocab=VOCAB, context=8, layers=2, hidden=16, heads=2)


def llama() -> nn.Module:
    return hugging_face("LlamaForCausalLM", vocab_size=VOCAB, num_hidden_layers=1)


def whole_sequences(count: int = SAMPLES) -> TensorDataset:
    return TensorDataset(*(torch.randint(0, VOCAB, (count, 8), generator=drawn(seed)) for seed in (1, 2)))


def shifting(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def told(loss: Any, plan: str) -> str:
    try:
        losses(loss, plan, whole_sequences(), tiny_gpt)
    except PlanError as error:
        return str(error)
    return ""


def test_a_loss_that_looks_at_neighbouring_tokens_is_refused_where_tokens_are_divided(ranks: Ranks) -> None:
    assert told(shifting, "dp=1 microbatches=2") == ""
    for said in ranks(2, told, shifting, "cp=2"):
        assert "shift the labels in the data set" in said


class Padded(Sequences):
    """Sequences without a mask, some labels of which are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.cat([self.tokens, self.tokens[:, :2]], 1)
        self.targets = torch.cat([self.targets, self.targets[:, :2]], 1)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.targets[i]}


def trained_and_measured(plan: str) -> list[float]:
    torch.manual_seed(4)
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = paceline.setup(
        model, optimizer, loss=of_the_model, loader=DataLoader(Padded(), batch_size=BATCH), plan=plan
    )
    found = [engine.step(batch).loss for batch in engine.loader]
    measured: Any = engine.evaluate(DataLoader(Padded(), batch_size=BATCH))
    engine.close()
    return [*found, float(measured["loss"])]


@pytest.mark.parametrize("plan", [slow("dp=2"), "cp=2", slow("pp=2 microbatches=2")])
def test_the_held_out_loss_is_weighed_as_the_training_loss(ranks: Ranks, plan: str) -> None:
    alone = trained_and_measured("dp=1")
    for found in ranks(2, trained_and_measured, plan):
        assert found == pytest.approx(alone, rel=1e-4)


def test_the_record_of_a_run_says_what_cannot_be_weighed(tmp_path: Path) -> None:
    (tmp_path / "noise.py").write_text(
        "import torch.nn.functional as F\n\n\ndef noisy(output, target):\n    return "
        "F.cross_entropy(F.dropout(output, 0.5), target)\n"
    )
    run = tmp_path / "run"
    train_in(
        new_run(run, small_job(loss=f"{tmp_path}/noise.py:noisy", stop={"steps": 2}), "dp=1 microbatches=2"), Group()
    )
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (said,) = [event["said"] for event in events if event["event"] == "loss"]
    assert "the loss noisy draws random numbers" in said[0]
