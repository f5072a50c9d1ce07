"""Runs and data on a real S3 server: trained, cut off, resumed elsewhere, refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import Outcome, ended, in_a_process, losses, started, wait_for, wait_for_step, write_job
from paceline.state.manifest import checkpoints
from storage.servers import S3, fronted, linked, reached_over, serving

RUN = "s3://bucket/runs/mine"
TEXT = {
    "model": {"zoo": "gpt", "args": {"layers": 1, "hidden": 32, "heads": 2, "context": 16}},
    "data": {"kind": "text", "path": "s3://bucket/corpus.txt", "context": 16, "held_out": 0},
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3]:
    with serving(tmp_path) as server:
        yield server


def python(program: str, *arguments: object, environment: dict[str, str]) -> str:
    """What a Python program prints; fsspec's thread stays in that process."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


STORE = """
import sys
from pathlib import Path
from paceline.errors import StorageError
from paceline.storage.store import PART_BYTES, Store
folder = Path(sys.argv[1])
store = Store("s3://bucket/some/place")
print(store.list(), store.about("x"), store.read("x", 9), store.create("x", b"1"), store.create("x", b"2"))
(folder / "large").write_bytes(bytes(range(256)) * (PART_BYTES // 100))
store.upload(folder / "large", "deep/large")
store.write("empty", b"")
print(sorted((name, entry.size) for name, entry in store.list().items()), store.read("empty", 9))
store.fetch("deep/large", folder / "back")
print((folder / "back").read_bytes() == (folder / "large").read_bytes())
store.delete(["x", "never"])
print(sorted(store.list()))
for what in (lambda: Store("s3://nowhere/x").list(), lambda: store.read("deep/large", 9)):
    try:
        what()
    except StorageError as error:
        print(error)
"""


def test_objects_of_a_real_server_are_made_once_listed_moved_in_parts_and_deleted(server: S3, tmp_path: Path) -> None:
    assert python(STORE, tmp_path, environment=server.environment).splitlines() == [
        "{} None None True False",
        "[('deep/large', 13421568), ('empty', 0), ('x', 1)] b''",
        "True",
        "['deep/large', 'empty']",
        "s3://nowhere/x does not exist (The specified bucket does not exist)",
        "s3://bucket/some/place/deep/large has 13,421,568 bytes; at most 9 are expected",
    ]


READS = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from paceline.storage.store import Store
folder = Path(sys.argv[1])
store = Store("s3://bucket/shards")
listed = store.list()
def right(name):
    store.fetch(name, folder / f"{os.getpid()} {name}", expected=listed[name])
    return store.about(name) == listed[name] and (folder / f"{os.getpid()} {name}").read_bytes() == name.encode() * 1000
if (child := os.fork()) == 0:
    os._exit(0 if right("0") else 1)
with ThreadPoolExecutor(8) as pool:
    print(len(listed), all(pool.map(right, listed)), store.about("absent"), os.waitpid(child, 0)[1])
"""
WRITES = """
import sys
from paceline.storage.store import Store
store = Store("s3://bucket/shards")
for name in map(str, range(int(sys.argv[1]))):
    store.write(name, name.encode() * 1000)
"""


@pytest.mark.parametrize(("failing", "latency_s"), [(0.05, 0.2), (0.3, 0.0)])
def test_reads_from_a_store_that_fails_now_and_then_are_right(
    server: S3, tmp_path: Path, failing: float, latency_s: float
) -> None:
    python(WRITES, 40, environment=server.environment)
    with fronted(server, failing, latency_s) as front:
        assert python(READS, tmp_path, environment=reached_over(front, server)) == "40 True None 0\n"
        assert front.requests > 120


CHANGED = """
import sys
from pathlib import Path
from paceline.errors import StorageError
from paceline.storage.store import Store
store = Store("s3://bucket/shards")
store.write("a", b"before")
listed = store.list()["a"]
for content in (b"behind", b"b"):
    store.write("a", content)
    try:
        store.fetch("a", Path(sys.argv[1], content.decode()), expected=listed)
    except StorageError as error:
        print(error.code, error.may_pass)
