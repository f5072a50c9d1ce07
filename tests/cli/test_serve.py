"""`paceline serve`: modules for other processes, over TLS or a Unix socket; and which arguments are runs."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch

from commands import ended, paceline, started, wait_for
from handmade_live import begun_run
from paceline import remote
from paceline.channel.key import read_key
from paceline.errors import PacelineError

RANKING = """
from torch import nn

def Tower(width):
    return nn.Linear(width, 1)
"""


def test_a_module_is_served_over_tls_to_those_who_have_the_key(tmp_path: Path) -> None:
    (tmp_path / "ranking.py").write_text(RANKING)
    for name in ("run.key", "other.key"):
        assert paceline("key", name, folder=tmp_path).code == 0
    command = ("paceline", "serve", "ranking.py:Tower", "--at", "127.0.0.1:0", "--key", "run.key")
    with started(*command, folder=tmp_path, environment={"PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        [port] = re.findall(r"serving ranking\.py:Tower at 127\.0\.0\.1:(\d+)", process.stdout.readline())
        address = f"127.0.0.1:{port}"
        with pytest.raises(PacelineError, match="does not have this run's key"):
            remote.connect("stranger", address, read_key(tmp_path / "other.key"), deadline_s=20).close()
        with remote.connect("host", address, read_key(tmp_path / "run.key"), deadline_s=20):
            tower = remote.module("host", "ranking.py:Tower", 4)
            there = remote.optimizer(tower, "sgd", lr=1.0)
            x = torch.ones(2, 4, requires_grad=True)
            before = tower(x)
            before.sum().backward()
            there.step()
            assert x.grad is not None
            after = tower(x)
            assert torch.allclose(before - after, torch.full((2, 1), 4.0 * 2 + 2))  # of the weights, of the bias
            with pytest.raises(PacelineError, match="Linear"):
                remote.module("host", "torch.nn:Linear", 4, 1)
        process.send_signal(signal.SIGTERM)
        shown = ended(process)
    assert shown.code == 0, shown.err
    assert "did not show the run's key: 1" in shown.out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["mine", "ranking.py:Tower"],
            "mine is a run, whose page would be served, and ranking.py:Tower an import path",
        ),
        (["mine", "--at", "0.0.0.0:8000"], "ssh -L 8000:127.0.0.1:8000"),
        (["mine", "--at", "10.0.0.2:8000"], "on 127.0.0.1 alone, since it is not encrypted"),
        (["mine", "--at", "page.sock"], "the page of a run is served at 127.0.0.1:PORT"),
        (["mine", "--at", "127.0.0.1:70000"], "the page of a run is served at 127.0.0.1:PORT"),
        (["mine", "--key", "run.key"], "--key is for modules"),
        (["nothing"], "nothing is not a run directory"),
        (["s3://bucket/mine"], "only directories can be watched"),
        (["ranking.py:Tower"], "give --at ADDRESS:PORT or a path"),
        (["ranking.py:Tower", "--at", "127.0.0.1:0", "--open"], "--open is for runs"),
    ],
)
def test_runs_and_modules_are_told_apart_and_not_mixed(arguments: list[str], error: str, tmp_path: Path) -> None:
    begun_run(tmp_path / "mine")
    assert error in " ".join(paceline("serve", *arguments, folder=tmp_path).error.split())


def test_a_browser_is_opened_without_the_token_on_a_command_line(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "mine")
    browser, told = tmp_path / "browser", tmp_path / "told"
    browser.write_text(f'#!/bin/sh\ncp "${{1#file://}}" {told}.part; echo "$1" >> {told}.part; mv {told}.part {told}\n')
    browser.chmod(0o700)
    with started(
        "paceline", "serve", run.path, "--open", folder=tmp_path, environment={"BROWSER": f"{browser} %s &"}
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        wait_for(told.exists, process)
        file, address = told.read_text().split("\n")[0].split("file://")
        assert f'content="0; url={url}"' in file
        assert url.partition("=")[2] not in address
        process.send_signal(signal.SIGINT)
        shown = ended(process)
    assert shown.code == 0, shown.err
    assert not Path(address).exists()


def test_without_a_browser_the_address_is_there_all_the_same(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "mine")
    in_a_terminal = {"BROWSER": "cat %s"}
    with started("paceline", "serve", run.path, "--open", folder=tmp_path, environment=in_a_terminal) as process:
        assert process.stdout is not None
        assert "token=" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert "no browser here" in ended(process).err
