"""The tutorials work when their commands are copied, and print what the pages show.

A block of the language `console` holds commands (after `$ `) and their output. `…` in the output stands for any text,
also over several lines if it is alone on its line. A command succeeds unless its output shows an error of paceline.
Decimal numbers may differ by 2 %, and lines of progress, which a slow machine prints more often, are left out. A block
with `title="file"` is a file that the reader saves. All commands of a page run in one shell, in an empty folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parent.parent / "docs" / "tutorials").glob("*.md"))
DEADLINE_S = 400
END = "<<end of a command, exit code {}>>"
DECIMAL = r"\d[\d,]*\.\d+"


@dataclass(frozen=True)
class Command:
    """A command of a page and the output that the page shows."""

    line: str
    expected: str

    @property
    def fails(self) -> bool:
        """True if the page shows an error of paceline."""
        return self.line.startswith("paceline ") and re.search("^paceline: ", self.expected, re.MULTILINE) is not None


def steps_of(page: str) -> list[Command | tuple[str, str]]:
    """The commands and the files (name, content) of a page, in order."""
    steps: list[Command | tuple[str, str]] = []
    for info, body in re.findall(r"^```([^\n]*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if title := re.search(r'title="([^"]+)"', info):
            steps.append((title[1], body))
        elif info.startswith("console"):
            for command in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                line, _, expected = re.sub(r"\\\n\s*", "", command).partition("\n")
                steps.append(Command(line, expected))
    return steps


def output_of(steps: list[Command | tuple[str, str]], folder: Path) -> list[tuple[str, int]]:
    """Run a page's commands in `folder`, and return the output and the exit code of each."""
    script = []
    for index, step in enumerate(steps):
        if isinstance(step, Command):
            script += [step.line, f'echo "{END.format("$?")}"']
        else:
            (folder / f".file{index}").write_text(step[1])
            script.append(f'mkdir -p "$(dirname "{step[0]}")" && mv .file{index} "{step[0]}"')
    temporary = folder / ".temporary"  # torchrun leaves a folder there
    temporary.mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "COLUMNS": "100", "PATH": path, "TMPDIR": str(temporary)}
    shell = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    *found, rest = re.split(END.format(r"(\d+)") + "\n?", shell.stdout)
    assert not rest, rest
    return [(text, int(code)) for text, code in zip(found[::2], found[1::2], strict=True)]


def pattern_of(expected: str) -> str:
    """A regular expression for an output, with a group for each decimal number."""
    lines = []
    for line in expected.rstrip().splitlines():
        if line.strip() == "…":
            lines.append(r"(?:.*\n)*?")
            continue
        parts = re.split(rf"(…|{DECIMAL})", line.rstrip())
        texts = [
            ".*?" if part == "…" else rf"({DECIMAL})" if re.fullmatch(DECIMAL, part) else re.escape(part)
            for part in parts
        ]
        lines.append("".join(texts).replace(r"\ ", r"\ ") + r"[ ]*\n")
    return "".join(lines) + r"\s*"


def differences(expected: str, printed: str) -> list[str]:
    """What is wrong with an output; empty if it is as expected."""
    plain = re.sub(r"\x1b\[[0-9;]*m|^epoch \d+ · step .*\n", "", printed, flags=re.MULTILINE).rstrip() + "\n"
    found = re.fullmatch(pattern_of(expected), plain if expected.strip() else plain.strip())
    if not found:
        return [f"expected:\n{expected}\nprinted:\n{plain}"]
    shown = [float(number.replace(",", "")) for number in re.findall(DECIMAL, expected)]
    got = [float(number.replace(",", "")) for number in found.groups()]
    return [
        f"{number} is printed, not {wanted}, in:\n{plain}"
        for wanted, number in zip(shown, got, strict=True)
        if abs(number - wanted) > 0.02 * abs(wanted) + 1e-9
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_tutorial_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    steps = steps_of(page.read_text())
    outputs = output_of(steps, tmp_path)
    commands = [step for step in steps if isinstance(step, Command)]
    problems = [
        f"$ {command.line}\n{problem}"
        for command, (printed, code) in zip(commands, outputs, strict=False)
        for problem in [
            *differences(command.expected, printed),
            *[f"exit code {code}:\n{printed}"] * (bool(code) != command.fails),
        ]
    ]
    assert not problems, "\n\n".join(problems)
    assert len(outputs) == len(commands)


@pytest.mark.parametrize(
    ("expected", "printed", "right"),
    [
        ("loss 0.100\n", "loss 0.101\n", True),
        ("loss 0.100\n", "loss 0.110\n", False),
        ("a … c\n", "a b c\n", True),
        ("a\n…\nz\n", "a\nb\nc\nz\n", True),
        ("a\nz\n", "a\nb\nz\n", False),
        ("", "a\n", False),
        ("", "", True),
    ],
)
def test_an_output_is_compared(expected: str, printed: str, right: bool) -> None:
    assert (not differences(expected, printed)) is right


if __name__ == "__main__":  # `python tests/test_tutorials.py PAGE FOLDER` prints what the commands print
    found = steps_of(Path(sys.argv[1]).read_text())
    for command, (printed, _) in zip(
        [step for step in found if isinstance(step, Command)], output_of(found, Path(sys.argv[2])), strict=False
    ):
        print(f"$ {command.line}\n{printed}", end="")