"""


def test_an_object_of_another_version_than_the_listed_one_is_refused_at_once(server: S3, tmp_path: Path) -> None:
    assert (
        python(CHANGED, tmp_path, environment=server.environment).splitlines() == ["storage.object_changed False"] * 2
    )


ROWS = """
import json, random
from paceline.storage.store import Store
store, draw = Store("s3://bucket/rows"), random.Random(1)
for shard in range(20):
    rows = [{"x": [round(draw.gauss(0, 1), 3) for _ in range(6)], "y": draw.randrange(3)} for _ in range(30)]
    store.write(f"{shard}.jsonl", "".join(json.dumps(row) + chr(10) for row in rows).encode())
"""


@pytest.mark.slow
def test_data_that_cannot_be_reached_in_mid_epoch_stops_the_run_which_goes_on_bit_for_bit(
    server: S3, tmp_path: Path
) -> None:
    python(ROWS, environment=server.environment)
    data = {"kind": "records", "path": "s3://bucket/rows/*.jsonl", "inputs": "x", "target": "y", "held_out": 0}
    job = write_job(
        tmp_path / "job.yaml",
        model={"factory": "small_jobs:plain"},
        data=data | {"cache_gb": 1e-5, "shuffle_window": 60},  # a few shards, so that many are fetched again
        stop={"steps": 300},
        checkpoint={"every_steps": 10_000},
        deadline_s=60,
    )
    train = ("train", job, "--plan", "dp=2 balance=off", "--run")
    with linked(server) as link:
        on = reached_over(link, server)
        with started("paceline", *train, tmp_path / "run", folder=tmp_path, environment=on) as run:
            wait_for_step(5, tmp_path / "run", run)
            link.cut()
            stopped = ended(run, 180)
        assert "s3://bucket/rows/" in stopped.fails_with("storage.batch_unreadable")
        done = max(losses(tmp_path / "run"))
        assert 5 <= done < 300
        assert [at for at, _ in checkpoints(tmp_path / "run" / "checkpoints")] == [done]
        link.mend()
        for name, *more in (("run", "--resume"), ("undisturbed",)):
            outcome = in_a_process(*train, tmp_path / name, *more, folder=tmp_path, **on)
            assert outcome.code == 0, outcome.err
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")


@pytest.mark.slow
def test_a_run_on_s3_resumes_on_another_machine_as_if_nothing_had_happened(server: S3, tmp_path: Path) -> None:
    put(server, "corpus.txt", b"to be or not to be, that is the question. " * 200)
    job = write_job(tmp_path / "job.yaml", **TEXT)
    on = server.environment
    begun = in_a_process("train", job, "--plan", "dp=2", "--run", RUN, folder=tmp_path, **on)
    assert begun.code == 0, begun.err
    assert begun.says(RUN)
    assert begun.err.count("s3://bucket/corpus.txt") == 1, "fetched once for all ranks"
    refused = in_a_process("train", job, "--plan", "dp=2", "--run", RUN, folder=tmp_path, **on)
    assert "[run.url_in_use]" in refused.error

    more = write_job(tmp_path / "more.yaml", **TEXT, stop={"steps": 12})
    elsewhere = on | {"XDG_CACHE_HOME": str(tmp_path / "elsewhere")}
    resumed = in_a_process("train", more, "--plan", "dp=2", "--run", RUN, "--resume", folder=tmp_path, **elsewhere)
    assert resumed.code == 0, resumed.err
    assert [event["step"] for event in kept(server, "runs/mine/events.jsonl") if event["event"] == "resume"] == [6]
    whole = in_a_process("train", more, "--plan", "dp=2", "--run", "whole", folder=tmp_path, **on)
    assert whole.code == 0, whole.err
    assert in_a_process("report", RUN, folder=tmp_path, **on).out == "mine.report.html\n"
    assert in_a_process("export", RUN, "model.safetensors", folder=tmp_path, **on).code == 0
    assert downloaded(server) == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_server_that_goes_and_comes_back_costs_the_run_nothing(server: S3, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 1_000_000}, checkpoint={"every_seconds": 2})
    arguments = ("train", job, "--plan", "dp=1", "--run", RUN)
    shown = tmp_path / "shown"
    with linked(server) as link, shown.open("w") as screen:
        on, into = reached_over(link, server), screen.fileno()
        with started("paceline", *arguments, folder=tmp_path, environment=on, screen=into) as run:
            wait_for(lambda: "runs/mine/checkpoints" in names(server), run)
            link.cut()
            wait_for(lambda: "upload: s3://bucket/runs/mine" in shown.read_text(), run)
            steps = len(losses(working(tmp_path)))
            wait_for(lambda: len(losses(working(tmp_path))) > steps + 10, run)
            link.mend()
            wait_for(lambda: "can be reached again" in shown.read_text(), run)
            run.terminate()
            assert run.wait(120) == 143, shown.read_text()
    assert shown.read_text().count("upload: s3://bucket/runs/mine") == 1
    assert downloaded(server) == losses(working(tmp_path))


@pytest.mark.slow
def test_a_server_that_stays_away_fails_the_command_at_its_end_and_resume_uploads(server: S3, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"seconds": 30})
    with linked(server) as link:
        on = reached_over(link, server)
        with started("paceline", "train", job, "--plan", "dp=1", "--run", RUN, folder=tmp_path, environment=on) as run:
            wait_for(lambda: "runs/mine/job.yaml" in names(server), run)
            link.cut()
            outcome = ended(run, 180)
        assert "[run.files_not_uploaded]" in outcome.error
        assert "stopped" not in outcome.out
        before = losses(working(tmp_path))
        link.mend()
        again = in_a_process("train", job, "--run", RUN, "--resume", folder=tmp_path, **on)
        assert again.code == 0, again.err
    assert downloaded(server) == before


@pytest.mark.slow
def test_a_slow_link_holds_up_no_step_and_the_end_waits_for_it(server: S3, tmp_path: Path) -> None:
    large = {"zoo": "mlp", "args": {"hidden": 2000}}
    job = write_job(tmp_path / "job.yaml", model=large, stop={"seconds": 15}, checkpoint={"every_seconds": 1})
    with linked(server, bytes_per_s=2e6) as link:
        outcome = in_a_process(
            "train", job, "--plan", "dp=1", "--run", RUN, folder=tmp_path, **reached_over(link, server)
        )
    assert outcome.code == 0, outcome.err
    manifests = [name for name in names(server).split() if name.endswith("manifest.json")]
    assert manifests, "though the run deletes a checkpoint before it is sent, whole ones arrive"
    assert downloaded(server) == losses(working(tmp_path))


@pytest.mark.slow
def test_without_credentials_right_bucket_or_object_no_rank_starts(server: S3, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", **TEXT)
    own = write_job(tmp_path / "own.yaml")
    on = server.environment
    without = {key: value for key, value in on.items() if key not in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    run, data = ("train", own, "--run", RUN), ("train", job)
    lock, corpus = f"{RUN}/lock", "data.path: s3://bucket/corpus.txt"
    for command, environment, code, *named in (
        (run, without, "no_credentials", lock, "AWS_ACCESS_KEY_ID"),
        (data, without, "no_credentials", corpus, "AWS_ACCESS_KEY_ID"),
        (("train", own, "--run", "s3://nowhere/x"), on, "not_there", "s3://nowhere/x"),
        (data, on, "absent", corpus),
    ):
        assert_refused(in_a_process(*command, folder=tmp_path, **environment), f"storage.{code}", *named)
    server.stop()
    server.start(INITIAL_NO_AUTH_ACTION_COUNT="1")
    assert_refused(in_a_process(*run, folder=tmp_path, **on), "storage.denied", lock)
    assert_refused(in_a_process(*data, folder=tmp_path, **on), "storage.denied", corpus)


def assert_refused(outcome: Outcome, code: str, *named: str) -> None:
    """Assert that a command ended before it chose a plan, with this code and these names in its error."""
    for text in (*named, f"[{code}]"):
        assert text in outcome.error
    assert "plan" not in outcome.err


@pytest.mark.slow
def test_two_trainings_of_one_url_from_two_machines_are_one(server: S3, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 1_000_000})
    arguments = ("train", job, "--plan", "dp=1", "--run", RUN)
    with started("paceline", *arguments, folder=tmp_path, environment=server.environment) as run:
        wait_for(lambda: "runs/mine/job.yaml" in names(server), run)
        elsewhere = server.environment | {"XDG_CACHE_HOME": str(tmp_path / "elsewhere")}
        for more in ((), ("--resume",)):
            second = in_a_process(*arguments, *more, folder=tmp_path, **elsewhere)
            assert RUN in second.error
            assert "[run.in_use]" in second.error
        run.terminate()
        assert ended(run).code == 143


@pytest.mark.slow
def test_a_benchmark_of_a_job_on_s3_is_kept_there_and_goes_on_elsewhere(server: S3, tmp_path: Path) -> None:
    put(server, "job.yaml", write_job(tmp_path / "job.yaml").read_bytes())
    what = (
        "bench",
        "scaling",
        "s3://bucket/job.yaml",
        "--devices",
        1,
        "--steps",
        6,
        "--no-weak",
        "--out",
        "s3://bucket/bench",
    )
    first = in_a_process(*what, "--repeat", 1, folder=tmp_path, **server.environment)
    assert first.code == 0, first.err
    measured = kept(server, "bench/measured.jsonl")
    there = names(server).split()
    assert {"bench/protocol.json", "bench/measured.jsonl", "bench/report.json", "bench/report.html"} < set(there)
    assert not [name for name in there if "checkpoints" in name or name.endswith("/lock")]
    other = server.environment | {"XDG_CACHE_HOME": str(tmp_path / "other")}
    again = in_a_process(*what, "--repeat", 2, folder=tmp_path, **other)
    assert again.code == 0, again.err
    assert len(kept(server, "bench/measured.jsonl")) == 2
    assert kept(server, "bench/measured.jsonl")[:1] == measured
    trained = in_a_process("train", "s3://bucket/job.yaml", "--run", "s3://bucket/run", folder=tmp_path, **other)
    assert trained.code == 0, trained.err
    mixed = in_a_process(*what[:-1], "s3://bucket/run", folder=tmp_path, **other)
    assert "[run.url_of_other_kind]" in mixed.error


def put(server: S3, name: str, content: bytes) -> None:
    """Make an object."""
    program = "import sys; from paceline.storage.store import Store; Store('s3://bucket').write(sys.argv[1], {!r})"
    python(program.format(content), name, environment=server.environment)


def names(server: S3) -> str:
    """The names of all objects."""
    return python(
        "from paceline.storage.store import Store; print(*Store('s3://bucket').list(), sep='\\n')",
        environment=server.environment,
    )


def downloaded(server: S3) -> dict[int, float]:
    """The losses of the run in the store."""
    return {record["step"]: record["loss"] for record in kept(server, "runs/mine/steps/rank-0.jsonl")}


def kept(server: S3, name: str) -> list[dict[str, Any]]:
    """The records of a file in the store."""
    read = "Store('s3://bucket').read(sys.argv[1], 2**30).decode()"
    program = f"import sys; from paceline.storage.store import Store; print({read})"
    lines = python(program, name, environment=server.environment).split("\n")
    return [json.loads(line) for line in lines if line]


def working(folder: Path) -> Path:
    """The working directory of the one run."""
    found = [path for path in (folder / "cache" / "paceline" / "runs").glob("*") if (path / "job.yaml").exists()]
    return found[0]
