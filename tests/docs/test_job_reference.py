"""docs/job.md tells of every key of a job, with the default that the code has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.job import data
from paceline.job.job import CheckpointSpec, EvaluateSpec, Job
from paceline.job.loss import LossSpec
from paceline.job.model import ModelSpec
from paceline.job.optimizer import OptimizerSpec, ScheduleSpec
from paceline.job.partition import PartitionSpec
from paceline.job.stop import StopSpec

TEXT = (Path(__file__).parents[2] / "docs" / "job.md").read_text()
SECTIONS: dict[str, tuple[type[BaseModel], ...]] = {
    "Job": (Job,),
    "model": (ModelSpec,),
    "data": (data.Digits, data.Cifar10, data.Images, data.Text, data.Arrays, data.Custom, data.Synthetic),
    "loss": (LossSpec,),
    "optimizer": (OptimizerSpec,),
    "schedule": (ScheduleSpec,),
    "partition": (PartitionSpec,),
    "stop": (StopSpec,),
    "evaluate": (EvaluateSpec,),
    "checkpoint": (CheckpointSpec,),
}


def default(field: FieldInfo) -> str | None:
    """The default as the page writes it; None for a part of the job that has a table of its own."""
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return None
    return "none" if value is None else f"`{value if isinstance(value, str) else json.dumps(value)}`"


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_has_every_key_and_its_default(section: str) -> None:
    part = re.split(r"^## ", TEXT, flags=re.M)
    table = next(text for text in part if text.startswith(f"{section}\n"))
    rows = {(key, stated) for key, stated in re.findall(r"`(\w+)` \| ([^|]*?) \|", table)}
    keys = {key for key, _ in rows}
    for spec in SECTIONS[section]:
        for name, field in spec.model_fields.items():
            if name == "kind" and section == "data":
                continue  # a row of its own, that names the kind
            expected = default(field)
            if spec is data.Digits and name == "held_out":
                expected = "`0.1`"  # the row of all kinds, which tells that of digits in words
            assert name in keys
            assert expected is None or (name, expected) in rows, f"{section}.{name}: the code's default is {expected}"


def test_the_page_has_no_key_that_the_code_lacks() -> None:
    known = {name for specs in SECTIONS.values() for spec in specs for name in spec.model_fields} | {"digits", "cifar10", "images"}
    known |= {"text", "arrays", "dataset", "synthetic"}
    assert set(re.findall(r"^\|(?: \|)? `(\w+)` \|", TEXT, flags=re.M)) <= known
