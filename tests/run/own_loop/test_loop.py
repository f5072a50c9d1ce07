"""`engine.backward` and `engine.update`.

Loops as people write them give the same numbers on one rank and on two, or are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

import paceline
from ranks import Ranks
from refusals import raises

FEATURES, CLASSES, SAMPLES = 6, 3, 25


def data(batch: int = 8) -> DataLoader[Any]:
    """25 samples: the last batch of an epoch has one, so that one of two ranks has none."""
    inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(inputs, torch.arange(SAMPLES) % CLASSES), batch_size=batch, shuffle=True)


def network(outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, outputs))


def seeded() -> None:
    """Another seed on every rank: what is drawn from it has to be agreed on."""
    torch.manual_seed(1 + (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0))


def facts(losses: list[float], *parameters: Tensor) -> list[float]:
    return [*losses, *(float(p.detach().double().square().sum()) for p in parameters)]


# Loops that work


def clipped_updates() -> list[float]:
    model = network()
    engine = paceline.setup(model, SGD(model.parameters(), lr=0.5, momentum=0.9), loader=data())
    losses = []
    for _ in range(2):
        for x, y in engine.loader:
            engine.backward(F.cross_entropy(model(x), y))
            losses.append(engine.update(clip_norm=0.3, clip_value=0.1).loss)
    return facts(losses, *model.parameters())


def a_loop_written_for_fabric() -> list[float]:
    model = network()
    optimizer = Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    engine = paceline.setup(model, optimizer, loader=data())
    losses = []
    for x, y in engine.loader:
        optimizer.zero_grad()
        losses.append(float(engine.backward(F.cross_entropy(model(x), y))))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
    return facts(losses, *model.parameters())


def accumulation() -> list[float]:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.5)
    engine = paceline.setup(model, optimizer, loader=data(4))
    losses = []
    for i, (x, y) in enumerate(engine.loader):
        last = i % 3 == 2
        losses.append(float(engine.backward(F.cross_entropy(model(x), y) / 3, sync=last)))
        if last:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.zero_grad()  # of the gradients that were left over
    engine.backward(F.cross_entropy(model(x), y), sync=False)
    engine.update()
    return facts(losses, *model.parameters())


def several_backward_passes_before_a_step() -> list[float]:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    engine = paceline.setup(model, optimizer, loader=data())
    for x, y in engine.loader:
        engine.backward(F.cross_entropy(model(x), y))
        engine.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return facts([], *model.parameters())


def reduced_and_own_gradients_in_turn() -> list[float]:
    model = network()
    engine = paceline.setup(model, SGD(model.parameters(), lr=0.1), loader=data())
    losses = []
    for x, y in engine.loader:
        for sync in (True, False, True, False):
            engine.backward(F.cross_entropy(model(x), y), sync=sync)
        losses.append(engine.update().loss)
    return facts(losses, *model.parameters())


def gan(named: bool) -> list[float]:
    generator, discriminator = network(FEATURES), network(1)
    of_g, of_d = Adam(generator.parameters(), lr=0.05), SGD(discriminator.parameters(), lr=0.1, momentum=0.9)
    engine = paceline.setup([generator, discriminator], [of_g, of_d], loader=data())
    losses = []
    for x, _ in engine.loader:
        fake = generator(x.flip(1))
        real = F.softplus(-discriminator(x)).mean() + F.softplus(discriminator(fake.detach())).mean()
        if named:
            losses.append(float(engine.backward(real, of_d)))
            engine.update(of_d)
            losses.append(float(engine.backward(F.softplus(-discriminator(fake)).mean(), of_g)))
            assert all(p.grad is None for p in discriminator.parameters())
            engine.update(of_g)
        else:
            of_d.zero_grad()
            losses.append(float(engine.backward(real)))
            of_d.step()
            of_g.zero_grad()
            losses.append(float(engine.backward(F.softplus(-discriminator(fake)).mean())))
            of_g.step()
    return facts(losses, *generator.parameters(), *discriminator.parameters())


def gan_by_names() -> list[float]:
    return gan(named=True)


def gan_by_zero_grad() -> list[float]:
    return gan(named=False)


def two_optimizers_of_one_model_in_a_step() -> list[float]:
    model = network()
    matrices, vectors = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    engine = paceline.setup(model, [SGD(matrices, lr=0.1), Adam(vectors, lr=0.1)], loss=F.cross_entropy, loader=data())
    return facts([engine.step(batch).loss for batch in engine.loader], *model.parameters())


def a_learned_temperature() -> list[float]:
    model, temperature = network(), nn.Parameter(1 + torch.rand(()))
    engine = paceline.setup(
        model,
        SGD([*model.parameters(), temperature], lr=0.2),
        loss=lambda out, y: F.cross_entropy(out * temperature, y),
        loader=data(),
    )
    return facts([engine.step(batch).loss for batch in engine.loader], *model.parameters(), temperature)


class Head(nn.Module):
    """A loss with a layer of its own, as ArcFace's."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(4, CLASSES, bias=False)

    def forward(self, embedding: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(F.normalize(embedding), F.normalize(self.classes.weight)), target)


