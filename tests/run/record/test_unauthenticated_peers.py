"""Unauthenticated peers who come to the ports of a run's ranks are told at its end."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

import psutil
import torch.distributed as dist

from commands import events
from paceline.run.record.progress import event_sentence
from ranks import Ranks
from small_jobs import new_run, small_job, train_as_rank

UNAUTHENTICATED = 3


def train_among_unauthenticated_peers(run: Path) -> None:
    if dist.get_rank() == 1:
        [port] = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        for _ in range(UNAUTHENTICATED):
            with socket.create_connection(port, 30) as intruder, suppress(ConnectionResetError):
                intruder.sendall(b"who are you?" * 10)
                while intruder.recv(1000):  # what TLS says of it, and then it hangs up
                    pass
    train_as_rank(run)


def test_a_run_ends_with_the_number_of_unauthenticated_peers_at_its_ranks_ports(ranks: Ranks, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", small_job(stop={"steps": 2}), "dp=2").path
    ranks(2, train_among_unauthenticated_peers, run, backend="tcp")
    [told] = events(run, "unauthenticated")
    assert told["connections"] == UNAUTHENTICATED
    assert str(event_sentence(told)).startswith("3 connections to the ranks' ports did not prove the run's key")
