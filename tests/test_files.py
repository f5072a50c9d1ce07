"""Files are written whole and private, through nobody's links."""

from __future__ import annotations

import io
import os
import stat
import tempfile
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from paceline.console import Console
from paceline.files import (
    LINE_LIMIT,
    create_private,
    open_to_append,
    private_folder,
    scratch_folder,
    whole_lines,
    write_whole,
)
from paceline.text import printable
from small_jobs import small_job, train_here


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_private_and_replaces_a_link_instead_of_following_it(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "page").symlink_to(target)
    write_whole(tmp_path / "page", "new", durable=True)
    assert target.read_text() == "mine"
    assert (tmp_path / "page").read_text() == "new"
    assert mode(tmp_path / "page") == 0o600
    assert sorted(os.listdir(tmp_path)) == ["page", "target"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "page", "new")
    assert os.listdir(tmp_path) == ["page"]


def test_lines_are_never_appended_through_a_link_or_to_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            open_to_append(tmp_path / name)
    with pytest.raises(FileExistsError):
        create_private(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_whole(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"x" * (3 * LINE_LIMIT) + b"\nnext\nlast")
    assert [len(line) for line in whole_lines(tmp_path / "lines")] == [LINE_LIMIT, 5, 4]


@pytest.mark.needs_root
def test_a_folder_of_another_user_is_refused() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # into which every user may look
        os.chmod(folder, 0o755)
        theirs = Path(folder, "theirs")
        theirs.mkdir()
        os.chown(theirs, 1234, 1234)
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                private_folder(theirs)
            except PermissionError as error:
                os._exit(0 if "belongs to user 1234" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_everything_in_a_run_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run = train_here(tmp_path / "run", small_job(stop={"steps": 2})).path
    finally:
        os.umask(before)
    assert mode(run) == 0o700
    assert {mode(file) for file in run.rglob("*") if file.is_file()} == {0o600}


def test_text_of_others_cannot_steer_a_terminal() -> None:
    assert printable("\x1b[2Jgone\r\x9b1mé\u202etab\there\nnext") == "\\x1b[2Jgone\\r\\x9b1mé\\u202etab\there\nnext"


def test_a_console_shows_what_others_wrote_and_keeps_its_own_colours() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=60, highlight=False)
    table = Table("name")
    table.add_row(Text("host\x1b]0;owned\x07"))
    console.print("\x1b[2Jgone", style="red", markup=False)
    console.print(table)
    text = out.getvalue()
    assert "\x1b[31m\\x1b[2Jgone" in text
    assert "host\\x1b]0;o" in text
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder() as living:
        abandoned, newborn, other = (
            tmp_path / name for name in ("paceline-scratch-dead", "paceline-scratch-new", "another-program")
        )
        for folder in (abandoned, newborn, other):
            folder.mkdir()
        for folder in (living, abandoned, other):
            os.utime(folder, (0, 0))
        with scratch_folder() as own:
            assert mode(own) == 0o700
            assert sorted(tmp_path.iterdir()) == sorted([living, newborn, other, own])
    assert sorted(tmp_path.iterdir()) == sorted([newborn, other])


def test_a_scratch_folder_has_room_for_sockets_where_the_temporary_folder_has_a_long_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    below = "session/" + "x" * 50
    with scratch_folder(below) as short, scratch_folder() as ordinary, scratch_folder("x" * 200) as nowhere:
        assert len(str(short / below)) <= 107
        assert mode(short) == 0o700
        assert ordinary.parent == nowhere.parent == long
    assert not short.exists()


def test_a_file_may_have_the_longest_name_that_its_file_system_takes(tmp_path: Path) -> None:
    for name in ("x" * 255, "錯" * 85):
        write_whole(tmp_path / name, "content")
        assert (tmp_path / name).read_text() == "content"
