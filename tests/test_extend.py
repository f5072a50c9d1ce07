"""Extensions from outside paceline: the packages of examples/extend, installed and used by real commands."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from commands import events, in_a_process, losses, paceline, write_job

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "extend"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for PYTHONPATH that holds the examples as pip installs them: their wheel, unpacked."""
    folder = tmp_path_factory.mktemp("extend")
    package = shutil.copytree(EXAMPLES, folder / "package")  # setuptools builds in the source's folder
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=package, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    [wheel] = folder.glob("*.whl")
    shutil.unpack_archive(wheel, folder / "site", "zip")
    return f"{folder / 'site'}:{ROOT / 'src'}"


def loaded(code: str, installed: str, folder: Path | None = None, deadline_s: float = 100) -> list[str]:
    """Lines that a script prints in a process that sees the examples."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": installed, "TMPDIR": tempfile.gettempdir(), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=deadline_s,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


TRAINED = (
    "dp=2",
    "dp=2 sync=majority:0.05",
    "dp=2 compress=topk:0.5+exponent",
    "fsdp=2 transport=loopback",
)
TRAIN = f"import paceline\nfor plan in {TRAINED}: paceline.train('job.yaml', plan=plan, run=plan)"
# Pieces of code, each of which a process with the examples runs, whatever its exit.
ALL_IN_ONE = """
import contextlib, io, json, sys
import paceline.run.loop  # before the first piece forks
for name, code in json.load(open("pieces.json")).items():
    print(name, "begins", file=sys.stderr)
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        exec(code, {"__name__": name})
    print(json.dumps([name, said.getvalue().splitlines()]))
