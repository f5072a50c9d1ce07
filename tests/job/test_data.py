"""What a job file may say about data: short forms, paths, and values that are refused before anything is read."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from paceline.job.data import Arrays, Cifar10, Custom, DataSpec, Digits, Images, Text

SPEC: TypeAdapter[Any] = TypeAdapter(DataSpec)


def test_one_word_names_a_kind_and_a_colon_an_import_path() -> None:
    assert SPEC.validate_python("digits") == Digits(kind="digits")
    assert SPEC.validate_python("my.module:make") == Custom(kind="dataset", factory="my.module:make")


def test_paths_count_from_the_folder_of_the_job_file(tmp_path: Path) -> None:
    read = SPEC.validate_python
    assert read({"kind": "cifar10", "path": "cifar"}, context={"base": tmp_path}) == Cifar10(
        kind="cifar10", path=tmp_path / "cifar"
    )
    images = read({"kind": "images", "path": "a", "held_out_path": "/b"}, context={"base": tmp_path})
    assert images == Images(kind="images", path=tmp_path / "a", held_out_path=Path("/b"))


def test_text_takes_one_path_or_several_and_knows_pythons_own_library(tmp_path: Path) -> None:
    one = SPEC.validate_python({"kind": "text", "path": "{stdlib}/json"})
    assert isinstance(one, Text)
    assert one.path == (Path(sysconfig.get_path("stdlib"), "json"),)
    assert SPEC.validate_python({"kind": "text", "path": ["a", "b"]}, context={"base": tmp_path}).path == (
        tmp_path / "a",
        tmp_path / "b",
    )


def test_a_spec_reads_back_from_what_it_is_saved_as() -> None:
    for values in (
        {"kind": "digits", "shape": [1, 28, 28]},
        {"kind": "text", "path": "{stdlib}", "objective": "masked"},
        {"kind": "arrays", "path": "/x.npz", "inputs": ["a", "b"]},
        {"kind": "synthetic", "shape": [4], "held_out": 0.0},
    ):
        spec = SPEC.validate_python(values)
        assert SPEC.validate_python(spec.model_dump(mode="json", exclude_defaults=True)) == spec


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "digit"},
        {"kind": "digits", "held_out": 1.0},
        {"kind": "digits", "shape": [1, 0, 8]},
        {"kind": "text", "path": []},
        {"kind": "arrays", "path": "x.npz", "inputs": []},
        {"kind": "synthetic", "shape": [-1]},
        {"kind": "dataset", "factory": "no_such_file.py:make"},
        {"kind": "cifar10"},
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_read(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SPEC.validate_python(values)


def test_inputs_are_one_name_or_several() -> None:
    assert Arrays(kind="arrays", path=Path("/x.npz")).inputs == "x"
    assert SPEC.validate_python({"kind": "arrays", "path": "x", "inputs": ["a", "b"]}).inputs == ("a", "b")


def test_reading_a_spec_loads_no_torch() -> None:
    code = "import sys, paceline.job.data; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
