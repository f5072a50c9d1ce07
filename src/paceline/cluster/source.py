"""Reader of clusters from YAML, with errors that name the file, line and fix."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError

from paceline.cluster.cluster import Cluster, Device, Emulate, Host, Link
from paceline.errors import ClusterError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_MODELS: dict[str, type[BaseModel]] = {"emulate": Emulate, "hosts": Host, "gpus": Device, "links": Link}  # by the key that holds them
_NAMES: dict[type[BaseModel], str] = {Cluster: "the cluster", Emulate: "`emulate`", Host: "a host", Device: "a device", Link: "a link"}


def read_cluster(file: Path) -> Cluster:
    """The cluster that a YAML file describes.

    Raises:
        ClusterError: every wrong key and value with its line, one per line of the message.
    """
    try:
        text = file.read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{file}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ClusterError(f"{file}: is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ClusterError(
            f"{file}: a cluster is a mapping with `hosts`, `emulate` or `catalogue`, e.g. emulate: {{hosts: 4, rate: 100mbit}}, "
            "or catalogue: 64x8xH100-SXM, 400gbit"
        )
    try:
        return Cluster.model_validate(data)
    except ValidationError as error:
        problems = sorted((_line(tree, e["loc"]), _explain(e)) for e in error.errors())
        raise ClusterError("\n".join(f"{file}, line {line}: {problem}" for line, problem in problems)) from None
    except ClusterError as error:  # this machine cannot be what the file has it emulate, or the catalogue has no such thing
        key = "catalogue" if "catalogue" in data else "emulate"
        raise ClusterError(f"{file}, line {_line(tree, (key,))}: {error}") from error


def _line(node: yaml.Node | None, location: Sequence[int | str]) -> int:
    """The line of a key (as far as the path to it exists), counted from 1."""
    line = node.start_mark.line if node else 0
    for step in location:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == step), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            found = (node.value[step], node.value[step])
        else:
            break
        if found is None:
            break
        line, node = found[0].start_mark.line, found[1]
    return line + 1


def _explain(error: ErrorDetails) -> str:
    *outer, last = error["loc"] or ("cluster",)
    model = next((_MODELS[step] for step in reversed(outer) if step in _MODELS), Cluster)
    owner = _NAMES[model]
    if error["type"] == "extra_forbidden":
        return f'unknown key "{last}" in {owner}. {_nearest(str(last), model)}'
    if error["type"] == "missing":
        return f'{owner} needs "{last}"'
    problem = error["msg"].removeprefix("Value error, ")
    return problem if error["type"] == "value_error" else f'"{last}" of {owner}: {problem}, not {_shortened(error["input"])}'


def _nearest(key: str, model: type[BaseModel]) -> str:
    near = get_close_matches(key, model.model_fields, n=1)
    return f'Did you mean "{near[0]}"?' if near else f"It has: {', '.join(model.model_fields)}"


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