"""


@pytest.fixture(scope="module")
def seen(installed: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """A folder in which one process that sees the examples has done everything, and what it printed by piece.

    Runs are named by their plans; `by_engine` is that of two processes of an engine.
    """
    folder = tmp_path_factory.mktemp("seen")
    write_job(folder / "job.yaml", global_batch=18)  # the last batch of an epoch is smaller, so shares differ
    # a description of sizes: its plan needs no torch
    sizes = {"layers": 2, "hidden": 64, "heads": 2, "seq": 64, "vocab": 256}
    write_job(folder / "sizes.yaml", model={"transformer": sizes})
    pieces = {
        "engine": ENGINE.format(port=free_port()),
        "train": TRAIN,
        "refused": REFUSED,
        "device": COMMAND.format(arguments=["plan", "sizes.yaml", "--cluster", "2x8xRTX-6000-Ada"]),
        "tracker": LOOP,
        "panel": COMMAND.format(arguments=["report", "dp=2"]),
    }
    (folder / "pieces.json").write_text(json.dumps(pieces))
    return folder, dict(json.loads(line) for line in loaded(ALL_IN_ONE, installed, folder))


@pytest.fixture
def runs(seen: tuple[Path, dict[str, list[str]]]) -> Path:
    """The folder with its runs."""
    return seen[0]


@pytest.fixture
def said(seen: tuple[Path, dict[str, list[str]]]) -> dict[str, list[str]]:
    """What each piece printed."""
    return seen[1]


COMMAND = """
import sys
from paceline.cli import main
sys.argv = ["paceline", *{arguments}]
main()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.name)
def test_an_example_has_at_most_thirty_lines(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 30


@pytest.mark.parametrize(
    "page",
    [ROOT / "docs/how-to/extend.md", *sorted((ROOT / "docs" / "how-to").glob("add_a_*.md"))],
    ids=lambda page: page.name,
)
def test_the_code_on_a_page_is_the_one_that_is_tested(page: Path) -> None:
    sources = "\n".join(
        file.read_text() for file in (*EXAMPLES.glob("*.*"), ROOT / "src/paceline/sync/averaging.py") if file.is_file()
    )
    for block in page.read_text().split("```python\n")[1:]:
        assert block.partition("```")[0].strip() in sources


# A rule


def test_a_rule_from_a_package_trains_and_is_known_to_be_inexact(installed: str, runs: Path) -> None:
    found = list(losses(runs / "dp=2 sync=majority:0.05").values())
    assert len(found) == 6
    assert found[-1] < found[0]
    described = (
        "from paceline.planning.plan import Plan; import sys; print(Plan(dp=2, sync='majority').inexact, 'torch' in "
        "sys.modules)"
    )
    assert loaded(described, installed) == ["sync=majority False"]


def test_without_its_package_a_rule_is_unknown_and_the_known_ones_are_named(tmp_path: Path) -> None:
    shown = paceline("train", write_job(tmp_path / "job.yaml"), "--plan", "dp=2 sync=majority", folder=tmp_path)
    assert shown.code == 1
    assert shown.error.count('unknown rule "majority". Known: averaging, allreduce, local, diloco, server.') == 1


def test_an_argument_that_the_rule_does_not_take_is_an_error_that_says_what_it_takes(
    said: dict[str, list[str]],
) -> None:
    argument, codec, transport = said["refused"]
    assert 'sync=majority:3: majority must be the size of every step, above 0 and at most 1, not "3"' in argument
    assert "compresses the data that is sent, but sync=majority sends by itself" in codec
    assert 'transport is auto or shm or gloo or tcp or loopback, not "loop"' in transport


REFUSED = """
from paceline.cluster.discover import discover
from paceline.errors import PacelineError
from paceline.job.job import Job
from paceline.run.train import choice_of
for plan in ("dp=2 sync=majority:3", "dp=2 sync=majority compress=int8", "dp=2 transport=loop"):
    try: choice_of(Job.load("job.yaml"), discover(), plan)
    except PacelineError as error: print(str(error).replace("\\n", " "))
"""


# A codec


def test_a_codec_from_a_package_codes_gradients_behind_another(runs: Path) -> None:
    plain, coded = (list(losses(runs / name).values()) for name in ("dp=2", "dp=2 compress=topk:0.5+exponent"))
    assert coded[0] == pytest.approx(plain[0], rel=1e-6)
    assert coded[-1] != plain[-1]


def test_the_bytes_of_a_codec_from_a_package_are_predicted(installed: str) -> None:
    code = (
        "from paceline.planning.sync_info import CODECS, CompressSpec; import sys\n"
        "print(CODECS.names[-1], *(CompressSpec.parse(text).sent_bytes(4.0, ()) for text in ('exponent', "
        "'topk:0.1+exponent')))\n"
        "print('torch' in sys.modules)"
    )
    assert loaded(code, installed) == ["exponent 1.0 0.5", "False"]


@pytest.mark.needs_root
@pytest.mark.needs_iproute2
@pytest.mark.slow
def test_a_codec_from_a_package_is_timed_and_tried_by_auto_on_a_slow_link(installed: str, tmp_path: Path) -> None:
    # matrices with 16 rows, of which powersgd:16 saves nothing: the two codecs with the fewest bytes are tried
    narrow = {"zoo": "mlp", "args": {"hidden": 16}}
    job = write_job(tmp_path / "job.yaml", model=narrow, stop={"steps": 20})
    (tmp_path / "cluster.yaml").write_text("emulate: {hosts: 2, rate: 4mbit}\n")
    arguments = ("train", job, "--cluster", "cluster.yaml", "--plan", "dp=2 compress=auto", "--run", "run")
    shown = in_a_process(*arguments, folder=tmp_path, PYTHONPATH=installed)
    assert shown.code == 0, shown.err
    told = [line for event in events(tmp_path / "run", "sync") for line in event["said"]]
    [said] = [line for line in told if line.startswith("compress=auto: ")]
    assert re.search(r" with exponent[,;].*exponent saves ", said), said


# A transport


def test_a_transport_from_a_package_carries_a_run(runs: Path) -> None:
    for plan in ("fsdp=2 transport=loopback", "dp=2"):
        assert events(runs / plan, "start")[0]["transport"] == ("loopback" if "loopback" in plan else "shm")
    assert losses(runs / "fsdp=2 transport=loopback") == pytest.approx(losses(runs / "dp=2"), rel=1e-5)


MEASURED = """
import dataclasses, os
import psutil
from paceline.cluster.discover import discover
from paceline.job.job import Job
from paceline.planning.prediction import estimate
from paceline.run.links import transports_of
from paceline.run.tuning import calibrate as module
from paceline.run.tuning.calibrate import calibrate

if __name__ == "__main__":
    os.environ["XDG_CACHE_HOME"] = os.getcwd()
    psutil.cpu_percent, module.reference_time_s = lambda _: 0.0, lambda: 1e-3  # whatever else the machine does
    here, job, said = discover(), Job.load("job.yaml"), []
    print(*transports_of(here))
    found = calibrate(job, here, axes=("none",))
    print(*dict.fromkeys(one.transport for one in found.collectives))
    print(calibrate(job, here, said.append, axes=("none",)) == found, "as measured before" in said[0])
    times = found.collective("loopback", "all_reduce")
    slower = dataclasses.replace(times, times_s=tuple(10 * t for t in times.times_s))
    slow = dataclasses.replace(found, collectives=(*(c for c in found.collectives if c != times), slower))
    plan = "dp=2 transport=loopback"
    step_s = [estimate(job, plan, cluster=here, calibration=c).step_time_s for c in (found, slow)]
    print(step_s[1] > step_s[0])
"""


@pytest.mark.slow
def test_a_transport_from_a_package_is_measured_and_planned_with(installed: str, tmp_path: Path) -> None:
    write_job(tmp_path / "job.yaml", global_batch=16)
    offered, measured, kept, dearer = loaded(MEASURED, installed, tmp_path, 300)
    assert offered == measured == "shm gloo loopback"
    assert kept == "True True"
    assert dearer == "True"


# A launch engine


ENGINE = """
import os, sys
children = []
for rank in "01":
    if (child := os.fork()) == 0:
        own = {{"RANK": rank, "SIZE": "2", "LOCAL_RANK": rank, "LOCAL_SIZE": "2"}}
        os.environ.update({{f"OMPI_COMM_WORLD_{{name}}": value for name, value in own.items()}}, MASTER_PORT="{port}")
        sys.argv = ["paceline", "train", "job.yaml", "--run", "by_engine"]
        from paceline.cli import main
        try:
            main()
        except BaseException as ended:
            print(repr(ended), file=sys.stderr)
        finally:
            os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
"""


def test_processes_of_an_engine_from_a_package_train_as_its_ranks(runs: Path) -> None:
    assert events(runs / "by_engine", "start")[0]["plan"] == "dp=2"
    assert losses(runs / "by_engine") == pytest.approx(losses(runs / "dp=2"), rel=1e-5)
    assert len(events(runs / "by_engine", "end")) == 1


# A device


def test_a_plan_is_made_for_a_device_from_a_package(runs: Path, said: dict[str, list[str]]) -> None:
    assert "RTX-6000-Ada" in "".join(said["device"])
    unknown = paceline("plan", "sizes.yaml", "--cluster", "2x8xRTX-6000-Ada", folder=runs)
    assert '"RTX-6000-Ada" is not in the catalogue of hardware. Did you mean RTX-' in unknown.error


# A tracker

LOOP = """
import torch, paceline
from torch.utils.data import DataLoader, TensorDataset
from paceline.errors import JobError
from paceline.run.trackers import tracker

data = DataLoader(TensorDataset(torch.randn(12, 3), torch.randn(12, 1)), batch_size=4)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = paceline.setup(model, optimizer, loss=torch.nn.functional.mse_loss, loader=data, on_step=[tracker("csv", file="steps.csv")])
for batch in engine.loader:
    engine.step(batch)
for name, settings in (("csv", {"path": "x"}), ("cvs", {})):
    try: tracker(name, **settings)
    except JobError as error: print(error)
"""  # noqa: E501


def test_a_tracker_from_a_package_logs_every_step(runs: Path, said: dict[str, list[str]]) -> None:
    wrong, unknown = said["tracker"]
    assert wrong.startswith('tracker "csv" cannot be created:')
    assert unknown == 'unknown tracker "cvs". Did you mean "csv"?'
    lines = [line.split(",") for line in (runs / "steps.csv").read_text().splitlines()]
    assert [(step, name) for step, name, _ in lines] == [
        (step, name) for step in "123" for name in ("train/loss", "train/grad_norm")
    ]


# A report panel


def test_a_panel_from_a_package_is_on_the_page_of_a_run(runs: Path) -> None:
    assert "<h2>Gradient norm</h2>" in (runs / "dp=2" / "report.html").read_text()


# A system of the comparison


@pytest.mark.slow
@pytest.mark.timeout(300)  # eleven starts of ranks
def test_a_system_from_a_package_is_compared_with_ours_on_the_same_losses(installed: str, tmp_path: Path) -> None:
    write_job(tmp_path / "job.yaml")
    command = [
        "bench",
        "compare",
        "job.yaml",
        "--systems",
        "ddp-bucket",
        "--steps",
        "12",
        "--repeat",
        "1",
        "--out",
        "b",
        "--json",
    ]
    lines = loaded(COMMAND.format(arguments=command), installed, tmp_path, deadline_s=280)
    figures = json.loads(lines[-1])["figures"]
    assert figures["systems_run"] == 2
    assert figures["ratio_ddp_bucket"] > 0
    found = json.loads((tmp_path / "b" / "report.json").read_text())
    ways = {way["way"]: way for way in found["ways"]}
    assert ways.keys() == {"paceline", "plain", "plain-all", "ddp-bucket", "ddp-bucket-tuned"}
    assert all(way["same"] for way in ways.values())
    assert ways["ddp-bucket"]["lines"] < 10
    assert len(ways["paceline"]["losses"]) == 12
    assert found["best_other"] is not None
    assert found["left_out"] == {}
    assert "DDP, one bucket" in (tmp_path / "b" / "report.html").read_text()
    assert list((tmp_path / "b" / "runs").iterdir()) == [], "runs that were only timed are removed"


# Any


def test_a_command_a_section_and_a_page_from_a_package_are_found(installed: str, tmp_path: Path) -> None:
    (tmp_path / "survey").mkdir()
    (tmp_path / "survey" / "survey.txt").write_text("")
    write_job(tmp_path / "job.yaml", budget={"euros": 20})
    code = "\n".join(
        [
            "from paceline.cli import commands",
            "from paceline.errors import JobError",
            "from paceline.job.job import Job",
            "job = Job.load('job.yaml')",
            "print(job.model_extra['budget'].euros)",
            "try: Job.model_validate({**job.model_dump(), 'budget': {'euro': 20}})",
            "except JobError as error: print('euros' in str(error))",
            "for words in (['hello', 'Ada'], ['report', 'survey']):",
            "    commands()[words[0]].main(words[1:], standalone_mode=False)",
        ]
    )
    assert loaded(code, installed, tmp_path) == ["20.0", "True", "Hello, Ada.", "survey/survey.html"]


def test_an_extension_that_is_no_description_is_refused_by_name(installed: str, tmp_path: Path) -> None:
    (tmp_path / "broken-1.dist-info").mkdir()
    (tmp_path / "broken-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (tmp_path / "broken-1.dist-info" / "entry_points.txt").write_text(
        "[paceline.codecs]\nclass = exponent:Exponent\nmissing = nowhere:INFO\n"
    )
    code = (
        "from paceline.planning.sync_info import CODECS\nfrom paceline.errors import PlanError\n"
        "for name in ('class', 'missing'):\n    try: CODECS[name]\n    except PlanError as error: print(error)"
    )
    wrong, missing = loaded(code, f"{tmp_path}:{installed}")
    assert "(exponent:Exponent) is a type, but it must be a CodecInfo" in wrong
    assert "(nowhere:INFO) cannot be loaded: ModuleNotFoundError" in missing
