"""Whatever is wrong with the user's data, model or ranks.

One error that says what and where, within seconds, and no rank left.
"""

from __future__ import annotations

import os
import pty
import re
from pathlib import Path
from typing import Any

import pytest

from commands import Outcome, ended, events, losses, paceline, points, started, write_job

WHAT = Path(__file__).with_name("what_goes_wrong.py")


def job(folder: Path, *, model: str = "net", nonfinite: str = "stop", deadline_s: float = 60, **data: Any) -> Path:
    """96 points in batches of 16, three epochs; `data` goes to `Points`."""
    return write_job(
        folder / "job.yaml",
        model=f"{WHAT}:{model}",
        data=points(**data),
        stop={"epochs": 3},
        nonfinite=nonfinite,
        deadline_s=deadline_s,
    )


def failed(file: Path, plan: str = "dp=1", *options: str) -> Outcome:
    outcome = paceline("train", file, "--plan", plan, "--run", "run", *options, folder=file.parent)
    assert outcome.code == 1
    return outcome


@pytest.mark.parametrize(
    ("settings", "code", "fields"),
    [
        ({"model": "no_module"}, "model.not_a_module", {"path": f"{WHAT}:no_module", "found": "a builtins.str"}),
        ({"model": "nett"}, "job.object_missing", {"name": "nett", "hint": re.compile('"net"')}),
        ({"samples": 0}, "data.dataset_empty", {"factory": f"{WHAT}:Points", "kind": "Points"}),
        ({"samples": 10}, "data.smaller_than_batch", {"samples": 10, "global_batch": 16}),
        ({"trouble": "shrink"}, "data.dataset_length_changed", {"class_name": "Points", "before": 96, "now": 89}),
    ],
    ids=["no module", "no such name", "empty", "shorter than a batch", "changes its length"],
)
def test_a_model_or_data_set_that_cannot_work_is_one_error_without_a_traceback(
    settings: Any, code: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    shown = failed(job(tmp_path, **settings)).fails_with(code, **fields)
    assert len(shown.splitlines()) == 1


def test_a_word_for_recovery_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_RECOVERY", "no")
    failed(job(tmp_path), "dp=2").fails_with("launch.recovery_invalid", variable="PACELINE_RECOVERY", wanted="no")


def test_an_error_inside_the_users_module_is_shown_where_it_happened(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\n\nrate = torch.nothing_of_this_name\n")
    outcome = failed(write_job(tmp_path / "job.yaml", model="mine.py:net"), "dp=1", "--traceback")
    lines = outcome.fails_with("job.import_failed", module=tmp_path / "mine.py", kind="AttributeError").splitlines()
    assert lines[2:4] == ["Traceback (most recent call last):", f'  File "{tmp_path}/mine.py", line 3, in <module>']


def test_labels_out_of_range_are_named_with_their_step_rank_and_sample(tmp_path: Path) -> None:
    where = {"where": re.compile(r"step \d on rank [01]"), "at": re.compile(r"\b40\b")}
    failed(job(tmp_path, trouble="label"), "dp=2").fails_with(
        "loss.label_out_of_range", largest=2, label=11, wrong=1, labels=8, **where
    )


def test_data_that_is_not_finite_stops_the_run_and_names_the_sample(tmp_path: Path) -> None:
    problem = re.compile(r"step \d is nan .*rank [01]'s .*\[40\]")
    failed(job(tmp_path, trouble="nan"), "dp=2").fails_with("nonfinite.stopped", problem=problem)


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_with_another_policy_the_run_goes_on_without_that_batch(policy: str, tmp_path: Path) -> None:
    outcome = paceline(
        "train", job(tmp_path, trouble="nan", nonfinite=policy), "--plan", "dp=2", "--run", "run", folder=tmp_path
    )
    assert outcome.code == 0, outcome.err
    assert [event["policy"] for event in events(tmp_path / "run", "nonfinite")] == 3 * [policy], "once an epoch"
    assert len(events(tmp_path / "run", "rewind")) == (3 if policy == "rewind" else 0)
    assert sorted(losses(tmp_path / "run")) == list(range(1, 19))


def test_a_sample_that_cannot_be_read_is_named_with_the_users_own_traceback(tmp_path: Path) -> None:
    outcome = failed(job(tmp_path, trouble="raise"), "dp=2", "--traceback")
    lines = outcome.fails_with(
        "data.sample_raised", replica=1, kind="ValueError", error=re.compile(r"^cannot decode image \d+$")
    ).splitlines()
    assert lines[2] == "Traceback (most recent call last):"
    assert str(WHAT) in lines[3], "the user's own code comes first, not ours"
    assert re.fullmatch(r"ValueError: cannot decode image \d+", lines[-1])


def test_a_rank_that_raises_shows_its_traceback_alone(tmp_path: Path) -> None:
    shown = failed(job(tmp_path, model="RaisesOnRankOne"), "dp=2", "--traceback").fails_with(
        "launch.rank_raised", rank=1, type="ValueError", message=re.compile("^ValueError: the attention mask")
    )
    assert shown.count("Traceback") == 1
    assert shown.endswith("ValueError: the attention mask has the wrong shape\n")


def test_a_rank_that_hangs_is_named_after_the_deadline_with_where_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_RECOVERY", "off")
    outcome = failed(job(tmp_path, trouble="hang", deadline_s=3), "dp=2")
    outcome.fails_with(
        "launch.rank_hung",
        head=re.compile(r"^rank 1 \(host .*, pid \d+\) .*data of step 4 for 3 s .*rank 0"),
        advice=re.compile("deadline_s"),
        stacks=re.compile("in come_to_grief"),
    )


@pytest.mark.slow
def test_a_terminal_shows_colours_unless_the_user_wants_none_and_is_left_in_order(tmp_path: Path) -> None:
    file = job(tmp_path, trouble="nan", nonfinite="skip")
    for environment, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        shown = on_a_terminal("train", file, "--plan", "dp=1", folder=tmp_path, **environment)
        assert bool(re.search(r"\x1b\[[0-9;]+m", shown)) == coloured
        assert not re.search(r"(?<!\x1b\[)\?25h", shown), "a control code is on the screen as text"
        assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l"), "the cursor is hidden"


def on_a_terminal(*arguments: object, folder: Path, **environment: str) -> str:
    """What a terminal gets on which `paceline ARGUMENTS…` runs with exit code 0."""
    ours, terminal = pty.openpty()
    environment = {"TERM": "xterm-256color", "COLUMNS": "120", **environment}
    with started("paceline", *arguments, folder=folder, screen=terminal, environment=environment) as process:
        os.close(terminal)
        shown = b""
        while part := read(ours):
            shown += part
        assert ended(process).code == 0
    os.close(ours)
    return shown.decode()


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other side is closed
        return b""


def test_the_cause_is_on_the_screen_and_the_traceback_in_a_file(tmp_path: Path) -> None:
    shown = failed(job(tmp_path, model="RaisesOnRankOne"), "dp=2").error
    cause, where = shown.splitlines()
    assert "ValueError: the attention mask" in cause
    assert str(WHAT) in where
    file = Path(re.findall(r"\S+newest\.txt", where)[0])
    assert file.read_text().startswith("Traceback (most recent call last):")
    assert str(WHAT) in file.read_text()


def test_a_traceback_that_cannot_be_written_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "none").write_text("a file, not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    shown = failed(job(tmp_path, model="RaisesOnRankOne"), "dp=2").error
    assert "Traceback (most recent call last):" in shown
