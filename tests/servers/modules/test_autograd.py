"""Modules in another process train as they would here."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import DeadlineError, PacelineError, RemoteError
from paceline.job.spec import load_object
from paceline_server.modules import turns
from paceline_server.modules.host import Host, connect
from paceline_server.modules.module import context, microbatches, module, optimizer

sys.path.insert(0, str(Path(__file__).parent))
from serving import path_of, serving

from refusals import raises


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    with serving() as socket:
        yield socket


@pytest.fixture
def there(socket: Path) -> Iterator[Host]:
    with connect("there", socket, deadline_s=30.0) as host:
        yield host


def here(name: str, *args: Any, seed: int = 0, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return load_object(path_of(name))(*args, **kwargs)


def batches(count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(7)
    return [
        (
            torch.randint(10, (6,), generator=draw),
            torch.randn(6, 4, generator=draw, dtype=torch.float64),
            torch.randn(6, 3, generator=draw, dtype=torch.float64),
        )
        for _ in range(count)
    ]


def train(
    parts: list[nn.Module], step: Callable[[], object], zero: Callable[[], object], steps: int = 5
) -> list[float]:
    """Losses of an embedding, a layer of this process and a tower."""
    table, middle, tower = parts
    losses = []
    for rows, x, y in batches(steps):
        loss = (tower(torch.relu(middle(table(rows) + x))) - y).square().mean()
        zero()
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("rule", "settings"), [("sgd", {"lr": 0.1, "momentum": 0.9}), ("adam", {"lr": 0.01})])
def test_a_model_with_remote_parts_trains_like_the_local_one(there: Host, rule: str, settings: dict[str, Any]) -> None:
    parts = [here("table", seed=1), here("linear", seed=2), here("Tower", seed=3)]
    make = torch.optim.SGD if rule == "sgd" else torch.optim.Adam
    local = make([p for part in parts for p in part.parameters()], **settings)
    expected = train(parts, local.step, local.zero_grad)

    table, tower = module("there", path_of("table"), seed=1), module(there, path_of("Tower"), seed=3)
    middle = here("linear", seed=2)
    of_middle, remote = make(middle.parameters(), **settings), optimizer([table, tower], rule, **settings)

    def step() -> None:
        of_middle.step()
        remote.step()

    losses = train([table, middle, tower], step, of_middle.zero_grad)

    assert losses == pytest.approx(expected, rel=1e-12)
    assert expected[-1] < expected[0]
    for mine, other in zip(parts, [table, middle, tower], strict=True):
        torch.testing.assert_close(other.state_dict(), mine.state_dict())


def test_a_module_used_twice_has_the_gradients_of_both_uses(there: Host) -> None:
    mine, other = here("linear"), module(there, path_of("linear"), seed=0)
    x = torch.randn(3, 4, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for layer, given in zip((mine, other), inputs, strict=True):
        layer(torch.tanh(layer(given))).sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    optimizer(other, "sgd", lr=0.1).step()
    torch.optim.SGD(mine.parameters(), lr=0.1).step()
    torch.testing.assert_close(other.state_dict(), mine.state_dict())


def test_a_graph_that_is_kept_can_be_gone_through_again_and_another_cannot(there: Host) -> None:
    layer = module(there, path_of("linear"), seed=0)
    x = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    y = layer(x).sum()
    y.backward(retain_graph=True)
    first = x.grad
    assert first is not None
    first = first.clone()
    y.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_gradients_of_gradients_are_refused(there: Host) -> None:
    layer = module(there, path_of("linear"), seed=0)
    x = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    with raises(PacelineError, "remote.create_graph"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_asking_for_the_gradients_of_inputs_leaves_none_of_parameters(there: Host) -> None:
    layer = module(there, path_of("linear"), seed=0)
    step = optimizer(layer, "sgd", lr=0.1)
    x = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    [gradient] = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(gradient, here("linear").weight.sum(0, keepdim=True).detach())
    assert step.gradient_norm() == 0.0
    layer(x).sum().backward()
    assert step.gradient_norm() == pytest.approx((4 * 4 + 4) ** 0.5)
    step.zero_grad()
    assert step.gradient_norm() == 0.0


def test_nested_outputs_keep_their_form_and_their_gradients(there: Host) -> None:
    mine, other = here("Nested"), module(there, path_of("Nested"), seed=0)
    load_object(path_of("Heads"))
    x = torch.randn(2, 4, dtype=torch.float64)
    results = [layer({"x": [x], "unused": None}, factor=3.0) for layer in (mine, other)]
    for first, heads, number in results:
        assert (type(first), list(first), type(heads).__name__, heads.name, number) == (
            dict, ["y", "twice"], "Heads", "heads", 7,
        )  # fmt: skip
        assert heads.score.requires_grad
        assert not heads.label.requires_grad
    (a, of_a, _), (b, of_b, _) = results
    torch.testing.assert_close(b["y"], a["y"])
    torch.testing.assert_close((of_b.score, of_b.label), (of_a.score, of_a.label))
    b["twice"][0].sum().backward()  # two of the outputs have no part in it
    a["twice"][0].sum().backward()
    optimizer(other, "sgd", lr=1.0).step()
    torch.optim.SGD(mine.parameters(), lr=1.0).step()
    torch.testing.assert_close(other.state_dict(), mine.state_dict())


def test_mode_and_buffers_are_those_of_the_module(there: Host) -> None:
    mine, other = here("Tower"), module(there, path_of("Tower"), seed=0)
    x = torch.randn(8, 4, dtype=torch.float64)
    for layer in (mine, other):
        layer(x)
    layers = nn.ModuleDict({"a": mine, "b": other}).eval()
    with torch.no_grad():
        torch.testing.assert_close(other(x), mine(x))
    assert not other(x[:1]).isnan().any()  # a batch norm of one row in training would raise
    state = layers.state_dict()
    assert {key[2:] for key in state if key[0] == "a"} == {key[2:] for key in state if key[0] == "b"}
    torch.testing.assert_close(state["b.norm.running_mean"], state["a.norm.running_mean"])


def test_a_state_is_loaded_and_one_that_does_not_fit_is_not(there: Host) -> None:
    other = module(there, path_of("Tower"), seed=0)
    wanted = here("Tower", seed=5).state_dict()
    other.load_state_dict(wanted)
    torch.testing.assert_close(dict(other.state_dict()), dict(wanted))
    with pytest.raises(RuntimeError, match=r"Missing key.*first\.weight"):
        other.load_state_dict({key: 0 * value for key, value in wanted.items() if key != "first.weight"})
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(wanted | {"first.bias": torch.zeros(3)})
    torch.testing.assert_close(dict(other.state_dict()), dict(wanted))


def test_without_gradients_nothing_is_kept(there: Host) -> None:
    layer = module(there, path_of("linear"), seed=0)
    x = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        assert not layer(x).requires_grad
    assert layer(x).requires_grad


def test_autocast_goes_along(there: Host) -> None:
    layer = module(there, path_of("dropout_net"), seed=0).eval()
    x = torch.randn(2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_random_numbers_depend_on_the_seed_alone(there: Host) -> None:
    x = torch.ones(2, 4)
    one, other, third = (module(there, path_of("dropout_net"), seed=seed) for seed in (4, 4, 5))
    first = [one(x) for _ in range(3)]
    assert not first[0].equal(first[1])
    third(x)
    for expected in first:
        assert other(x).equal(expected)


def test_contexts_of_threads_do_not_mix(there: Host) -> None:
    layer = module(there, path_of("linear"), seed=0)
    step = optimizer(layer, "sgd", lr=0.1)
    both = threading.Barrier(2, timeout=20.0)

    def accumulate(factor: float) -> float:
        with context():
            x = torch.full((1, 4), factor, dtype=torch.float64)
            for _ in range(3):
                layer(x).sum().backward()
            both.wait()
            return step.gradient_norm()

    with ThreadPoolExecutor(2) as pool:
        norms = list(pool.map(accumulate, (1.0, 2.0)))
    assert norms == [pytest.approx(3 * (4 * 4 * f**2 + 4) ** 0.5) for f in (1.0, 2.0)]
    assert step.gradient_norm() == 0.0


def test_a_backward_pass_sees_the_weights_of_its_forward_pass(there: Host) -> None:
    tower = module(there, path_of("Tower"), seed=0).eval()
    mine = here("Tower").eval()
    step = optimizer(tower, "adam", lr=0.5)
    x = torch.randn(5, 4, dtype=torch.float64)
    late, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = tower(late).sum()
    tower(x).sum().backward()
    step.step()  # meanwhile
    y.backward()
    mine(expected).sum().backward()
    torch.testing.assert_close(late.grad, expected.grad)
    step.step()
    local = torch.optim.Adam(mine.parameters(), lr=0.5)
    local.step()
    local.step()
    torch.testing.assert_close(tower.state_dict(), mine.state_dict())


def test_microbatches_in_flight_have_the_gradients_of_the_batch(there: Host) -> None:
    parts: list[nn.Module] = [here("linear", seed=1), here("Tower", seed=2).eval()]
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    (parts[1](torch.relu(parts[0](x))) - y).square().mean().backward()
    first, second = here("linear", seed=1), module(there, path_of("Tower"), seed=2).eval()

    def step(batch: tuple[Tensor, Tensor]) -> float:
        loss = (second(torch.relu(first(batch[0]))) - batch[1]).square().mean() / 4
        loss.backward()
        return float(loss.detach())

    losses = microbatches(step, list(zip(x.chunk(4), y.chunk(4), strict=True)), in_flight=3)
    assert len(losses) == 4
    torch.testing.assert_close(first.weight.grad, parts[0].weight.grad)
    optimizer(second, "sgd", lr=0.1).step()
    torch.optim.SGD(parts[1].parameters(), lr=0.1).step()
    torch.testing.assert_close(second.state_dict(), parts[1].state_dict())


def test_one_microbatch_computes_here_while_others_wait_for_hosts(there: Host) -> None:
    tower = module(there, path_of("Tower"), seed=2)
    computing, wide = threading.Lock(), torch.ones(400, 400)

    def step(batch: Tensor) -> float:
        for _ in range(3):
            assert computing.acquire(blocking=False), "two microbatches compute at the same time"
            x = batch.clone().requires_grad_()
            wide.mm(wide)
            computing.release()
            tower(x).sum().backward()
        return float(sum(microbatches(lambda part: tower(part).sum().item(), [batch, batch])))

    assert len(microbatches(step, list(torch.ones(6, 2, 4, dtype=torch.float64)))) == 6


def test_microbatches_that_wait_for_each_other_end(there: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_PATIENCE_S", 0.1)
    tower, both, lock = module(there, path_of("Tower"), seed=2), threading.Barrier(2, timeout=30), threading.Lock()

    def step(batch: Tensor) -> float:
        both.wait()
        with lock:
            return float(tower(batch).sum())

    assert len(microbatches(step, list(torch.ones(4, 2, 4, dtype=torch.float64)), in_flight=2)) == 4


@pytest.mark.parametrize("fault", ["raise", "backward raise"])
def test_an_error_there_comes_with_its_traceback(there: Host, fault: str) -> None:
    faulty = module(there, path_of("Faulty"))
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RemoteError) as raised:
        faulty(x, fault).sum().backward()
    part = "backward" if fault.startswith("backward") else "forward"
    text = str(raised.value)
    assert f"the {part} pass of {path_of('Faulty')} on there" in text
    assert "ValueError: the tower is on fire" in text
    assert "in _do\n" in text
    assert faulty(x).equal(x)  # and the next one works


@pytest.mark.parametrize("fault", ["hang", "backward hang"])
def test_a_module_that_hangs_ends_at_the_deadline(fault: str) -> None:
    with serving(kill=True) as socket, connect("slow", socket, deadline_s=20.0) as host:
        faulty = module(host, path_of("Faulty"))
        host.deadline_s = 0.3
        with raises(DeadlineError, "remote.call_deadline", deadline_s=0.3, name="slow"):
            faulty(torch.ones(2, requires_grad=True), fault).sum().backward()


def test_a_module_does_what_it_cannot_take_over_under_its_name(there: Host) -> None:
    layer = module(there, path_of("linear"), seed=0)
    for refused in (layer.double, layer.half, layer.requires_grad_):
        with pytest.raises(PacelineError, match="factory"):
            refused()
    assert layer.to("cpu").cpu() is layer
    assert "linear on there" in repr(layer)
    assert list(layer.parameters()) == []
