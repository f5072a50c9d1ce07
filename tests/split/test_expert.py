"""Experts over several ranks compute what one process computes, in float64: gradients, weights and dropped tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model_families import hugging_face
from paceline.comm import Group
from paceline.errors import PlanError
from paceline.job.experts import moe_counts, weigh_balance
from paceline.job.zoo.models import GPT, MoE
from paceline.split.expert import divide_experts, undivided
from paceline.split.layout import whole_parts
from ranks import Backend, Ranks

SEQUENCES, LENGTH, VOCAB, STEPS = 8, 10, 32, 3


def zoo(**args: Any) -> nn.Module:
    given = {"experts": 4, "top_k": 2, "capacity": 1.0, "balance": 0.1} | args
    return MoE(vocab=VOCAB, context=LENGTH, layers=2, hidden=16, heads=2, **given)


def zoo_of_one_expert() -> nn.Module:
    """Every token wants expert 0, so all other experts, and all ranks but the first, have none."""
    model = zoo(top_k=1, capacity=0.0)
    for block in model.blocks:  # type: ignore[union-attr]
        nn.init.constant_(block.mlp_norm.bias, 2.0)
        with torch.no_grad():
            block.mlp.router.weight[0] = 0.5
    return model


def zoo_recomputed() -> nn.Module:
    model = zoo()
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def mixture(family: str, implementation: str = "eager", **settings: Any) -> nn.Module:
    how = {"experts_implementation": implementation, "attn_implementation": "eager"}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2}
    return hugging_face(f"{family}ForCausalLM", vocab_size=VOCAB, **heads, **how, **settings)


def mixtral(implementation: str = "eager") -> nn.Module:
    return mixture("Mixtral", implementation, num_local_experts=4)


def mixtral_batched() -> nn.Module:
    return mixtral("batched_mm")


def qwen2_moe() -> nn.Module:
    return mixture("Qwen2Moe", num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16)


def gpt_oss() -> nn.Module:
    """Its experts have biases, and its layer calls the indices by another name."""
    return mixture("GptOss", intermediate_size=16, num_local_experts=4)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, of which some do not count, in every sequence a different number."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (SEQUENCES, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return tokens[:, :-1], labels


def trained(make: Any, shares: tuple[int, ...], microbatches: int = 1) -> dict[str, Any]:
    """Some steps with `shares[r]` sequences on rank r.

    What this rank holds then, and of each parameter which part that is.
    """
    torch.manual_seed(7)
    model = make().double()
    parts = whole_parts(model)
    rank = dist.get_rank() if len(shares) > 1 else 0
    ep = Group(rank, len(shares), dist.group.WORLD) if len(shares) > 1 else Group()
    report = divide_experts(model, parts, ep)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.01)
    losses, gradients = [], []
    start = sum(shares[:rank])
    for step in range(STEPS):
        tokens, labels = batch(step)
        items = (labels != -100).sum()
        loss = torch.zeros((), dtype=torch.float64)
        optimizer.zero_grad()
        for rows in torch.arange(start, start + shares[rank]).tensor_split(microbatches):
            weigh_balance(model, (labels[rows] != -100).sum(1) / items)
            output = model(tokens[rows])
            logits = output if isinstance(output, Tensor) else output.logits
            part = F.cross_entropy(logits.flatten(0, 1), labels[rows].flatten(), reduction="sum") / items
            part.backward()
            loss += part.detach()
        ep.all_reduce(loss)
        for name, parameter in parameters.items():
            if "ep" in parts[name].summed:
                assert parameter.grad is not None
                ep.all_reduce(parameter.grad)
        losses.append(float(loss))
        gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()})
        optimizer.step()
    weights = {name: p.detach() for name, p in parameters.items()}
    layouts = {name: part.layout for name, part in parts.items()}
    learned = {"losses": losses, "gradients": gradients, "weights": weights}
    return {**learned, "layouts": layouts, "counts": moe_counts(model), "report": report}


def assert_equal(one: dict[str, Any], many: list[dict[str, Any]], tolerance: float = 1e-9) -> None:
    for rank in many:
        assert rank["losses"] == pytest.approx(one["losses"], rel=tolerance)
        for step, gradients in enumerate(rank["gradients"]):
            for name, gradient in gradients.items():
                expected = rank["layouts"][name].take(one["gradients"][step][name])
                assert gradient is not None, f"{name} has no gradient"
                scale = expected.abs().max().item() + 1e-6
                assert (gradient - expected).abs().max().item() < tolerance * scale, (
                    f"gradient of {name} in step {step}"
                )
        for name, weight in rank["weights"].items():
            expected = rank["layouts"][name].take(one["weights"][name])
            assert torch.allclose(weight, expected, rtol=0, atol=tolerance), f"{name} differs"


def total_counts(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    counts = [rank["counts"] for rank in ranks]
    load = {name: [sum(x) for x in zip(*(c["load"][name] for c in counts), strict=True)] for name in counts[0]["load"]}
    return {"routed": sum(c["routed"] for c in counts), "dropped": sum(c["dropped"] for c in counts), "load": load}


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_tokens_reach_their_experts_and_gradients_their_way_back(ranks: Ranks, backend: Backend) -> None:
    one = trained(zoo, (8,))
    many = ranks(2, trained, zoo, (5, 3), 2, backend=backend)
    assert_equal(one, many)
    assert total_counts(many) == one["counts"]
    assert one["counts"]["dropped"] > 0, "otherwise no token is dropped here"
    assert set(many[0]["report"].parameters) == {f"blocks.{i}.mlp.experts.{p}" for i in (0, 1) for p in ("up", "down")}
    assert many[1]["report"].own["blocks.0.mlp.experts"] == (2, 4)
    assert many[1]["weights"]["blocks.0.mlp.experts.up"].shape[0] == 2


def test_a_rank_without_tokens_takes_part_all_the_same(ranks: Ranks) -> None:
    one = trained(zoo_of_one_expert, (8,))
    assert all(load[1:] == [0, 0, 0] for load in one["counts"]["load"].values()), "otherwise other experts have tokens"
    # two ranks have neither samples nor tokens of others
    many = ranks(4, trained, zoo_of_one_expert, (3, 5, 0, 0), backend="shm")
    assert_equal(one, many)
    assert total_counts(many) == one["counts"]


def test_activations_computed_again_meet_in_the_same_collectives_and_count_once(ranks: Ranks) -> None:
    one = trained(zoo, (8,))
    many = ranks(2, trained, zoo_recomputed, (5, 3), 2, backend="shm")
    assert_equal(one, many)
    assert total_counts(many) == one["counts"]


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("make", "size"), [(mixtral, 2), slow(mixtral, 4), slow(mixtral_batched, 2), slow(qwen2_moe, 2), slow(gpt_oss, 2)]
)
def test_mixtures_of_transformers_learn_what_they_learn_in_one_process(ranks: Ranks, make: Any, size: int) -> None:
    """Routers compute in float32 whatever the model's dtype.

    So the last bits of a float32 may differ.
    """
    one = trained(make, (8,))
    assert_equal(one, ranks(size, trained, make, (8 // size,) * size, backend="shm"), tolerance=1e-5)


def compiled_output() -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    model = zoo().double()
    tokens, _ = batch(dist.get_rank())
    whole = model(tokens)
    divide_experts(model, whole_parts(model), Group(dist.get_rank(), 2, dist.group.WORLD))
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    divided = model(tokens)
    divided.square().mean().backward()
    return whole.detach(), divided.detach()


@pytest.mark.slow
def test_a_compiled_block_leaves_the_exchange_of_tokens_to_python(ranks: Ranks) -> None:
    for whole, divided in ranks(2, compiled_output, backend="shm"):
        assert torch.allclose(whole, divided, rtol=0, atol=1e-12)


def test_a_model_without_memory_is_divided_by_its_shapes() -> None:
    with torch.device("meta"):
        model = mixtral()
    parts = whole_parts(model)
    report = divide_experts(model, parts, Group(rank=1, size=2))
    part = parts["model.layers.0.mlp.experts.down_proj"]
    assert part.layout.kept[0] == ((2, 4),)
    assert part.sharded == {"ep"}
    assert part.summed == set()
    assert parts["model.layers.0.mlp.gate.weight"].summed == {"ep"}
    assert report.lines == ["ep: 2 of 4 experts a rank in 2 mixtures"]
    assert model.get_parameter(part.name).is_meta


def test_what_cannot_be_divided_is_refused_with_the_degrees_that_work() -> None:
    model = zoo(experts=6)
    assert undivided(model, 3) is None
    problem = undivided(model, 4)
    assert problem is not None
    assert (problem.code, problem.fields["choices"]) == ("plan.experts_not_divisible", [1, 2, 3, 6])
    with pytest.raises(PlanError) as error:
        divide_experts(model, whole_parts(model), Group(rank=0, size=4))
    assert error.value.problems == (problem,)


def test_a_model_without_experts_is_told_what_to_use_instead() -> None:
    reason = str(undivided(GPT(layers=1, hidden=8, heads=1), 2))
    assert "has no mixture of experts" in reason
    assert "ep=1" in reason


def test_experts_in_a_list_of_modules_are_named() -> None:
    model = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(4))})
    reason = str(undivided(model, 2))
    assert "ModuleList" in reason
    assert "Mixtral" in reason
