"""torch's compiler is imported on use, works there as ever, and not before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.elastic.attempt import launch
from paceline.elastic.place import on_this_machine
from paceline.elastic.ranks import Setting
from small_jobs import new_run, small_job

BEFORE = """
import sys
from paceline.deferred_compiler import defer_compiler
defer_compiler()
import torch
from torch._compile import _disable_dynamo

def imported():
    return "torch._dynamo.eval_frame" in sys.modules

@_disable_dynamo
def left_alone(x):
    assert not torch.compiler.is_compiling()
    return x + 1

def step():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not torch.equal(model.weight, before)

step()
assert left_alone(torch.zeros(1)).item() == 1
assert not imported()
"""


def python(code: str) -> None:
    ended = subprocess.run([sys.executable, "-c", BEFORE + code], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_functions_that_the_compiler_must_leave_alone_are_left_alone_though_they_ran_before_it_came() -> None:
    python("""
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

def function(x):
    return left_alone(x * 2) * 3

assert torch.compile(function, backend=backend)(torch.ones(1)).item() == 9
assert imported()
assert len(graphs) == 2, "one graph before the function, and one after it"
step()
""")


@pytest.mark.slow
def test_a_module_of_the_compiler_is_the_one_that_the_compiler_uses() -> None:
    python("""
import torch._dynamo as held
import torch._dynamo.eval_frame as frames, torch._dynamo.config as config
assert imported()
assert frames is torch._dynamo.eval_frame and config is torch._dynamo.config
assert frames.__spec__.origin == frames.__file__
assert held.eval_frame is frames and held.__file__ == torch._dynamo.__file__
held.reset()
step()
""")


def train_and_tell(arguments: list[str]) -> None:
    from paceline.run.recovery.run import run_rank_once

    run, told = arguments
    run_rank_once([run])
    Path(told).write_text("\n".join(sys.modules))


def test_a_run_that_compiles_nothing_imports_no_compiler(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", small_job(stop={"steps": 3}), "dp=1").path
    arguments, own_seed = [f"{__file__}:train_and_tell", str(run), str(tmp_path / "told")], {"OF_THIS_TEST": "1"}
    launch(Setting(arguments, on_this_machine(1), env=own_seed))
    imported = (tmp_path / "told").read_text().split()
    assert "torch._dynamo" in imported
    assert not {"torch._dynamo.eval_frame", "sympy", "torch.distributed.fsdp", "transformers"} & set(imported)
