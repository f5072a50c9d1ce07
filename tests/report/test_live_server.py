"""The server of the live page: who is answered and who is not, what is sent to whom, and its end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from commands import DEADLINE_S, ended, paceline
from handmade_live import begun_run, happens, step, trains
from live_pages import Served, served
from paceline.report import live_server
from paceline.report.live_run import LiveRun, Pace
from paceline.report.live_server import LiveServer
from paceline.report.live_state import look_at
from paceline.run.record.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = begun_run(tmp_path / "mine")
    trains(made, 1, 2, 3)
    return made


@pytest.fixture
def page(run: Run, tmp_path: Path) -> Iterator[Served]:
    with served(run.path, folder=tmp_path) as page:
        yield page


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for tests that only ask: it answers each request alone."""
    folder = tmp_path_factory.mktemp("shared")
    made = begun_run(folder / "mine")
    trains(made, 1, 2, 3)
    with served(made.path, folder=folder) as page:
        yield page


def test_the_page_opens_with_its_token_and_then_by_its_cookie_alone(shared: Served) -> None:
    status, answer = shared.ask(f"/?token={shared.token}")
    head, _, html = answer.partition("\r\n\r\n")
    assert status == 200
    assert "<title>paceline</title>" in html
    assert f"Set-Cookie: paceline-{shared.port}={shared.token}; HttpOnly; SameSite=Strict; Path=/" in head
    assert "Cache-Control: no-store" in head
    assert "default-src 'none'; script-src 'sha256-" in head
    assert "unsafe" not in head
    assert shared.ask("/", f"Cookie: other=1; paceline-{shared.port}={shared.token}")[0] == 200


@pytest.mark.parametrize("target", ["/", "/events", "/?token=", "/?token=wrong", "/events?token=%00%ff", "/?x=1"])
def test_who_has_no_token_is_refused(shared: Served, target: str) -> None:
    status, answer = shared.ask(target, f"Cookie: paceline-{shared.port}=wrong; paceline={shared.token}")
    assert status == 403
    assert "Open the address that `paceline dashboard` printed" in answer
    assert shared.token not in answer


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((name, 403) for name in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.2", "[::]:1")),
        *((name, 200) for name in ("localhost", "localhost:9000", "127.0.0.1:9000")),  # the port that ssh forwards
    ],
)
def test_only_names_of_this_machine_are_answered(shared: Served, host: str, status: int) -> None:
    assert shared.ask(f"/?token={shared.token}", host=host)[0] == status


def test_another_page_may_not_ask(shared: Served) -> None:
    assert shared.ask(f"/events?token={shared.token}", "Origin: http://127.0.0.1:1")[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "CONNECT"])
def test_only_get_is_answered(shared: Served, method: str) -> None:
    status, answer = shared.ask(f"/?token={shared.token}", method=method)
    assert status == 405
    assert "Allow: GET" in answer


@pytest.mark.parametrize("path", ["/job.yaml", "/../mine/job.yaml", "/events/", "//"])
def test_no_file_is_served(shared: Served, path: str) -> None:
    assert shared.ask(f"{path}?token={shared.token}")[0] == 404


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 10_000, 431),
        (b"hello\r\n\r\n", 400),
        (b"GET http://[ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 400),
        (b"GET //[ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 403),
        (b"GET /?token=" + b"&a=b" * 99 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 400),
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: \xff\r\n\r\n", 403),
    ],
)
def test_what_no_browser_sends_is_an_answer_and_not_an_end(shared: Served, request_bytes: bytes, status: int) -> None:
    assert shared.send(request_bytes)[0] == status
    assert shared.ask(f"/?token={shared.token}")[0] == 200


