"""Models as people write them compute the same under a plan, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import PlanError
from paceline.planning.plan import Plan
from ranks import Ranks

WIDTH, ROWS, STEPS = 6, 4, 3
MODELS: dict[str, Callable[[], nn.Module]] = {}


def model(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    MODELS[build.__name__] = build
    return build


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Chain(nn.Module):
    """Four blocks, run by a function of the test's."""

    def __init__(
        self,
        forward: Callable[[Any, Tensor], Tensor] | None = None,
        block: Callable[[], nn.Module] = Block,
        **more: Any,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.how = forward or one_after_the_other
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def one_after_the_other(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


# Modules that stand twice


@model
def one_block_under_two_names() -> nn.Module:
    chain = Chain()
    chain.blocks[2] = chain.blocks[0]
    return chain


@model
def one_block_four_times() -> nn.Module:
    chain = Chain()
    chain.blocks = nn.ModuleList([chain.blocks[0]] * 4)
    return chain


@model
def a_norm_with_a_second_name() -> nn.Module:
    norm = nn.LayerNorm(WIDTH)
    chain = Chain(norm=norm)
    chain.blocks[3] = nn.Sequential(Block(), norm)
    return chain


# Hooks


@model
def parameter_hooks() -> nn.Module:
    chain = Chain()
    chain.blocks[1].up.weight.register_hook(lambda g: 2 * g)  # type: ignore[union-attr, operator]
    chain.blocks[3].down.bias.register_hook(lambda g: 0 * g)  # type: ignore[union-attr, operator]
    return chain


@model
def accumulation_hooks() -> nn.Module:
    chain = Chain()

    def double(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(2)

    chain.blocks[1].up.weight.register_post_accumulate_grad_hook(double)  # type: ignore[union-attr, operator]
    return chain


@model
def backward_hooks_on_modules() -> nn.Module:
    chain = Chain()

    def halve(module: nn.Module, out: Any) -> Any:
        return (0.5 * out[0],)

    def treble(module: nn.Module, into: Any, out: Any) -> Any:
        return (3 * into[0],) if into[0] is not None else None

    for block in chain.blocks:
        block.register_full_backward_pre_hook(halve)
        block.register_full_backward_hook(treble)
    return chain


@model
def hooks_on_the_model_and_its_blocks() -> nn.Module:
    chain = Chain()
    chain.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    chain.register_forward_hook(lambda module, inputs, output: 3 * output)
    for block in chain.blocks:
        block.register_forward_hook(lambda module, inputs, output: 1.5 * output)
    return chain


@model
def features_taken_by_hooks() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        model.features.clear()
        y = one_after_the_other(model, x)
        feature: Tensor = model.features[0]
        return y + feature

    chain: Any = Chain(forward, features=[])
    for block in chain.blocks[:2]:
        block.register_forward_hook(lambda module, inputs, output: chain.features.append(output))
    whole: nn.Module = chain
    return whole


# Changes in place


@model
def addition_in_place_between_blocks() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            y = block(x)
            y += x
            x = y
        return x

    return Chain(forward)


class View(Block):
    """A block that returns a view of its result."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)[:, :WIDTH]
        return y


@model
def addition_in_place_to_a_view() -> nn.Module:
    return Chain(addition_in_place, View)


def addition_in_place(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        made = block(x)
        made += x
        x = made
    return x


@model
def an_earlier_output_changed_in_place() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        first = model.blocks[0](x)
        kept = 2 * first
        second = model.blocks[1](first)
        kept += second
        y: Tensor = model.blocks[3](model.blocks[2](kept)) + kept
        return y

    return Chain(forward)


@model
def a_batch_changed_in_place() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        x.clamp_(-1, 1)
        x += 0.25
        return one_after_the_other(model, x)

    return Chain(forward)


@model
def a_block_that_changes_its_input() -> nn.Module:
    class Doubles(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2)) if not x.is_leaf else super().forward(x)

    return Chain(block=Doubles)


# State that modules keep


@model
def attributes_read_by_others() -> nn.Module:
    class Remembers(Block):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.before = torch.zeros(WIDTH, dtype=torch.float64), torch.zeros(WIDTH, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            self.before = x.detach()
            self.last = super().forward(x)
            return self.last

    def forward(model: Any, x: Tensor) -> Tensor:
        y = one_after_the_other(model, x)
        kept: Tensor = model.blocks[0].last + 0.5 * model.blocks[1].before
        return y + kept

    return Chain(forward, Remembers)


@model
def passes_that_are_counted() -> nn.Module:
    class Counts(Block):
        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            return super().forward(x) * (1 + 0.1 * ((self.passes - 1) // 2))  # two microbatches a step

    return Chain(block=Counts)


@model
def a_buffer_of_the_models_own() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        y = (
            one_after_the_other(model, x - model.mean)
            if model.first
            else model.blocks[3](model.blocks[2](x) - model.mean)
        )
        return y

    chain = Chain(forward, first=True)
    chain.register_buffer("mean", torch.full((WIDTH,), 0.5))
    return chain


# Checkpoints of the model's own


@model
def reentrant_checkpoints() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.first(x)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x

    return Chain(forward, first=nn.Linear(WIDTH, WIDTH))


@model
def checkpointed_halves() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        y: Tensor = checkpoint_sequential(model.net, 2, model.first(x), use_reentrant=False)
        return y

    chain = Chain(forward, first=nn.Linear(WIDTH, WIDTH), net=nn.Sequential(*(Block() for _ in range(4))))
    del chain.blocks
    return chain


class Recomputes(torch.autograd.Function):
    """Runs blocks without a graph, and again one by one in the backward pass, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Any) -> Tensor:
        ctx.blocks, ctx.inputs = blocks, []
        for block in blocks:
            ctx.inputs.append(x)
            x = block(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        for block, x in zip(reversed(ctx.blocks), reversed(ctx.inputs), strict=True):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = block(x)
            torch.autograd.backward(y, gradient)
            gradient = x.grad
        return gradient, None


@model
def blocks_in_an_autograd_function() -> nn.Module:
    first, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return Chain(lambda model, x: model.head(Recomputes.apply(model.first(x), model.blocks)), first=first, head=head)


# Modules reached otherwise


@model
def forward_called_past_hooks() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block.forward(x)
        return x

    return Chain(forward)


@model
def blocks_in_a_plain_list() -> nn.Module:
    chain = Chain(lambda model, x: model.layers[3](model.layers[2](model.layers[1](model.layers[0](x)))))
    chain.layers = list(chain.blocks)  # type: ignore[assignment]
    return chain


@model
def a_block_that_knows_its_parent() -> nn.Module:
    class Scaled(Block):
        parent: list[Any]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x) * self.parent[0].scale
            return y

    chain = Chain(block=Scaled, scale=nn.Parameter(torch.tensor(1.3)))
    for block in chain.blocks:
        block.parent = [chain]  # type: ignore[assignment]
    return chain


@model
def functional_calls() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = torch.func.functional_call(block, {n: 1.5 * p for n, p in block.named_parameters()}, (x,))
        return x

    return Chain(forward)


@model
def parameters_outside_of_modules() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        for block, scale in zip(model.blocks, model.scales, strict=True):
            x = block(x + model.start) * scale
        return x + torch.as_tensor(model.start)

    scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH) * (1 + i / 5)) for i in range(4)])
    return Chain(forward, scales=scales, start=nn.Parameter(torch.ones(WIDTH)))


