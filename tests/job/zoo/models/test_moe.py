"""A mixture of experts.

Tokens to their experts, a loss that balances the load, and a capacity whose drops are counted.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import JobError
from paceline.job.experts import moe_counts, weigh_balance
from paceline.job.model import ModelSpec
from paceline.job.zoo.models import Experts, MoE, Router
from refusals import raises

VOCAB, LENGTH, EXPERTS, TOP_K = 16, 12, 4, 2


def small(*, layers: int = 2, capacity: float = 0.0, balance: float = 0.0, top_k: int = TOP_K) -> MoE:
    torch.manual_seed(1)
    model = MoE(
        vocab=VOCAB,
        context=LENGTH,
        layers=layers,
        hidden=8,
        heads=2,
        experts=EXPERTS,
        top_k=top_k,
        capacity=capacity,
        balance=balance,
    )
    for block in model.blocks:
        block.mlp.router.weight.data.mul_(50)  # type: ignore[union-attr, operator] # so that experts differ in what they get
    return model.double()


def tokens(sequences: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (sequences, LENGTH), generator=torch.Generator().manual_seed(seed))


def routers(model: MoE) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def gradients(model: MoE, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_job_names_it_like_any_model_of_the_zoo() -> None:
    model = ModelSpec(zoo="moe", args={"layers": 1, "hidden": 16, "experts": 2, "capacity": 1.25}).build()
    assert model(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 256)


def test_more_choices_than_experts_are_refused() -> None:
    with raises(JobError, "model.top_k", experts=2):
        MoE(experts=2, top_k=3)


@pytest.mark.parametrize("k", [1, 2])
def test_experts_compute_the_weighted_sum_of_their_mlps_and_nothing_for_no_expert(k: int) -> None:
    experts = Experts(EXPERTS, 6, 10, 1).double()
    hidden = torch.randn(9, 6, dtype=torch.float64)
    index = torch.randint(0, EXPERTS + 1, (9, k))  # EXPERTS itself stands for none
    weights = torch.rand(9, k, dtype=torch.float64)
    expected = torch.zeros_like(hidden)
    for token in range(9):
        for i, weight in zip(index[token].tolist(), weights[token], strict=True):
            if i < EXPERTS:
                expected[token] += weight * (experts.down[i] @ F.gelu(experts.up[i] @ hidden[token]))
    assert torch.allclose(experts(hidden, index, weights), expected, rtol=0, atol=1e-12)


def test_the_balanced_load_loss_is_minimised_besides_any_loss_and_changes_no_output() -> None:
    """Against the definition, written out over the router's probabilities."""
    plain, balanced = small(layers=1), small(layers=1, balance=0.3)
    x = tokens(5)
    seen: list[Tensor] = []
    plain.blocks[0].mlp.router.register_forward_pre_hook(lambda _, given: seen.append(given[0]))  # type: ignore[union-attr]
    output = plain(x)
    assert torch.equal(balanced(x), output)
    probabilities = F.softmax(seen[0] @ routers(plain)[0].weight.T, dim=-1)
    chosen = F.one_hot(probabilities.topk(TOP_K).indices, EXPERTS).sum(2).double()
    of_sequence = EXPERTS * ((chosen / TOP_K).mean(1) * probabilities.mean(1)).sum(-1)
    expected = gradients(plain, output.square().mean() + 0.3 * of_sequence.mean())
    found = gradients(balanced, balanced(x).square().mean())
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-9, atol=1e-14), name


def test_microbatches_of_any_size_give_the_gradient_of_the_whole_batch() -> None:
    """The balance of a batch, a product of means over it, would not add up so."""
    model, x = small(balance=0.5, capacity=1.0), tokens(7)
    whole = gradients(model, model(x).square().sum() / 7)
    weigh_balance(model, 1 / 7)
    parts = [gradients(model, model(part).square().sum() / 7) for part in x.split([1, 4, 2])]
    for name, gradient in whole.items():
        assert torch.allclose(sum(part[name] for part in parts), gradient, rtol=1e-9, atol=1e-14), name  # type: ignore[arg-type]


