"""Runs of Megatron-LM and torchtitan, from what they print."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.cluster.named import known
from paceline.errors import PlanError
from paceline.files import read_text
from paceline.job.known.names import must_find_model
from paceline.planning.tables.layouts import Row
from paceline.run.record.run import WARM_UP_STEPS
from paceline.run.tuning.calibrate import LogReader
from paceline_lab.configurations import megatron, torchtitan
from paceline_lab.configurations.configuration import Configuration, planned, with_batch
from paceline_lab.configurations.systems import layout_as_configured, read_configuration

_MOST_BYTES = 2**28
# what torchrun and others put before each line of a rank
_PREFIX = re.compile(r"(?m)^(?:\[?[a-z]*\d+\]?: ?)+")
_ITERATION = re.compile(r"(?m)^.*elapsed time per iteration \(ms\): ([\d.]+).*$")
_ITS_BATCH = re.compile(r"global batch size: +(\d+)")
_ARGUMENTS = re.compile(r"-+ arguments -+\n(.*?)\n[^\n]*-+ end of arguments -+", re.DOTALL)
_ARGUMENT = re.compile(r"(?m)^.*?\b(\w+) \.+ (\S.*?)\s*$")
_PADDED = re.compile(r"padded vocab \(size: \d+\).*?new size: (\d+)")
# printed with a value whether or not their feature is on: the feature, and its arguments
_ONLY_WITH = {
    "group_query_attention": ("num_query_groups",),
    "multi_latent_attention": ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    "num_experts": ("moe_ffn_hidden_size", "moe_router_topk", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"\bstep: +\d+ .*?\btps: +([\d,]+(?:\.\d+)?)")
_BATCHES = re.compile(r"local batch size (\d+), global batch size (\d+),.*?sequence length (\d+)")
_MESH = re.compile(r"Building device mesh with parallelism: ([^\n]*)")
_DEGREE = re.compile(r"\b(pp|dp_replicate|dp_shard|cp|tp)=(\d+)")
_DEVICE = re.compile(r"\b[A-Z]+ capacity: (.+?) with [\d.]+ ?GiB")
_DUMP = re.compile(r"Running with (?:args|configs?): *(?=\{)")


def run_of_log(file: Path, cluster: Cluster | None) -> Row:
    """Return the run of a log, on the devices of a cluster.

    Raises:
        PlanError: the file is not such a log, does not describe the run, or does not fit the cluster.
    """
    try:
        text = _COLOUR.sub("", _PREFIX.sub("", read_text(file, _MOST_BYTES)))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from None
    of_megatron, of_torchtitan = _ITERATION.findall(text), _STEP.findall(text)
    if not of_megatron and not of_torchtitan:
        raise PlanError(
            "it is no log of Megatron-LM (lines with elapsed time per iteration (ms)) or torchtitan (lines with tps)"
        )
    if cluster is None or not cluster.has_accelerators:
        raise PlanError("a log does not name its machines: name them with --cluster, such as 8xH100-SXM")
    if of_megatron:
        return _of_megatron(file, text, cluster)
    return _of_torchtitan(file, text, [float(tps.replace(",", "")) for tps in of_torchtitan], cluster)


# Megatron-LM


def _of_megatron(file: Path, text: str, cluster: Cluster) -> Row:
    lines = [(match[0], float(match[1]) / 1000) for match in _ITERATION.finditer(text)]
    batches = [int(batch[1]) if (batch := _ITS_BATCH.search(line)) else None for line, _ in lines]
    # a batch that grows during the run has other times; those of the last count
    seconds = [time for (_, time), batch in zip(lines, batches, strict=True) if batch == batches[-1]]
    found = with_batch(_megatron_configuration(file, text), batches[-1], None)
    return _row(file, found, cluster, _typical(seconds))


def _megatron_configuration(file: Path, text: str) -> Configuration:
    """Its printed arguments, or a script of the same name beside it."""
    if found := _ARGUMENTS.search(text):
        return megatron.configured(_printed(found[1], text))
    for ending in (".sh", ".yaml", ".yml"):
        if (beside := file.with_suffix(ending)).is_file():
            return read_configuration(beside)
    raise PlanError(
        "it has no arguments (Megatron-LM prints them first, between lines with dashes): keep them in the log, or put "
        f"its script beside it as {file.with_suffix('.sh').name}"
    )


def _printed(arguments: str, text: str) -> dict[str, Any]:
    values = {match[1]: match[2] for match in _ARGUMENT.finditer(arguments) if match[2] != "None"}
    for feature, its in _ONLY_WITH.items():
        if values.get(feature, "False") == "False":
            values = {name: value for name, value in values.items() if name not in its}
    if padded := _PADDED.search(text):
        values["vocab_size"] = padded[1]
    return values


# torchtitan


def _of_torchtitan(file: Path, text: str, rates: Sequence[float], cluster: Cluster) -> Row:
    """Its `tps` are tokens a second of each device."""
    if (device := _DEVICE.search(text)) and (ran_on := known(device[1])) is not None:
        names = {gpu.name for host in cluster.hosts for gpu in host.gpus}
        named = {entry.name for name in names if (entry := known(name)) is not None}
        if ran_on.name not in named:
            raise PlanError(f"it ran on {device[1]}, and --cluster has {', '.join(sorted(names))}")
    found = _torchtitan_configuration(file, text)
    if mesh := _MESH.search(text):
        ranks = 1
        for _, degree in _DEGREE.findall(mesh[1]):
            ranks *= int(degree)
        found = replace(found, ranks=ranks)
    if batches := _BATCHES.search(text):
        found = with_batch(found, int(batches[2]), int(batches[1]) if found.pp == 1 else None)
        found = replace(found, dimensions={**found.dimensions, "seq": int(batches[3])})
    return _row(file, found, cluster, None, 1 / _typical([1 / rate for rate in rates]))


def _torchtitan_configuration(file: Path, text: str) -> Configuration:
    """Its printed configuration, or the TOML file beside it."""
    if (dump := _DUMP.search(text)) and (values := _dumped(text, dump.end())).get("training"):
        return torchtitan.configured(values)
    beside = file.with_suffix(".toml")
    others = list(file.parent.glob("*.toml"))
    if beside.is_file() or len(others) == 1:
        return read_configuration(beside if beside.is_file() else others[0])
    raise PlanError(
        f"it does not print its configuration: put its TOML file beside it as {beside.name}, or train with "
        "--job.print_config"
    )


def _dumped(text: str, at: int) -> dict[str, Any]:
    """The printed configuration, as JSON or a dict of Python's; {} if it is neither."""
    try:
        values = json.JSONDecoder().raw_decode(text, at)[0]
    except ValueError:
        try:
            values = ast.literal_eval(text[at : text.find("\n", at)])
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            values = {}
    return values if isinstance(values, dict) else {}


# Both


def _row(
    file: Path, found: Configuration, cluster: Cluster, seconds: float | None, tokens_per_s: float | None = None
) -> Row:
    what = planned(found, cluster.devices, "log", _dimensions)
    layout = layout_as_configured(found, what, cluster)
    if tokens_per_s is not None:
        seconds = what.job.global_batch * layout.trace.tokens / tokens_per_s / layout.ranks
    return Row(file.name, 0, {"framework": found.system}, layout, seconds, None, False)


def _dimensions(name: str) -> dict[str, Any]:
    try:
        return dict(must_find_model(name).dimensions)
    except ValueError as error:
        raise PlanError(str(error)) from None


def _typical(seconds: Sequence[float]) -> float:
    """Median without the first steps, at most a third of all."""
    return median(seconds[min(WARM_UP_STEPS, len(seconds) // 3) :])


READER = LogReader(run_of_log)