def test_more_connections_than_are_answered_are_told_so(page: Served) -> None:
    with ExitStack() as stack:
        for _ in range(live_server.CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", page.port)))
        assert page.ask(f"/?token={page.token}")[0] == 503


def test_a_client_gets_everything_and_then_what_has_changed(page: Served, run: Run) -> None:
    with page.events() as events:
        name, first = next(events)
        assert name == "state"
        assert first["runs"][0]["progress"]["step"] == 3
        assert first["runs"][0]["name"] == "mine"
        trains(run, 4, rank=0)
        name, changed = next(events)
        assert name == "changes"
        assert changed["runs"]["0"]["progress"]["step"] == 4
        assert "head" not in changed["runs"]["0"]
        assert "events" not in changed["runs"]["0"]
        happens(run, "restart", reason="gone.", attempt=1)
        while "events" not in changed["runs"]["0"]:
            _, changed = next(events)
        assert changed["runs"]["0"]["events"]["told"][-1][2] == "gone. Starting again, attempt 2."
    with page.events() as events:  # it comes again
        name, again = next(events)
        assert name == "state"
        assert again["runs"][0]["progress"]["step"] == 4


@pytest.mark.parametrize(
    "line",
    [
        {"step": 2**63},
        {"local_samples": 10**400},
        {"epoch": 10**400},
        {"samples": 1e-300, "local_samples": 2**52},
        {"compute_s": 1e299, "data_s": -1e299, "imbalance_s": -5e298},
        {"step_s": 1e-299, "samples": 1e299},
        {"time": -1e299},
        {"use": {"memory_bytes": 1e299, "wire_bytes": 1e299, "network_sent_bytes": 1e299}},
    ],
)
def test_numbers_that_no_run_writes_end_no_page(run: Run, line: dict[str, Any]) -> None:
    happens(run, "resume", total_steps=10**400)
    happens(run, "lost", rank=[1], again=True, generation=10**400, reason="x", stack="")
    happens(run, "links", links={"a": {"sent_bytes": 1e299, "received_bytes": "many"}})
    with (run.path / "steps" / "rank-0.jsonl").open("a") as file:
        file.write(json.dumps(step(4) | line) + "\n")
    trains(run, 5)
    sections = look_at(LiveRun(run), "mine")
    assert sections["progress"]["step"] == 5
    assert msgspec.json.decode(msgspec.json.encode(sections))["progress"]["step"] == 5


def test_a_directory_that_is_no_run_any_more_is_told_beside_the_others(run: Run, tmp_path: Path) -> None:
    broken = begun_run(tmp_path / "broken")
    (broken.path / "job.yaml").write_text("[")
    with served(run.path, broken.path, folder=tmp_path) as page, page.events() as events:
        _, state = next(events)
    assert state["runs"][0]["progress"]["step"] == 3
    assert "broken" in state["runs"][1]["problem"]


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_at_once_while_somebody_looks(page: Served, by: signal.Signals) -> None:
    with page.events() as events:
        next(events)
        page.process.send_signal(by)
        shown = ended(page.process)
        assert list(events) == []
    assert shown.code == 0, shown.err
    assert "Traceback" not in shown.err
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", page.port))


def in_this_process(run: Run, look: Callable[[LiveServer], Any]) -> None:
    """Have a server in this process looked at."""

    async def both() -> None:
        stop, server = asyncio.Event(), LiveServer([LiveRun(run)])
        ready = asyncio.Event()
        serving = asyncio.create_task(server.serve(stop, ready.set))
        await ready.wait()
        try:
            await asyncio.wait_for(look(server), DEADLINE_S)
        finally:
            stop.set()
            await serving

    asyncio.run(both())


async def stream(server: LiveServer, limit: int = 2**16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client of the events, which reads nothing beyond `limit` by itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=limit)
    token = server.url.partition("=")[2]
    writer.write(f"GET /events?token={token} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    return reader, writer


def test_nothing_is_read_while_nobody_looks(run: Run) -> None:
    async def look(server: LiveServer) -> None:
        assert server.looks == 0
        reader, writer = await stream(server)
        await reader.readuntil(b"event: state")
        assert server.looks >= 1
        writer.close()
        while server.followers:
            await asyncio.sleep(0.01)
        before = server.looks
        trains(run, *range(4, 50))
        await asyncio.sleep(4 * live_server.EVERY_S)
        assert server.looks <= before + 1, "more than the look that was under way"
        reader, writer = await stream(server)
        assert b'"step":49' in await reader.readuntil(b"\n\n") + await reader.readuntil(b"\n\n")
        writer.close()

    in_this_process(run, look)


def test_one_loop_reads_for_all_who_look(run: Run) -> None:
    async def look(server: LiveServer) -> None:
        clients = [await stream(server) for _ in range(5)]
        for reader, _ in clients:
            await reader.readuntil(b"event: state")
        trains(run, 4)
        before = server.looks
        for reader, _ in clients:
            await reader.readuntil(b"event: changes")
        assert server.looks <= before + 3
        for _, writer in clients:
            writer.close()

    in_this_process(run, look)


def test_a_client_that_does_not_take_what_it_is_sent_is_dropped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_server, "EVERY_S", 0.001)
    monkeypatch.setattr(Pace, "wait_s", lambda _: 0.002)

    async def look(server: LiveServer) -> None:
        _, slow = await stream(server, limit=1)
        reader, writer = await stream(server)
        taking = asyncio.create_task(_take(reader))
        while server.followers < 2:
            await asyncio.sleep(0.01)
        number = 0
        while server.followers > 1:
            number += 1
            happens(run, "restart", reason=f"{number} " + "x" * 1900, attempt=1)
            await asyncio.sleep(0.002)
        assert not taking.done(), "the other one goes on"
        taking.cancel()
        with suppress(asyncio.CancelledError):
            await taking
        writer.close()
        slow.close()

    in_this_process(run, look)


async def _take(reader: asyncio.StreamReader) -> None:
    while await reader.read(2**16):
        pass


def test_a_port_that_is_taken_is_an_error_that_says_so(run: Run, tmp_path: Path, page: Served) -> None:
    error = paceline("dashboard", run.path, "--listen", f"127.0.0.1:{page.port}", folder=tmp_path).error
    assert f"the page cannot be served at 127.0.0.1:{page.port}" in error
    assert "Choose another port" in error
