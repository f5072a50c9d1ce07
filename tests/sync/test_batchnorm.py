"""Batch norm over all replicas.

Outputs, gradients and running statistics are those of torch's own layer on the whole batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.errors import PlanError
from paceline.sync.batchnorm import has_batch_norm, is_synchronised, synchronise, unsynchronise
from ranks import Backend, Ranks

CHANNELS, SHARES = 3, (5, 2, 4)


@pytest.fixture
def ranks(ranks: Ranks) -> Ranks:
    """Over shared memory, where a test names no other transport."""
    return partial(ranks, backend="shm")


def layer(dimensions: int, **settings: Any) -> BatchNorm:
    torch.manual_seed(6)
    kinds: dict[int, type[BatchNorm]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
    made = kinds[dimensions](CHANNELS, dtype=torch.float64, **settings)
    if settings.get("affine", True):
        nn.init.normal_(made.weight)
        nn.init.normal_(made.bias)
    return made


def whole_batch(dimensions: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs far from 0, and weights of the output.

    A variance by squares would lose digits there.
    """
    shape = (sum(SHARES), CHANNELS, *(2, 3, 2)[: dimensions if dimensions > 1 else 0])
    generator = torch.Generator().manual_seed(step)
    return 100 + torch.randn(shape, generator=generator, dtype=torch.float64), torch.randn(
        shape, generator=generator, dtype=torch.float64
    )


def passed(model: nn.Module, dimensions: int, part: slice) -> dict[str, Any]:
    """Two training passes and one evaluation over a part of the batch."""
    outputs, gradients = [], []
    for step in range(2):
        inputs, weights = (t[part].clone() for t in whole_batch(dimensions, step))
        y = model(inputs.requires_grad_())
        (y * weights).sum().backward()
        outputs.append(y.detach())
        gradients.append(inputs.grad)
    model.eval()
    outputs.append(model(whole_batch(dimensions, 2)[0][part]).detach())
    parameters = {name: p.grad for name, p in model.named_parameters()}
    return {
        "outputs": outputs,
        "gradients": gradients,
        "parameters": parameters,
        "buffers": dict(model.named_buffers()),
    }


def as_rank(dimensions: int, settings: dict[str, Any]) -> dict[str, Any]:
    with joined(deadline_s=30) as group:
        model = synchronise(layer(dimensions, **settings), group)
        assert is_synchronised(model)
        first = sum(SHARES[: group.rank])
        return passed(model, dimensions, slice(first, first + SHARES[group.rank]))


@pytest.mark.parametrize(
    ("dimensions", "settings", "backend"),
    [(1, {}, "gloo"), (2, {"momentum": None}, "shm"), (3, {"affine": False}, "shm")],
    ids=["1 over gloo", "2 with a cumulative average", "3 without weights"],
)
def test_replicas_normalise_as_one_layer_on_the_whole_batch(
    ranks: Ranks, dimensions: int, settings: dict[str, Any], backend: Backend
) -> None:
    one = passed(layer(dimensions, **settings), dimensions, slice(None))
    many = ranks(len(SHARES), as_rank, dimensions, settings, backend=backend)
    for key in ("outputs", "gradients"):
        for i, expected in enumerate(one[key]):
            torch.testing.assert_close(torch.cat([result[key][i] for result in many]), expected, rtol=1e-9, atol=1e-11)
    for name, expected in one["parameters"].items():  # the rule sums them
        torch.testing.assert_close(sum(result["parameters"][name] for result in many), expected, rtol=1e-9, atol=1e-11)
    for result in many:
        assert result["buffers"].keys() == one["buffers"].keys()
        for name, expected in one["buffers"].items():
            torch.testing.assert_close(result["buffers"][name], expected)


def evaluated_apart() -> Tensor:
    """Rank 0 measures one batch and rank 1 none."""
    with joined(deadline_s=5) as group:
        model = synchronise(layer(1, track_running_stats=False), group).eval()
        x = whole_batch(1, 0)[0]
        return model(x).detach() if group.rank == 0 else x


def test_an_evaluation_waits_for_no_other_replica(ranks: Ranks) -> None:
    measured, _ = ranks(2, evaluated_apart, deadline_s=20)
    torch.testing.assert_close(measured, layer(1, track_running_stats=False)(whole_batch(1, 0)[0]).detach())


def converted() -> tuple[bool, bool, list[bool], list[bool]]:
    with joined(deadline_s=30) as group:
        model = nn.Sequential(
            nn.Linear(4, CHANNELS), nn.Sequential(nn.BatchNorm1d(CHANNELS)), nn.BatchNorm1d(CHANNELS).eval()
        )
        before = {**dict(model.named_modules()), **dict(model.named_parameters()), **dict(model.named_buffers())}
        kinds = [type(m) for m in model.modules()]
        synchronise(model, group)
        after = {**dict(model.named_modules()), **dict(model.named_parameters()), **dict(model.named_buffers())}
        same = before.keys() == after.keys() and all(before[name] is after[name] for name in before)
        changed = [type(m) is not kind for m, kind in zip(model.modules(), kinds, strict=True)]
        training = [m.training for m in model.modules()]
        unsynchronise(model)
        return same, [type(m) for m in model.modules()] == kinds, changed, training