def a_head_in_the_loss_module() -> list[float]:
    model, loss = network(4), Head()
    engine = paceline.setup(model, SGD([*model.parameters(), *loss.parameters()], lr=0.2), loss=loss, loader=data())
    return facts([engine.step(batch).loss for batch in engine.loader], *model.parameters(), *loss.parameters())


def contrast(embeddings: Tensor, scale: Tensor) -> Tensor:
    scores = scale * F.normalize(embeddings) @ F.normalize(embeddings).T
    return (torch.logsumexp(scores, 1) - scores.roll(1, 1).diagonal()).mean()


def a_loss_over_the_gathered_batch() -> list[float]:
    model, scale = network(4), nn.Parameter(torch.ones(()))
    engine = paceline.setup(model, SGD([*model.parameters(), scale], lr=0.2), loader=data(12))
    losses = []
    for x, _ in engine.loader:
        if engine.loader.position is not None and engine.loader.position.total == 12:  # no rank is without samples
            engine.backward(contrast(engine.gather(model(x)), scale))
            losses.append(engine.update().loss)
    return facts(losses, *model.parameters(), scale)


class WholeBatch:
    """A loss over the whole batch, whose scale is a parameter of the model."""

    whole_batch = True

    def __init__(self, scale: nn.Parameter) -> None:
        self.scale = scale

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return contrast(output, self.scale)


def a_step_over_the_whole_batch_with_a_learned_scale() -> list[float]:
    model = network(4)
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    loader = DataLoader(data().dataset, batch_size=12, drop_last=True)
    engine = paceline.setup(model, SGD(model.parameters(), lr=0.2), loss=WholeBatch(model.scale), loader=loader)  # type: ignore[arg-type]
    return facts([engine.step(batch).loss for batch in engine.loader], *model.parameters())


def items_of_a_mean() -> list[float]:
    model = network()
    engine = paceline.setup(model, SGD(model.parameters(), lr=0.2), loader=data())
    losses = []
    for x, y in engine.loader:
        counted = y > 0
        total = F.cross_entropy(model(x)[counted], y[counted], reduction="sum")
        engine.backward(total / counted.sum().clamp(min=1), items=counted.sum() if engine.loader.position.local else 0)  # type: ignore[union-attr]
        losses.append(engine.update().loss)
    return facts(losses[:-1], *model.parameters())


def ones_own_scaler() -> list[float]:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2)
    engine, scaler = paceline.setup(model, optimizer, loader=data()), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in engine.loader:
        optimizer.zero_grad()
        engine.backward(scaler.scale(F.cross_entropy(model(x), y)))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return facts([], *model.parameters())


def lbfgs() -> list[float]:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    engine = paceline.setup(model, optimizer, loader=data(SAMPLES))
    losses = []
    for x, y in engine.loader:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            engine.backward(loss)
            return loss

        losses += [optimizer.step(closure).item() for _ in range(2)]
    return facts(losses, *model.parameters())


def layers_unfrozen_and_added_later() -> list[float]:
    model = network()
    model[0].requires_grad_(False)  # type: ignore[index]
    optimizer = SGD(model.parameters(), lr=0.2)
    engine = paceline.setup(model, optimizer, loss=F.cross_entropy, loader=data(5))
    losses = [engine.step(batch).loss for batch in engine.loader]
    model[0].requires_grad_(True)  # type: ignore[index]
    losses += [engine.step(batch).loss for batch in engine.loader]
    seeded()
    added = nn.Linear(CLASSES, CLASSES)
    optimizer.add_param_group({"params": added.parameters(), "lr": 0.1})
    engine.broadcast_new_parameters()
    for x, y in engine.loader:
        engine.backward(F.cross_entropy(added(model(x)), y))
        losses.append(engine.update().loss)
    return facts(losses, *model.parameters(), *added.parameters())