# Weights used elsewhere than in their own module


@model
def a_weight_of_a_block_used_by_the_model() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        x = one_after_the_other(model, x * model.blocks[3].up.weight.mean())
        y: Tensor = x @ model.blocks[1].up.weight.T @ model.blocks[1].up.weight
        return y

    return Chain(forward)


@model
def a_penalty_on_all_parameters() -> nn.Module:
    return Chain(
        lambda model, x: one_after_the_other(model, x) + 0.01 * sum(p.square().sum() for p in model.parameters())
    )


@model
def functional_calls_with_other_weights() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        weights = {n: getattr(model, n.replace(".", "_")) for n, _ in model.blocks[1].named_parameters()}
        y: Tensor = torch.func.functional_call(model.blocks[1], weights, (x,))
        return one_after_the_other(model, x) + y

    own = {n.replace(".", "_"): nn.Parameter(0.5 * p.detach()) for n, p in Block().named_parameters()}
    return Chain(forward, Block, **own)


@model
def a_gradient_of_torch_func() -> nn.Module:
    return Chain(lambda model, x: torch.func.grad(lambda z: one_after_the_other(model, z).square().sum())(x))


@model
def weights_that_are_computed() -> nn.Module:
    """By parametrisation, and by a layer whose input has no batch."""

    def forward(model: Any, x: Tensor) -> Tensor:
        x = one_after_the_other(model, x)
        y: Tensor = x @ model.maker(model.seed).view(WIDTH, WIDTH)
        return y

    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            torch.nn.utils.parametrizations.weight_norm(self.up)

    return Chain(forward, Normed, maker=nn.Linear(3, WIDTH * WIDTH), seed=nn.Parameter(torch.ones(3)))


