"""The command itself.

It answers at once, by every name, and what it does not know is an error that says what it knows.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

import paceline as package
from commands import in_a_process, paceline, parsed
from paceline.cli import commands
from paceline.cli.command import Panel
from paceline.planning.plan import Plan

ROOT = Path(__file__).parent.parent.parent

HEAVY = {"torch", "numpy", "pydantic", "yaml", "psutil", "transformers"}


def modules_after(code: str) -> set[str]:
    """The modules that are loaded in a fresh Python after `code`."""
    script = f"import sys\n{code}\nprint('loaded', *sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return set(shown.splitlines()[-1].split())


def test_help_on_a_command_and_mistyped_options_wait_for_no_torch() -> None:
    commands = ("train", "export", "bench", "links", "report", "doctor")
    called = [*([command, "--help"] for command in commands), ["train", "job.yaml", "--plann", "dp=2"]]
    loaded = modules_after(
        f"import paceline.cli\nfor sys.argv[1:] in {called}:\n  try: paceline.cli.main()\n  except SystemExit: pass"
    )
    assert "paceline.cli.train" in loaded
    assert not loaded & (HEAVY - {"pydantic"}), "pydantic alone is typer's own wish"


def test_help_needs_nothing_heavy() -> None:
    loaded = modules_after(
        "sys.argv[1:] = ['--help']\nimport paceline.cli\ntry: paceline.cli.main()\nexcept SystemExit: pass"
    )
    assert "paceline.cli.train" in loaded
    assert not loaded & HEAVY


def test_a_list_of_runs_needs_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "job.yaml").write_text("name: mine")
    loaded = modules_after(
        f"import os\nos.chdir({str(tmp_path)!r})\nos.environ['PACELINE_HOME'] = 'home'\nsys.argv[1:] = ['runs']\n"
        "import paceline.cli\ntry: paceline.cli.main()\nexcept SystemExit: pass"
    )
    assert "paceline.run.record.brief" in loaded
    assert not loaded & (HEAVY - {"pydantic", "yaml"})


def test_a_mistake_in_the_job_file_waits_for_nothing_that_trains(tmp_path: Path) -> None:
    (job := tmp_path / "job.yaml").write_text("model: [mlp")
    called = [[*command.split(), str(job)] for command in ("train", "bench scaling", "plan")]
    called.append(["check", str(job), "--plan", "dp=2"])
    loaded = modules_after(
        f"import paceline.cli\nfor sys.argv[1:] in {called}:\n  try: paceline.cli.main()\n  except SystemExit: pass"
    )
    assert "paceline.job.job" in loaded
    assert not loaded & {"torch", "paceline.run.train", "paceline.planning.search.search", "paceline.elastic.attempt"}


def test_importing_the_package_needs_nothing_heavy() -> None:
    loaded = modules_after("import paceline; dir(paceline); from paceline import PacelineError")
    assert "paceline.errors" in loaded
    assert not loaded & HEAVY


def test_every_command_argument_and_option_says_what_it_is_for(tmp_path: Path) -> None:
    for name, command in commands_of(commands()).items():
        assert command.help, name
        assert [one.name for one in command.params if not one.help] == [], name
    listed = paceline("--help", folder=tmp_path, columns=200)
    assert listed.says(*(f" {name} " for name in commands()), *(f" {panel} " for panel in get_args(Panel)))
    shown = paceline("train", "--help", folder=tmp_path, columns=200)
    assert shown.says("JOB", "--plan", "--resume", "--restarts", "runs/JOB-TIME")


def test_it_is_a_module_as_well(tmp_path: Path) -> None:
    as_module = subprocess.run(
        [sys.executable, "-m", "paceline", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert as_module.stdout.splitlines()[3:] == paceline("--help", folder=tmp_path).out.splitlines()[3:]


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["trian"], ["'trian' is not a command", '"train"']),
        (["plan", "job.yaml", "--tokens", "1T"], ["--tokens", "`paceline plan cost`"]),
        (["plan", "explian", "job.yaml"], ["explian", "`paceline plan explain`"]),
        (["train"], ["Missing argument 'JOB'"]),
        (["train", "job.yaml", "--plann", "dp=2"], ["No such option: --plann", "--plan"]),
        (["train", "job.yaml", "--port", "80000"], ["--port", "65535"]),
        (["train", "job.yaml", "--restarts", "-1"], ["--restarts"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_it_does_not_know_is_an_error_of_the_command_line(
    arguments: list[str], texts: list[str], tmp_path: Path
) -> None:
    shown = paceline(*arguments, folder=tmp_path, columns=200)
    assert shown.code == 2
    assert shown.says(*texts, "--help")


def test_the_version_is_the_one_that_pyproject_names(tmp_path: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert package.__version__ == version
    assert paceline("--version", folder=tmp_path).out == f"paceline {version}\n"
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text()


COMMANDS = (
    "train",
    "bench scaling",
    "bench compare",
    "bench data",
    "bench simulate",
    "chaos",
    "check",
    "doctor",
    "evaluate",
    "export",
    "generate",
    "init",
    "key",
    "links",
    "plan",
    "predict",
    "plan explain",
    "plan cost",
    "plan cluster",
    "plan batch",
    "report",
    "submit",
    "sweep",
    "runs",
    "logs",
    "scale",
    "cancel",
    "dashboard",
    "config explain",
    "config write",
    "data show",
    "data tokenize",
    "serve",
    "watch",
    "trace",
    "why",
    "federate simulate",
    "federate deploy",
)


def test_every_command_is_tested_for_its_example() -> None:
    assert set(COMMANDS) == set(commands_of(commands()))


def commands_of(group: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Commands by name, those of a group behind its own."""
    found: dict[str, Any] = {}
    for name, command in group.items():
        inside = vars(command).get("commands", {})
        found |= commands_of(inside, f"{before}{name} ")
        if command.callback is not None:  # a command, and not only a group of others
            found[f"{before}{name}"] = command
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_an_example_that_the_command_takes(name: str, tmp_path: Path) -> None:
    words = name.split()
    shown = paceline(*words, "--help", folder=tmp_path, columns=200).out
    program, *arguments = shlex.split(shown.partition("Example: ")[2].strip())
    assert (program, *arguments[: len(words)]) == ("paceline", *words)
    values = parsed(arguments)
    if values.get("plan"):
        Plan.parse(values["plan"])
    assert [path for path in re.findall(r"examples/[\w/.]+", shown) if not (ROOT / path).is_file()] == []


def test_the_shell_completes_commands_and_options(tmp_path: Path) -> None:
    def completed(words: str, position: int) -> list[str]:
        variables = {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(position)}
        return in_a_process(folder=tmp_path, **variables).out.split()

    assert completed("paceline trai", 1) == ["train"]
    assert sorted(completed("paceline tr", 1)) == ["trace", "train"]
    assert completed("paceline train job.yaml --res", 3) == ["--resume", "--restarts"]