class Sharp(SGD):
    """Steps by an optimizer of its own, as SAM and Lookahead do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.base = Adam(self.param_groups, lr=0.05)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


def an_optimizer_within_another() -> list[float]:
    model = network()
    optimizer = Sharp(model.parameters())
    engine = paceline.setup(model, optimizer, loader=data())
    for x, y in engine.loader:
        optimizer.zero_grad()
        engine.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    return facts([], *model.parameters())


def batches_read_ahead() -> list[float]:
    """By a prefetcher that says what each mean is of."""
    model = network()
    engine = paceline.setup(model, SGD(model.parameters(), lr=0.1), loader=data(5))
    losses = []
    for x, y in list(engine.loader):
        engine.backward(F.cross_entropy(model(x), y), items=len(x))
        losses.append(engine.update().loss)
    return facts(losses, *model.parameters())


def batch_statistics_of_data_that_every_rank_brings() -> list[float]:
    """Without a loader: every rank reads its own part of a batch."""
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    engine = paceline.setup(model, SGD(model.parameters(), lr=0.1), batch_norm="sync")
    inputs, targets = data().dataset[:8]
    own = slice(engine.group.rank, None, engine.group.size)
    losses = []
    for _ in range(3):
        engine.backward(F.cross_entropy(model(inputs[own]), targets[own]))
        losses.append(engine.update().loss)
    return facts(losses, *model.parameters(), *model.buffers())


LOOPS: list[Callable[[], list[float]]] = [
    clipped_updates,
    a_loop_written_for_fabric,
    accumulation,
    several_backward_passes_before_a_step,
    reduced_and_own_gradients_in_turn,
    gan_by_names,
    gan_by_zero_grad,
    two_optimizers_of_one_model_in_a_step,
    a_learned_temperature,
    a_head_in_the_loss_module,
    a_loss_over_the_gathered_batch,
    a_step_over_the_whole_batch_with_a_learned_scale,
    items_of_a_mean,
    ones_own_scaler,
    lbfgs,
    layers_unfrozen_and_added_later,
    an_optimizer_within_another,
    batches_read_ahead,
    batch_statistics_of_data_that_every_rank_brings,
]


def outcomes() -> dict[str, list[float]]:
    """What each of LOOPS gives, one after the other on the same ranks, where the engines of all live on."""
    found = {}
    for loop in LOOPS:
        seeded()
        try:
            found[loop.__name__] = loop()
        except Exception as error:
            raise AssertionError(f"{loop.__name__}: {error}") from error
    return found


def test_every_loop_gives_the_same_numbers_alone_and_on_two_ranks(ranks: Ranks) -> None:
    alone = outcomes()
    for of_rank in ranks(2, outcomes):
        for name, found in of_rank.items():
            assert found == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("own_step", [False, True])
def test_a_rule_acts_after_every_update_as_in_engine_step(own_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    engine = paceline.setup(model, optimizer, loader=data())
    steps: list[int] = []
    monkeypatch.setattr(engine.rule, "after_step", steps.append)
    for x, y in engine.loader:
        engine.backward(F.cross_entropy(model(x), y))
        if own_step:
            optimizer.step()
        else:
            engine.update()
    assert steps == [1, 2, 3, 4]


# Loops that would train something else


def small(**changes: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    return model, optimizer, paceline.setup(model, optimizer, **{"loader": data(), **changes})


def plain_backward() -> None:
    model, optimizer, engine = small()
    for x, y in engine.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def plain_backward_before_an_update_by_several_optimizers() -> None:
    model, other = network(), network()
    optimizers = [SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)]
    engine = paceline.setup([model, other], optimizers, loader=data(), plan="dp=2 sync=local:2")
    x, y = next(iter(engine.loader))
    engine.backward(F.cross_entropy(model(x), y), optimizers[0])
    engine.update(optimizers[0])


def a_forward_pass_with_parameters_not_agreed_on() -> None:
    model, optimizer, engine = small()
    added = nn.Linear(CLASSES, CLASSES)
    optimizer.add_param_group({"params": added.parameters()})
    x, y = next(iter(engine.loader))
    engine.backward(F.cross_entropy(added(model(x)), y))


def a_step_without_gradients() -> None:
    _, optimizer, _ = small()
    optimizer.step()


def a_closure_with_a_plain_backward() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    engine = paceline.setup(model, optimizer, loader=data())
    x, y = next(iter(engine.loader))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)


def a_step_on_scaled_gradients() -> None:
    model, optimizer, engine = small(precision="fp16")
    x, y = next(iter(engine.loader))
    with engine.autocast():
        loss = F.cross_entropy(model(x), y)
    engine.backward(loss)
    optimizer.step()


def gradients_of_an_epoch_without_an_update() -> None:
    model, _, engine = small()
    for _ in range(2):
        for x, y in engine.loader:
            engine.backward(F.cross_entropy(model(x), y))


def a_step_on_gradients_not_summed() -> None:
    model, optimizer, engine = small()
    x, y = next(iter(engine.loader))
    engine.backward(F.cross_entropy(model(x), y), sync=False)
    optimizer.step()


def an_optimizer_that_setup_was_not_given() -> None:
    small()
    other = network()
    optimizer = SGD(other.parameters(), lr=0.1)
    other(torch.ones(2, FEATURES)).sum().backward()
    optimizer.step()


def an_update_without_gradients() -> None:
    small()[2].update()


def bf16_without_autocast() -> None:
    model, _, engine = small(precision="bf16")
    x, y = next(iter(engine.loader))
    engine.backward(F.cross_entropy(model(x), y))


def a_step_without_a_loss() -> None:
    engine = small()[2]
    engine.step(next(iter(engine.loader)))


def a_loss_of_every_sample() -> None:
    model, _, engine = small()
    x, y = next(iter(engine.loader))
    engine.backward(F.cross_entropy(model(x), y, reduction="none"))


def leftovers_of_another_loss() -> None:
    model, other = network(), network()
    first, second = SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    engine = paceline.setup({"a": model, "b": other}, {"a": first, "b": second}, loader=data())
    x, y = next(iter(engine.loader))
    engine.backward(F.cross_entropy(model(x) + other(x), y))
    engine.update(first)
    engine.backward(F.cross_entropy(other(x), y), second)


def parameters_outside_of_a_divided_model() -> None:
    model, temperature = network(), nn.Parameter(torch.ones(()))
    paceline.setup(model, SGD([*model.parameters(), temperature], lr=0.1), loader=data(), plan="fsdp=2")


def whole_matrices_of_a_divided_model() -> None:
    model = nn.Linear(FEATURES, CLASSES, bias=False)
    paceline.setup(model, torch.optim.Muon(model.parameters()), loader=data(), plan="fsdp=2")


def an_average_of_a_divided_model() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    engine = paceline.setup(model, SGD(model.parameters(), lr=0.1), loader=data(), plan="tp=2")
    torch.optim.swa_utils.AveragedModel(engine.model)


def a_forward_pass_beside_a_pipeline() -> None:
    model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(4)))
    engine = paceline.setup(model, SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, loader=data(), plan="pp=2")
    engine.backward(torch.ones((), requires_grad=True))


def batches_read_ahead_without_a_word() -> None:
    model, _, engine = small()
    waiting = None
    for batch in engine.loader:
        if waiting is not None:
            engine.backward(F.cross_entropy(model(waiting[0]), waiting[1]))
            engine.update()
        waiting = batch


def a_model_in_ddp() -> None:
    model = nn.parallel.DistributedDataParallel(network())
    paceline.setup(model, SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, loader=data())


def a_parameter_of_two_optimizers() -> None:
    model = network()
    paceline.setup(model, [SGD(model.parameters(), lr=0.1), Adam(model.parameters())], loader=data())


REFUSED: list[tuple[Callable[[], None], str]] = [
    (plain_backward, "loop.plain_backward"),
    (plain_backward_before_an_update_by_several_optimizers, "loop.rule_counts_steps"),
    (a_forward_pass_with_parameters_not_agreed_on, "loop.parameters_added"),
    (a_step_without_gradients, "loop.step_without_backward"),
    (a_closure_with_a_plain_backward, "loop.plain_backward"),
    (a_step_on_scaled_gradients, "loop.optimizer_step_fp16"),
    (gradients_of_an_epoch_without_an_update, "loop.no_update"),
    (a_step_on_gradients_not_summed, "loop.gradients_not_reduced"),
    (an_optimizer_that_setup_was_not_given, "loop.optimizer_unknown"),
    (an_update_without_gradients, "loop.no_gradient"),
    (bf16_without_autocast, "loop.no_autocast"),
    (a_step_without_a_loss, "loop.step_without_loss"),
    (a_loss_of_every_sample, "loop.loss_not_a_number"),
    (leftovers_of_another_loss, "loop.stale_gradients"),
    (parameters_outside_of_a_divided_model, "setup.parameters_outside"),
    (whole_matrices_of_a_divided_model, "setup.needs_whole_parameters"),
    (batches_read_ahead_without_a_word, "loop.read_ahead"),
    (a_model_in_ddp, "setup.wrapped"),
    (a_parameter_of_two_optimizers, "setup.parameter_of_two_optimizers"),
    (an_average_of_a_divided_model, "loop.copy_of_divided"),
    (a_forward_pass_beside_a_pipeline, "loop.forward_by_engine"),
]


def refusals() -> list[str]:
    """Codes of the errors that each of REFUSED raises, one after the other on the same ranks."""
    said = []
    for loop, _ in REFUSED:
        try:
            loop()
        except paceline.PacelineError as error:
            said.append(error.code)
        else:
            said.append("")
    return said


def test_what_would_train_something_else_is_refused_with_the_line_to_write(ranks: Ranks) -> None:
    for codes in ranks(2, refusals):
        assert codes == [code for _, code in REFUSED]


ON_ONE_RANK: dict[Callable[[], None], str] = {
    plain_backward: "loop.step_without_backward",
    a_step_without_gradients: "loop.step_without_backward",
    a_closure_with_a_plain_backward: "loop.step_without_backward",
    a_step_on_scaled_gradients: "loop.optimizer_step_fp16",
    gradients_of_an_epoch_without_an_update: "loop.no_update",
}


@pytest.mark.parametrize("loop", ON_ONE_RANK, ids=lambda loop: loop.__name__)
def test_what_would_differ_on_several_ranks_is_refused_on_one(loop: Callable[[], None]) -> None:
    with raises(paceline.PacelineError, ON_ONE_RANK[loop]):
        loop()


def test_other_optimizers_of_one_process_train_as_they_would_without_paceline() -> None:
    small()
    other = network()
    other(torch.ones(2, FEATURES)).sum().backward()
    SGD(other.parameters(), lr=0.1).step()


def test_gradients_of_an_epoch_may_make_one_update() -> None:
    model, _, engine = small()
    for _ in range(2):
        for x, y in engine.loader:
            engine.backward(F.cross_entropy(model(x), y))
        engine.update()
    assert engine.step_count == 2


def probes() -> list[float]:
    """An optimizer that every rank trains by itself, on the same numbers."""
    engine = small()[2]
    other = nn.Linear(FEATURES, 1)
    nn.init.ones_(other.weight)
    optimizer = SGD(other.parameters(), lr=0.1)
    engine.ignore(optimizer)
    other(torch.ones(2, FEATURES)).sum().backward()
    optimizer.step()
    return facts([], other.weight)


def test_an_ignored_optimizer_steps_on_every_rank_by_itself(ranks: Ranks) -> None:
    alone = probes()
    assert ranks(2, probes) == [alone, alone]


def under_plans(plans: list[str]) -> list[list[float]]:
    return [under(plan) for plan in plans]


def under(plan: str) -> list[float]:
    seeded()
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    engine = paceline.setup(model, Adam(model.parameters(), lr=0.05), loader=data(), plan=plan, clip_norm=0.2)
    losses = []
    for x, y in engine.loader:
        engine.backward(F.cross_entropy(model(x), y) / 2)
        engine.backward(F.cross_entropy(model(x), y) / 2)
        losses += [engine.update().loss]
    return losses


def test_a_loop_under_a_split_or_a_rule_trains_as_alone(ranks: Ranks) -> None:
    alone = under("auto")
    tolerances = {"fsdp=2": 1e-4, "tp=2": 1e-4, "dp=2 compress=bf16": 0.05, "dp=2 sync=local:1": 0.5}
    for found in ranks(2, under_plans, list(tolerances)):
        for losses, (plan, tolerance) in zip(found, tolerances.items(), strict=True):
            assert losses == pytest.approx(alone, rel=tolerance), plan
