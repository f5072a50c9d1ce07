"""A host's end of ssh obeys an order on its standard input, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from commands import DEADLINE_S
from paceline.elastic.ssh import STARTED, Order
from paceline.wire.key import RunKey


def end_of_host(data: bytes) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "paceline.elastic.ssh"]
    return subprocess.run(command, input=data, capture_output=True, timeout=DEADLINE_S)


def order(directory: Path, *arguments: str, key: str | None = None) -> bytes:
    pem = RunKey.make().to_pem().decode() if key is None else key
    return msgspec.json.encode(Order(list(arguments), str(directory), {"WORD": "x"}, pem, announce=True)) + b"\n"


def test_the_end_of_the_input_ends_the_command(tmp_path: Path) -> None:
    wait = "import signal; print('waits', flush=True); signal.pause()"
    done = end_of_host(order(tmp_path, "-c", wait))
    assert done.returncode == 128 + 15, done.stderr
    assert done.stdout.startswith(STARTED)


def test_the_exit_code_and_the_environment_are_those_of_the_order(tmp_path: Path) -> None:
    read, write = os.pipe()
    end = "import os, sys; print(os.environ['WORD'], os.getcwd()); sys.exit(5)"
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.elastic.ssh"], stdin=read, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    os.close(read)
    os.write(write, order(tmp_path, "-c", end) + b"NONSENSE\n")
    out, err = process.communicate(timeout=DEADLINE_S)
    os.close(write)
    assert process.returncode == 5, err
    assert out == STARTED + f"x {tmp_path}\n".encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", b"standard input contains no instructions"),
        (b"{}\n", b"the instructions come from another version of paceline"),
        (b"\xff\xfe\n", b"the instructions come from another version of paceline"),
        (b"x" * (2**20 + 1), b"standard input contains no instructions"),
        (order(Path("/"), key="-----BEGIN PRIVATE KEY-----"), b"not the key of a paceline run"),
        (order(Path("/nowhere/at/all"), "-c", ""), b"cannot be started in /nowhere/at/all: No such file or directory"),
    ],
    ids=["nothing", "other", "no text", "long", "key", "directory"],
)
def test_what_is_no_order_starts_nothing(data: bytes, said: bytes) -> None:
    done = end_of_host(data)
    assert done.returncode == 1
    assert said in done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stdout == b""