@pytest.mark.parametrize("weighed", [True, False])
def test_the_documents_of_a_packed_sequence_have_the_gradient_of_documents_alone(weighed: bool) -> None:
    """Each document has its own load, whatever its neighbours; its weight is the sum over its tokens, or its length."""
    model = small(balance=0.5, capacity=1.0)
    sizes, x = [5, 3, 4, 2, 10], tokens(2)
    of_tokens = torch.rand(2, LENGTH, dtype=torch.float64) if weighed else torch.ones(2, LENGTH).double() / 24
    positions = torch.cat([torch.arange(size) for size in sizes]).view(2, LENGTH)
    weigh_balance(model, None, of_tokens if weighed else None)
    packed = gradients(model, model(x, positions).square().sum())
    alone: dict[str, Tensor] = {}
    for document, weights in zip(x.flatten().split(sizes), of_tokens.flatten().split(sizes), strict=True):
        weigh_balance(model, weights.sum())
        for name, gradient in gradients(model, model(document.unsqueeze(0)).square().sum()).items():
            alone[name] = alone.get(name, 0) + gradient
    for name, gradient in alone.items():
        assert torch.allclose(packed[name], gradient, rtol=1e-9, atol=1e-12), name


def test_the_balance_evens_out_the_load() -> None:
    def largest_share(balance: float) -> float:
        model, x = small(layers=1, balance=balance), tokens(16)
        optimizer = torch.optim.Adam(routers(model)[0].parameters(), lr=0.02)
        for _ in range(60):
            optimizer.zero_grad()
            (model(x).sum() * 0.0).backward()
            optimizer.step()
        before = routers(model)[0].taken.clone()
        model(x)
        load = routers(model)[0].taken - before
        return float(load.max() / load.sum())

    assert largest_share(1.0) < 0.29 < 0.33 < largest_share(0.0), "a quarter is even"


def test_what_is_beyond_an_experts_capacity_is_dropped_and_counted() -> None:
    model = small(layers=1, capacity=0.5)
    x = tokens(3)
    model(x)
    counts = moe_counts(model)
    capacity = 3  # 0.5 * 12 * 2 / 4
    assert counts["routed"] == 3 * LENGTH * TOP_K
    assert counts["dropped"] == counts["routed"] - sum(counts["load"]["blocks.0.mlp.router"])
    assert max(counts["load"]["blocks.0.mlp.router"]) <= 3 * capacity
    assert counts["dropped"] >= 3 * (LENGTH * TOP_K - EXPERTS * capacity)
    model.eval()(x)
    assert moe_counts(model) == counts, "what is evaluated is not trained on"


def test_nothing_is_dropped_without_a_capacity() -> None:
    model = small()
    model(tokens(4))
    assert moe_counts(model)["dropped"] == 0
    assert moe_counts(model)["routed"] == 2 * 4 * LENGTH * TOP_K


def test_a_token_is_dropped_for_no_later_token_and_no_other_sequence() -> None:
    """Attention is causal.

    Otherwise the model would see the future, and a batch's division would change the result.
    """
    model, x = small(capacity=0.6), tokens(4)
    output = model(x)
    assert moe_counts(model)["dropped"] > 0
    later = x.clone()
    later[:, 8:] = (later[:, 8:] + 3) % VOCAB
    assert torch.allclose(model(later)[:, :8], output[:, :8], rtol=0, atol=1e-12)
    assert torch.allclose(model(x[2:3]), output[2:3], rtol=0, atol=1e-12)


def test_the_choice_of_a_single_expert_is_learned() -> None:
    model = small(top_k=1)
    found = gradients(model, model(tokens(3)).square().mean())
    assert all(found[name].abs().max() > 0 for name in found if name.endswith("router.weight"))


def test_an_empty_batch_passes() -> None:
    model = small(balance=0.1, capacity=1.0)
    output = model(tokens(0))
    assert output.shape == (0, LENGTH, VOCAB)
    assert not any(gradient.any() for gradient in gradients(model, output.sum()).values())


def test_counts_are_those_of_routers_only() -> None:
    assert moe_counts(torch.nn.Linear(2, 2)) == {}
    weigh_balance(torch.nn.Linear(2, 2), 0.5)  # of no effect