# What pp refuses


@model
def only_parameters() -> nn.Module:
    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.ParameterList([nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH)) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            for w in self.w:
                x = torch.tanh(x @ w)
            return x

    return Matrices()


@model
def a_batch_norm_of_two_blocks() -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH)

    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(super().forward(x))
            return y

    return Chain(block=Normed)


@model
def a_gradient_in_the_forward_pass() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = one_after_the_other(model, x).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    return Chain(forward)


@model
def weights_clamped_in_the_forward_pass() -> nn.Module:
    class Clamped(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.clamp_(-0.3, 0.3)
            return super().forward(x)

    return Chain(block=Clamped)


@model
def blocks_under_vmap() -> nn.Module:
    return Chain(lambda model, x: torch.vmap(lambda row: one_after_the_other(model, row))(x))


@model
def parameters_kept_in_a_list() -> nn.Module:
    chain = Chain(lambda model, x: one_after_the_other(model, x) * model.all[0].mean())
    chain.all = list(chain.parameters())  # type: ignore[assignment]
    return chain


@model
def a_block_in_a_method_of_its_own() -> nn.Module:
    class Goes(Block):
        def go(self, x: Tensor) -> Tensor:
            return super().forward(x)

    def forward(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block.go(x)
        return x

    return Chain(forward, Goes)


# Fourier transforms


class Filtered(Block):
    """Multiplies the spectrum of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH))


@model
def filters_of_spectra() -> nn.Module:
    return Chain(one_after_the_other, Filtered)


class OfSpectrum(Block):
    """Takes and returns a spectrum: complex numbers cross from stage to stage."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(super().forward(x.real), torch.tanh(x.imag))


@model
def spectra_between_blocks() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        y: Tensor = torch.fft.ifft(one_after_the_other(model, torch.fft.fft(x))).real
        return y

    return Chain(forward, OfSpectrum)


def batches() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(ROWS * STEPS, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(ROWS * STEPS, WIDTH, generator=generator, dtype=torch.float64)


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def alone(name: str, microbatches: int) -> tuple[list[float], dict[str, Tensor]]:
    whole, losses = built(name), []
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.5)
    for x, y in zip(*(t.split(ROWS) for t in batches()), strict=True):
        optimizer.zero_grad()
        losses.append(0.0)
        for part, target in zip(x.clone().chunk(microbatches), y.chunk(microbatches), strict=True):
            loss = F.mse_loss(whole(part), target) / microbatches
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    return losses, {n: p.detach() for n, p in whole.named_parameters()}


def divided(names: list[str], plan: str, microbatches: int) -> dict[str, str]:
    """For each model "same", where its parts differ, or why it was refused."""
    found = {}
    references = {name: alone(name, microbatches) for name in names}
    for name in names:
        model = built(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        data = DataLoader(TensorDataset(*batches()), batch_size=ROWS)
        try:
            engine = paceline.setup(model, optimizer, loss=F.mse_loss, loader=data, plan=plan, precision="fp64")
        except PlanError as error:
            found[name] = str(error)
            continue
        losses = [engine.step(batch).loss for batch in engine.loader]
        expected, weights = references[name]
        assert engine.parts is not None
        own = {n: (p, engine.parts[n].layout.take(weights[n])) for n, p in engine.named_parameters().items()}
        far = [n for n, (p, whole) in own.items() if not torch.allclose(p.detach(), whole, rtol=1e-8, atol=1e-10)]
        same = losses == pytest.approx(expected, rel=1e-9) and not far
        found[name] = "same" if same else f"losses {losses} for {expected}; {far}"
        engine.close()
    return found


PP, FSDP = "pp=2 microbatches=2", "fsdp=2"


ZERO_BUBBLE = f"{PP} schedule=zero-bubble cut=blocks.1,blocks.2,blocks.3"
COMPUTED = {
    "modules that stand twice": (PP, "one_block_under_two_names one_block_four_times a_norm_with_a_second_name"),
    "hooks": (
        PP,
        "parameter_hooks backward_hooks_on_modules hooks_on_the_model_and_its_blocks features_taken_by_hooks",
    ),
    "Fourier transforms": (PP, "filters_of_spectra spectra_between_blocks"),
    "changes in place": (
        PP,
        "addition_in_place_between_blocks an_earlier_output_changed_in_place a_batch_changed_in_place "
        "a_block_that_changes_its_input",
    ),
    "a view changed in place": (FSDP, "addition_in_place_to_a_view"),
}
COMPUTED_SLOWLY = {
    "state that modules keep": (
        PP,
        "attributes_read_by_others passes_that_are_counted a_buffer_of_the_models_own parameters_outside_of_modules",
    ),
    "the model's own checkpoints": (PP, "reentrant_checkpoints checkpointed_halves blocks_in_an_autograd_function"),
    "modules that their parent does not call": (
        PP,
        "forward_called_past_hooks blocks_in_a_plain_list a_block_that_knows_its_parent functional_calls",
    ),
    "weights with hooks or made of others, whose gradients are not deferred": (
        ZERO_BUBBLE,
        "weights_that_are_computed parameter_hooks a_batch_changed_in_place addition_in_place_between_blocks",
    ),
    "blocks gathered with the remainder": (
        FSDP,
        "a_weight_of_a_block_used_by_the_model a_penalty_on_all_parameters a_block_in_a_method_of_its_own "
        "functional_calls functional_calls_with_other_weights forward_called_past_hooks a_block_that_changes_its_input "
        "a_gradient_in_the_forward_pass a_gradient_of_torch_func blocks_under_vmap one_block_under_two_names "
        "blocks_in_an_autograd_function",
    ),
    "shards of stages": (
        "fsdp=2 pp=2 microbatches=2",
        "a_weight_of_a_block_used_by_the_model one_block_under_two_names hooks_on_the_model_and_its_blocks",
    ),
}


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        *(pytest.param(*case, id=name) for name, case in COMPUTED.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in COMPUTED_SLOWLY.items()),
    ],
)
def test_parts_of_a_model_compute_what_the_whole_computes(ranks: Ranks, plan: str, names: str) -> None:
    parsed = Plan.parse(plan)
    for found in ranks(parsed.ranks, divided, names.split(), plan, parsed.microbatches, backend="shm"):
        assert found == dict.fromkeys(names.split(), "same")


REFUSED = {
    PP: {
        "only_parameters": "the model can be cut into 1 at most. These would work: pp=1",
        "a_batch_norm_of_two_blocks": "is read before it, and changed after it for the next forward pass",
        "a_gradient_in_the_forward_pass": "runs autograd itself",
        "weights_clamped_in_the_forward_pass": "changes its parameter blocks.0.up.weight",
        "blocks_under_vmap": "within a transform of torch.func",
        "parameters_kept_in_a_list": "keeps the parameter blocks.0.up.weight in its attribute all",
        "accumulation_hooks": "register_post_accumulate_grad_hook",
        "a_block_in_a_method_of_its_own": "the model can be cut into 1 at most. These would work: pp=1",
    },
    FSDP: {
        "parameter_hooks": "blocks.1.up.weight has a hook (register_hook)",
        "accumulation_hooks": "fsdp=1",
        "weights_clamped_in_the_forward_pass": "changes its parameter blocks.0.up.weight",
        "parameters_kept_in_a_list": "keeps the parameter blocks.0.up.weight in its attribute all",
    },
}


@pytest.mark.parametrize("plan", REFUSED)
def test_what_parts_cannot_compute_is_refused_by_every_rank_before_the_first_step(ranks: Ranks, plan: str) -> None:
    words = REFUSED[plan]
    first, second = ranks(2, divided, list(words), plan, Plan.parse(plan).microbatches, backend="shm")
    assert first == second
    for name, expected in words.items():
        assert expected in first[name], first[name]


def normed_alike() -> list[str]:
    """Batch norm shared by two fsdp blocks differs from one process.

    Its batch there is one rank's.
    """
    whole, model = built("a_batch_norm_of_two_blocks"), built("a_batch_norm_of_two_blocks")
    x, y = (torch.cat([t[:2]] * 2) for t in batches())  # both ranks have the same samples, so the same statistics
    data = DataLoader(TensorDataset(x, y), batch_size=ROWS)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    F.mse_loss(whole(x[:2]), y[:2]).backward()
    optimizer.step()
    engine = paceline.setup(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss, loader=data, plan=FSDP, precision="fp64"
    )
    for batch in engine.loader:
        engine.step(batch)
    parts = engine.parts or {}
    expected = {n: parts[n].layout.take(p.detach()) for n, p in whole.named_parameters()}
    return [n for n, p in engine.named_parameters().items() if not torch.allclose(p.detach(), expected[n])]


def test_blocks_that_share_a_batch_norm_are_sharded_once(ranks: Ranks) -> None:
    assert ranks(2, normed_alike, backend="shm") == [[], []]
