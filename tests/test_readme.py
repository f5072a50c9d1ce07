"""README, the reference of the job file and that of plans agree with the code.

No key is missing or invented, every default is right.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from paceline.job.data import Arrays, Cifar10, Custom, Digits, Images, Synthetic, Text
from paceline.job.job import CheckpointSpec, EvaluateSpec, Job, TrackerSpec
from paceline.job.loss import LossSpec, MetricSpec
from paceline.job.model import Dimensions, ModelSpec
from paceline.job.optimizer import OptimizerSpec
from paceline.job.partition import PartitionSpec
from paceline.job.schedule import ScheduleSpec
from paceline.job.spec import SECTIONS
from paceline.job.stop import BestSpec, PatienceSpec, PlateauSpec, SpikeSpec, StopSpec
from paceline.job.zoo import _MODELS
from paceline.job.zoo.losses import _LOSSES
from paceline.job.zoo.metrics import _METRICS
from paceline.job.zoo.preference_loss import REWARDS
from paceline.planning.check.plan_errors import plan_errors
from paceline.planning.plan import Plan
from paceline_federated.section import ClientsSpec, FederateSpec, SecureSpec, SimulateSpec

ROOT = Path(__file__).parent.parent
README, REFERENCE, PLANS = (
    (ROOT / page).read_text() for page in ("README.md", "docs/reference/job.md", "docs/reference/plan.md")
)

PARTS: dict[str, type[BaseModel]] = {
    "Job": Job,
    "model": ModelSpec,
    "loss": LossSpec,
    "optimizer": OptimizerSpec,
    "schedule": ScheduleSpec,
    "partition": PartitionSpec,
    "stop": StopSpec,
    "evaluate": EvaluateSpec,
    "checkpoint": CheckpointSpec,
    "trackers": TrackerSpec,
    "spike": SpikeSpec,
    "federate": FederateSpec,
    "federate.partition": ClientsSpec,
    "federate.secure": SecureSpec,
    "federate.simulate": SimulateSpec,
}
KINDS: dict[str, type[BaseModel]] = {
    "digits": Digits,
    "cifar10": Cifar10,
    "images": Images,
    "text": Text,
    "arrays": Arrays,
    "dataset": Custom,
    "synthetic": Synthetic,
}
OF_ALL_KINDS = ("kind", "held_out", "test", "num_workers", "limit", "collate", "collate_held_out")
# defaults of parts
IN_WORDS = {
    "evaluate": "each epoch",
    "checkpoint": "each 300 s",
    "schedule": "constant",
    "partition": "uniform",
    "spike": "off",
}
IN_WORDS_OF_CLIENTS = {"partition": "iid", "simulate": "all answer"}
IN_WORDS_OF_OPTIMIZERS = {"adamw": "{}"}


@pytest.mark.parametrize("part", PARTS)
def test_the_reference_has_every_key_of_a_part_with_its_default(part: str) -> None:
    words = {"Job": IN_WORDS, "federate": IN_WORDS_OF_CLIENTS, "optimizer": IN_WORDS_OF_OPTIMIZERS}.get(part, {})
    expected = {key: words.get(key, default) for key, default in defaults(PARTS[part]).items()}
    if part == "Job":
        expected |= dict.fromkeys(SECTIONS.names, "none")
    assert documented(section(part)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_has_every_key_of_a_kind_of_data_with_its_default(kind: str) -> None:
    known = defaults(KINDS[kind])
    assert documented(section(kind)) == {key: default for key, default in known.items() if key not in OF_ALL_KINDS}
    common = documented(section("data"))
    stated = re.search(r"`held_out` is `([^`]+)` here", section(kind))
    assert common | ({"held_out": stated[1]} if stated else {}) == {
        key: known[key] for key in OF_ALL_KINDS if key != "kind"
    }


@pytest.mark.parametrize("part", [*PARTS, *KINDS])
def test_the_reference_names_every_value_of_a_choice(part: str) -> None:
    model = PARTS.get(part) or KINDS[part]
    lines = rows(section(part))
    for key, field in model.model_fields.items():
        if key != "kind" or part == "partition":
            missing = [choice for choice in choices(field.annotation) if f"`{choice}`" not in lines[key]]
            assert missing == [], f"{part}.{key}"


def test_the_reference_has_every_model_of_the_zoo_with_its_arguments() -> None:
    expected = {
        name: ", ".join(f"`{p.name}: {written(p.default)}`" for p in inspect.signature(model).parameters.values())
        for name, model in _MODELS.items()
    }
    listed = rows(section("model"))
    assert {name: listed[f"zoo: {name}"].split(" | ")[1] for name in expected} == expected


def test_the_reference_has_every_loss_and_metric() -> None:
    assert rows(section("loss")).keys() == {"name", "args", *(f"name: {name}" for name in _LOSSES)}
    assert set(re.findall(r"^- `(\w+)`", section("metrics"), re.MULTILINE)) == {*_METRICS, *REWARDS}


@pytest.mark.parametrize(
    ("part", "key", "model"),
    [
        ("stop", "plateau", PlateauSpec),
        ("stop", "patience", PatienceSpec),
        ("checkpoint", "best", BestSpec),
    ],
)
def test_the_reference_has_the_keys_of_a_value(part: str, key: str, model: type[BaseModel]) -> None:
    assert [name for name in model.model_fields if f"{name}: " not in rows(section(part))[key]] == []


def test_the_reference_has_the_keys_of_a_metric_and_of_a_models_dimensions() -> None:
    assert [name for name in MetricSpec.model_fields if f"{name}: " not in section("metrics")] == []
    listed = re.findall(r"^- `(\w+)`", section("A model by its dimensions"), re.MULTILINE)
    assert listed == list(Dimensions.model_fields)


def test_the_page_on_plans_has_every_key_with_its_default() -> None:
    words: dict[Any, str] = {True: "on", False: "off", None: "the job's", "": "by cost"}
    expected = {
        f.name: str(f.default) if type(f.default) is int else words.get(f.default, str(f.default)) for f in fields(Plan)
    }
    listed = rows(PLANS)
    assert {key: listed[key].split(" | ")[1].strip("`") for key in expected} == expected


def test_the_refusal_that_the_readme_shows_is_what_is_printed() -> None:
    [refusal] = [
        text for text in re.findall(r"```text\n(.*?)```", README, re.DOTALL) if "Nearest plan that works" in text
    ]
    [plan] = re.findall(r'--plan "([^"]+)"', refusal)
    lines = str(plan_errors(ROOT / "examples" / "gpt_text.yaml", plan)).splitlines()
    assert [line for line in lines if line not in refusal] == []
    assert len(lines) >= 2


def section(title: str) -> str:
    """What stands under a heading of the reference, to the next one."""
    found = re.search(rf"^#+ {title}\n(.*?)(?=^#|\Z)", REFERENCE, re.DOTALL | re.MULTILINE)
    assert found, f"the reference has no section {title}"
    return found[1]


def rows(text: str) -> dict[str, str]:
    """The lines of tables by the name that each begins with."""
    return {found[1]: found[0].strip("| ") for found in re.finditer(r"^\| `([^`]+)` \|.*$", text, re.MULTILINE)}


def documented(text: str) -> dict[str, str]:
    """Key and default of every line of the tables whose second column is a default."""
    table = re.search(r"^\| key \| default \| meaning \|\n(?:\|.*\n)+", text, re.MULTILINE)
    return {key: line.split(" | ")[1].strip("`") for key, line in rows(table[0]).items()} if table else {}


def defaults(model: type[BaseModel]) -> dict[str, str]:
    """Every key of a part with its default, as a job file has it."""
    return {key: written(field.get_default(call_default_factory=True)) for key, field in model.model_fields.items()}


def written(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, BaseModel):
        return type(value).__name__
    return value if isinstance(value, str) else json.dumps(value)


def choices(annotation: Any) -> list[str]:
    """The words that a key takes, where it takes no others."""
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return [word for part in typing.get_args(annotation) for word in choices(part)]
    return []
