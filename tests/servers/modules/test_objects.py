"""Objects, calls and steps in another process: who holds them, and that each call runs once."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline_server as remote
from forked import python
from paceline.errors import ChannelError, PacelineError, RemoteError
from paceline.wire.connection import Connection, connect
from paceline.wire.key import RunKey
from paceline_server import client
from paceline_server.modules import host as hosts
from paceline_server.modules.held import Answers
from paceline_server.modules.host import Host

sys.path.insert(0, str(Path(__file__).parent))
from serving import DEADLINE_S, NAMES, path_of, serving

from refusals import raises


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    """The socket of a process that serves `served_things.py`, and forgets clients after 0.2 s."""
    with serving(grace_s=0.2) as socket:
        yield socket


@pytest.fixture
def there(socket: Path) -> Iterator[Host]:
    with remote.connect("there", socket, deadline_s=DEADLINE_S) as host:
        yield host


def test_functions_are_called_and_results_streamed(there: Host) -> None:
    assert remote.call("there", path_of("double"), [1, "a"]) == [1, "a", 1, "a"]
    assert [int(n) for n in remote.stream("there", path_of("squares"), 30)] == [n * n for n in range(30)]
    counter = remote.create(there, path_of("Counter"), start=3)
    assert list(counter.stream("up_to", 6)) == [3, 4, 5]


def test_an_object_is_an_argument_on_its_host_only(there: Host, socket: Path) -> None:
    one, other = (remote.create("there", path_of("Counter"), start) for start in (1, 10))
    assert one.call("add_value_of", other) == 11
    with (
        remote.connect("second", socket) as second,
        raises(PacelineError, "remote.argument_of_other_host", host="second"),
    ):
        remote.call(second, path_of("double"), one)
    with raises(PacelineError, "remote.argument_unsupported", class_name="Linear"):
        one.call("add", torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("what", "code"),
    [
        (lambda: remote.create("there", "os:system", "true"), "remote.raised_on_host"),
        (lambda: remote.module("there", path_of("Towr")), "remote.raised_on_host"),
        (lambda: remote.module("there", path_of("not_a_module")), "remote.raised_on_host"),
        (lambda: remote.create("there", path_of("Tower")).call("_secret"), "remote.raised_on_host"),
        (lambda: remote.create("there", path_of("Counter")).call("value"), "remote.raised_on_host"),
        (lambda: remote.optimizer(remote.module("there", path_of("linear")), "sgdd"), "remote.raised_on_host"),
        (lambda: remote.call("there", path_of("double"), object()), "remote.value_unsupported"),
        (lambda: remote.call("elsewhere", path_of("double"), 1), "remote.name_unknown"),
    ],
)
def test_what_is_not_served_is_refused(there: Host, what: Any, code: str) -> None:
    with raises(PacelineError, code):
        what()
    assert remote.call("there", path_of("double"), 2) == 4  # and nothing is held up


def test_an_object_lives_as_long_as_its_last_holder(there: Host, socket: Path) -> None:
    counter = remote.create(there, path_of("Counter"))
    token = counter.token
    with remote.connect("second", socket) as second:
        held = remote.attach(second, token)
        del counter
        gc.collect()
        assert held.call("add", 1) == 1
    with raises(RemoteError, "remote.raised_on_host"):
        _hold_again_and_again(there, token)


def test_the_objects_of_a_client_that_died_end(there: Host, socket: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import paceline_server as remote\n"
        f"remote.connect('there', Path({str(socket)!r}))\n"
        f"counter = remote.create('there', {path_of('Counter')!r})\n"
        "print(counter.token, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = python(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    token = process.stdout.readline().strip()
    mine = remote.attach(there, token)
    mine.release()
    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_S)
    process.stdin.close()
    process.stdout.close()
    with raises(RemoteError, "remote.raised_on_host"):
        _hold_again_and_again(there, token)


def _hold_again_and_again(host: Host, token: str) -> None:
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        remote.attach(host, token).release()
        time.sleep(0.01)


def test_clients_share_what_has_a_name(there: Host, socket: Path) -> None:
    first = remote.create(there, path_of("Counter"), 5, name="shared")
    with remote.connect("second", socket) as second:
        assert remote.create(second, path_of("Counter"), 5, name="shared").call("add", 1) == 6
        with raises(RemoteError, "remote.raised_on_host"):
            remote.create(second, path_of("Counter"), 7, name="shared")
    assert first.call("add", 1) == 7


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """Connections of clients of this process, the newest last."""
    found: list[Connection] = []

    def noted(*args: Any, **kwargs: Any) -> Connection:
        found.append(connect(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(client, "connect", noted)
    return found


def test_a_lost_connection_costs_no_call_and_repeats_none(links: list[Connection], there: Host) -> None:
    counter = remote.create(there, path_of("Counter"))
    layer = remote.module(there, path_of("linear"), seed=0)
    step = remote.optimizer(layer, "sgd", lr=0.1)
    sums = []
    for number in range(1, 31):
        answer = counter.begin("add", 1)
        if number % 3:
            links[-1].end()  # as when a link goes
        sums.append(answer.result())
    assert sums == list(range(1, 31))
    before = layer.state_dict()["bias"]
    for number in range(6):
        y = layer(torch.ones(1, 4, dtype=torch.float64)).sum()
        if number % 2:
            links[-1].end()
        y.backward()
        step.step()
    torch.testing.assert_close(layer.state_dict()["bias"], before - 6 * 0.1)


def test_a_service_that_is_killed_is_told_so() -> None:
    with serving(kill=True) as socket, remote.connect("mortal", socket) as host:
        faulty = remote.module(host, path_of("Faulty"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hosts, "RECONNECT_S", 0.2)
            with raises(ChannelError, "remote.lost", name="mortal"):
                faulty(torch.ones(2), "die")
        with raises(ChannelError, "remote.host_failed"):
            remote.call("mortal", path_of("double"), 1)


def test_clients_that_step_together_apply_the_sum_of_their_gradients(there: Host, socket: Path) -> None:
    x = torch.randn(4, 4, dtype=torch.float64)
    torch.manual_seed(0)
    mine = torch.nn.Linear(4, 4, dtype=torch.float64)
    local = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
    with remote.connect("second", socket) as second, ThreadPoolExecutor(2) as pool:
        layers = [remote.module(host, path_of("linear"), name="l", seed=0) for host in (there, second)]
        steps = [remote.optimizer(each, "sgd", together=2, name="o", lr=0.1, momentum=0.9) for each in layers]
        for _ in range(3):
            mine(x).square().sum().backward()
            local.step()
            local.zero_grad()
            for layer, part in zip(layers, x.chunk(2), strict=True):
                layer(part).square().sum().backward()
            list(pool.map(lambda step: step.step(), steps))
        torch.testing.assert_close(layers[1].state_dict(), mine.state_dict())
        layers[0](x).sum().backward()
        norm = steps[0].gradient_norm()
        with raises(RemoteError, "remote.raised_on_host"):
            steps[0].step(deadline_s=0.2)
        assert steps[0].gradient_norm() == norm  # still there


def test_sparse_gradients_step_the_rows_that_were_read(there: Host) -> None:
    table = remote.module(there, path_of("table"), sparse=True, seed=0)
    step = remote.optimizer(table, "sgd", lr=1.0)
    before = table.state_dict()["weight"]
    table(torch.tensor([2, 2, 5])).sum().backward()
    assert step.gradient_norm() == pytest.approx((4 * 2**2 + 4) ** 0.5)
    step.step()
    step.set(lr=0.5)
    table(torch.tensor([5])).sum().backward()
    step.step()
    step.step()  # no gradients are left
    change = before - table.state_dict()["weight"]
    expected = torch.zeros_like(change)
    expected[2], expected[5] = 2.0, 1.5
    torch.testing.assert_close(change, expected)


def test_the_state_of_an_optimizer_goes_on_elsewhere(there: Host) -> None:
    x = torch.ones(1, 4, dtype=torch.float64)
    layers = [remote.module(there, path_of("linear"), seed=0) for _ in range(2)]
    steps = [remote.optimizer(layer, "adam", lr=0.1) for layer in layers]
    layers[0](x).sum().backward()
    steps[0].step()
    layers[1].load_state_dict(layers[0].state_dict())
    steps[1].load_state_dict(steps[0].state_dict())
    for layer, step in zip(layers, steps, strict=True):
        layer(x).square().sum().backward()
        step.step()
    torch.testing.assert_close(layers[1].state_dict(), layers[0].state_dict())


def test_between_hosts_the_key_is_asked_for() -> None:
    key = RunKey.make()
    allowed = [path_of(name) for name in NAMES]
    with remote.serve(allowed, "127.0.0.1:0", key) as serving_here:
        with raises(ChannelError, "channel.key_differs"):
            remote.connect("intruder", serving_here.address, RunKey.make(), deadline_s=5.0)
        with remote.connect("there", serving_here.address, key) as host:
            layer = remote.module(host, path_of("linear"), seed=0)
            x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
            layer(x).sum().backward()
            assert x.grad is not None
            assert serving_here.objects == 1
        with raises(ChannelError, "remote.host_failed"):
            layer(x)
    assert serving_here.unauthenticated == 1


@given(st.data())
def test_calls_of_a_lane_run_once_whatever_is_repeated_or_given_up(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    given_up = data.draw(st.sets(st.integers(0, count - 1)))
    sent = [number for number in range(count) if number not in given_up]
    answers, ran = Answers(), list[int]()

    def noted(number: int) -> int:
        ran.append(number)
        return number

    for at, newest in enumerate(sent):
        for number in [newest, *data.draw(st.lists(st.sampled_from(sent[: at + 1]), max_size=3))]:
            assert answers.once(number, 0, partial(noted, number)) == number
    assert ran == sent
    for late in (number for number in given_up if ran and number < ran[-1]):
        with raises(RemoteError, "remote.call_out_of_order"):
            answers.once(late, 0, lambda: ran.append(-1))
    assert ran == sent
