"""The systems whose configurations can be read and written, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.job.read.dimensions import Dimensions
from paceline.nearest import nearest
from paceline.planning.plan import Plan
from paceline_lab.configurations import accelerate, deepspeed, megatron, torchtitan
from paceline_lab.configurations.configuration import Configuration, text_of
from paceline_lab.configurations.written import Written


class System(NamedTuple):
    """Reader and writer of a system's configurations."""

    read: Callable[[Path, str], Configuration]
    write: Callable[[Plan, Job, Dimensions | None, int], Written]


SYSTEMS: Mapping[str, System] = {
    "megatron": System(megatron.read, megatron.write),
    "deepspeed": System(deepspeed.read, deepspeed.write),
    "torchtitan": System(torchtitan.read, torchtitan.write),
    "accelerate": System(accelerate.read, accelerate.write),
}


def system_of(file: Path, text: str) -> str:
    """Name of the system that a file belongs to, by its ending and its keys.

    Raises:
        PlanError: it is none of those known.
    """
    ending = file.suffix.lower()
    if ending == ".toml":
        return "torchtitan"
    if ending == ".json":
        return "deepspeed"
    if ending in (".yaml", ".yml"):
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise PlanError(f"{file} is not valid YAML: {error}") from None
        keys = set(values) if isinstance(values, dict) else set()
        return "accelerate" if keys & {"distributed_type", "fsdp_config", "compute_environment"} else "megatron"
    if "--" in text:
        return "megatron"
    raise PlanError(
        f"{file} is no configuration that is known: a script or arguments of Megatron-LM (.sh, .txt, .yaml), DeepSpeed "
        "(.json), torchtitan (.toml), or Accelerate (.yaml)"
    )


def read_configuration(file: Path) -> Configuration:
    """Read the configuration of another system.

    Raises:
        PlanError: the file cannot be read, is of no known system, or has a value that its key does not take.
    """
    text = text_of(file)
    return SYSTEMS[system_of(file, text)].read(file, text)


def system_named(title: str) -> str:
    """Name in `SYSTEMS` of a configuration's system, such as `Accelerate, FSDP`."""
    words = title.lower()
    return next((name for name in ("accelerate", "deepspeed", "torchtitan") if words.startswith(name)), "megatron")


def writes(system: str, plan: Plan, job: Job) -> bool:
    """True if a system can do what a plan has."""
    try:
        write_configuration(system, plan, job, 1)
    except PlanError:
        return False
    return True


def write_configuration(system: str, plan: Plan, job: Job, per_host: int) -> Written:
    """The plan as a configuration of another system.

    Raises:
        PlanError: the system is not known, or cannot do what the plan has; names everything.
    """
    if system not in SYSTEMS:
        raise PlanError(f'"{system}" is no system that a plan can be written for. {nearest(system, SYSTEMS)}')
    return SYSTEMS[system].write(plan, job, job.model.transformer, per_host)