def test_only_batch_norm_layers_change_and_all_objects_stay(ranks: Ranks) -> None:
    for same, undone, changed, training in ranks(2, converted):
        assert changed == [False, False, False, True, True]
        assert same
        assert undone
        assert training == [True, True, True, True, False]


class WithActivation(nn.BatchNorm2d):
    """Writes its own forward pass, with an activation behind, as timm's BatchNormAct2d does."""

    def __init__(self, channels: int, **settings: Any) -> None:
        super().__init__(channels, **settings)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.2, self.eps
        )
        activated: Tensor = self.act(y)
        return activated


class Scaled(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 1.5


def unusual(kind: str) -> nn.Module:
    """Batch norms as people extend, share, hook, patch and parametrise them, around a convolution."""
    torch.manual_seed(2)
    norm: BatchNorm = WithActivation(CHANNELS) if kind == "subclass" else nn.BatchNorm2d(CHANNELS)
    if kind == "converted by torch":
        norm = nn.SyncBatchNorm(CHANNELS)
    layers: list[nn.Module] = [norm, nn.Conv2d(CHANNELS, CHANNELS, 1), norm if kind == "twice" else nn.Identity()]
    if kind == "hooked":
        norm.register_forward_hook(lambda module, args, output: output.tanh())
    if kind == "patched":
        plain = norm.forward
        setattr(norm, "forward", lambda x: plain(x).sigmoid())  # noqa: B010 - as people patch one layer
    if kind == "parametrised":
        torch.nn.utils.parametrize.register_parametrization(norm, "weight", Scaled())
    if kind == "instance norm":
        layers.append(nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True))
    return nn.Sequential(*layers).double()


UNUSUAL = ("subclass", "twice", "hooked", "patched", "parametrised", "converted by torch", "instance norm")


def unusual_as_rank() -> dict[str, dict[str, Any]]:
    with joined(deadline_s=30) as group:
        first = sum(SHARES[: group.rank])
        own = slice(first, first + SHARES[group.rank])
        return {kind: passed(synchronise(unusual(kind), group), 2, own) for kind in UNUSUAL}


def test_layers_keep_what_they_do_besides(ranks: Ranks) -> None:
    found = ranks(len(SHARES), unusual_as_rank)
    for kind in UNUSUAL:
        one, many = passed(unusual(kind), 2, slice(None)), [of_rank[kind] for of_rank in found]
        pairs = [
            (torch.cat([result[key][i] for result in many]), expected)
            for key in ("outputs", "gradients")
            for i, expected in enumerate(one[key])
            # an instance norm's running statistics are over samples, so each replica has its own
            if (kind, key, i) != ("instance norm", "outputs", 2)
        ]
        pairs += [
            (sum(result["parameters"][n] for result in many), expected) for n, expected in one["parameters"].items()
        ]
        for together, expected in pairs:
            torch.testing.assert_close(together, expected, rtol=1e-8, atol=1e-10, msg=lambda text: f"{kind}: {text}")  # noqa: B023


class ByHand(nn.BatchNorm1d):
    """Computes its statistics by itself."""

    def forward(self, input: Tensor) -> Tensor:
        return (input - input.mean(0)) / input.std(0)


def refused(layers: list[nn.Module]) -> list[str]:
    texts = []
    with joined(deadline_s=30) as group:
        for layer in layers:
            with pytest.raises(PlanError) as error:
                synchronise(nn.Sequential(layer), group)(torch.randn(4, CHANNELS))
            texts.append(str(error.value))
    return texts


class OwnSync(nn.SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_a_layer_whose_statistics_cannot_be_global_is_refused(ranks: Ranks) -> None:
    reasons = [
        "ByHand extends BatchNorm but computes without torch.nn.functional.batch_norm",
        '"0" is a LazyBatchNorm1d without a first batch',
        '"0" is a OwnSync, which extends torch\'s SyncBatchNorm',
    ]
    for texts in ranks(2, refused, [ByHand(CHANNELS), nn.LazyBatchNorm1d(), OwnSync(CHANNELS)]):
        assert all(why in text for why, text in zip(reasons, texts, strict=True)), texts


def copied() -> bool:
    with joined(deadline_s=30) as group:
        model = synchronise(nn.BatchNorm1d(CHANNELS), group)
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        return is_synchronised(average) and average.module.weight is not model.weight


def test_a_model_can_be_copied_to_average_its_weights(ranks: Ranks) -> None:
    assert all(ranks(2, copied))


def half_precision() -> tuple[torch.dtype, bool]:
    with joined(deadline_s=30) as group:
        model = synchronise(nn.BatchNorm1d(CHANNELS), group)
        y = model(torch.randn(4, CHANNELS).bfloat16())
        return y.dtype, bool(y.isfinite().all())


def test_half_precision_stays_half_precision(ranks: Ranks) -> None:
    assert ranks(2, half_precision) == [(torch.bfloat16, True)] * 2


def test_one_replica_keeps_its_layers() -> None:
    model = nn.Sequential(nn.BatchNorm1d(CHANNELS))
    assert synchronise(model, Group()) is model
    assert type(model[0]) is nn.BatchNorm1d


def test_batch_norm_is_found_at_any_depth() -> None:
    assert has_batch_norm(nn.Sequential(nn.Sequential(nn.BatchNorm2d(2))))
    assert not has_batch_norm(nn.Sequential(nn.LayerNorm(2), nn.GroupNorm(1, 2)))
