"""Finding a user's code. What is imported wrongly trains something else, or not at all."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidValue, JobError
from paceline.job.spec import import_path_of, load_object, resolve_import_path
from refusals import raises


@pytest.fixture(autouse=True)
def _imports_undone(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def written(file: Path, text: str) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def test_a_name_is_found_in_a_package_and_in_a_file(tmp_path: Path) -> None:
    assert load_object("collections.abc:Mapping.get").__name__ == "get"
    file = written(tmp_path / "my_code.py", "class Outer:\n    class Inner: ...\n")
    assert load_object(f"{file}:Outer.Inner").__qualname__ == "Outer.Inner"


def test_a_file_is_loaded_once_however_often_it_is_named(tmp_path: Path) -> None:
    file = written(tmp_path / "counted.py", "made = object()\n")
    assert load_object(f"{file}:made") is load_object(f"{file}:made")


def test_two_files_of_one_name_do_not_replace_each_other(tmp_path: Path) -> None:
    first, second = (written(tmp_path / folder / "same_name.py", f"where = {folder!r}\n") for folder in ("a", "b"))
    assert [load_object(f"{file}:where") for file in (first, second, first, second)] == ["a", "b", "a", "b"]


def test_a_file_named_like_a_module_in_use_leaves_that_module_alone(tmp_path: Path) -> None:
    file = written(tmp_path / "functools.py", "mine = 1\n")
    assert load_object(f"{file}:mine") == 1
    assert sys.modules["functools"] is functools


def test_the_code_beside_a_file_can_be_imported_from_it(tmp_path: Path) -> None:
    written(tmp_path / "beside_it.py", "value = 7\n")
    file = written(tmp_path / "importer.py", "from beside_it import value\n")
    assert load_object(f"{file}:value") == 7


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "in_current_folder.py", "value = 3\n")
    monkeypatch.chdir(tmp_path)
    assert load_object("in_current_folder:value") == 3


@pytest.mark.parametrize(
    ("body", "kind", "error"),
    [
        ("import no_such_module_anywhere\n", "ModuleNotFoundError", "no_such_module_anywhere"),
        ("1 / 0\n", "ZeroDivisionError", "division by zero"),
        ("def f(:\n", "SyntaxError", "line 1"),
        ("import sys\nsys.exit(0)\n", "SystemExit", "0"),
    ],
)
def test_code_that_fails_on_import_is_named_with_its_error_and_not_kept(
    tmp_path: Path, body: str, kind: str, error: str
) -> None:
    file = written(tmp_path / "failing.py", body)
    with raises(JobError, "job.import_failed", module=file, kind=kind, error=re.compile(error)):
        load_object(f"{file}:f")
    written(file, "f = 'mended, now longer than before'\n")
    assert load_object(f"{file}:f") == "mended, now longer than before"


def test_a_missing_name_gets_the_nearest_one(tmp_path: Path) -> None:
    file = written(tmp_path / "named.py", "def make_model(): ...\n")
    with raises(JobError, "job.object_missing", hint='Did you mean "make_model"?', name="make_modle"):
        load_object(f"{file}:make_modle")


def test_relative_files_count_from_the_job_files_folder(tmp_path: Path) -> None:
    written(tmp_path / "code.py", "")
    assert resolve_import_path("./code.py:net", {"base": tmp_path}) == f"{tmp_path.resolve()}/code.py:net"
    assert resolve_import_path("pkg.mod:net", {"base": tmp_path}) == "pkg.mod:net"
    with raises(ValueError, "job.no_such_file", file=tmp_path / "nothing.py"):
        resolve_import_path("nothing.py:net", {"base": tmp_path})
    for wrong in ("net", ":net", "a:"):
        with raises(ValueError, "job.import_path_invalid", path=wrong):
            resolve_import_path(wrong, {"base": tmp_path})


def test_an_import_path_leads_back_to_what_it_was_made_of() -> None:
    for thing in (functools.wraps, Path, Path.exists):
        assert load_object(import_path_of(thing)) is thing


def test_what_has_no_name_in_a_module_has_no_import_path() -> None:
    def local() -> None: ...

    for code, things in (
        ("job.local_object", (lambda: None, local)),
        ("job.not_importable", (functools.partial(print), 3)),
    ):
        for thing in things:
            with raises(ValueError, code):
                import_path_of(thing)


def test_a_class_that_lies_in_no_file_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net:
        pass

    Net.__module__, Net.__qualname__ = "__main__", "Net"
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None, raising=False)
    for file in (None, "<stdin>"):
        monkeypatch.setattr(main, "__file__", file, raising=False)
        with raises(InvalidValue, "job.object_of_session"):
            import_path_of(Net)
