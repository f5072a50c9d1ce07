"""`paceline dashboard`: its arguments, and the browser that it opens."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from commands import ended, paceline, started, wait_for
from handmade_live import begun_run


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["mine", "--listen", "0.0.0.0:8000"], "ssh -L 8000:127.0.0.1:8000"),
        (["mine", "--listen", "10.0.0.2:8000"], "not encrypted"),
        (["mine", "--listen", "page.sock"], "127.0.0.1:PORT"),
        (["mine", "--listen", "127.0.0.1:70000"], "127.0.0.1:PORT"),
        (["nothing"], "nothing is not a run directory"),
        (["s3://bucket/mine"], "only directories can be watched"),
    ],
)
def test_what_cannot_be_shown_is_refused(arguments: list[str], error: str, tmp_path: Path) -> None:
    begun_run(tmp_path / "mine")
    assert error in " ".join(paceline("dashboard", *arguments, folder=tmp_path).error.split())


def test_a_browser_is_opened_without_the_token_on_a_command_line(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "mine")
    browser, told = tmp_path / "browser", tmp_path / "told"
    browser.write_text(f'#!/bin/sh\ncp "${{1#file://}}" {told}.part; echo "$1" >> {told}.part; mv {told}.part {told}\n')
    browser.chmod(0o700)
    with started(
        "paceline", "dashboard", run.path, "--open", folder=tmp_path, environment={"BROWSER": f"{browser} %s &"}
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
    with started("paceline", "dashboard", run.path, "--open", folder=tmp_path, environment=in_a_terminal) as process:
        assert process.stdout is not None
        assert "token=" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert "no browser" in ended(process).err
