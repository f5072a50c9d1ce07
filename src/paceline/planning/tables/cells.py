"""Cells of a table of runs, as people write them: numbers, precisions, recomputation, sharding, links."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from paceline.cluster.catalogue.hardware import Accelerator
from paceline.planning.cost.layout import Precision, Products

Cells = Mapping[str, str]
Sharding = Literal["none", "zero1", "zero2", "zero3", "hybrid"]
Recomputed = Literal["none", "selective", "block", "unknown"]

_SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_NUMBER = re.compile(r"(?<![\w.])(\d[\d,]*\.?\d*(?:[eE][+-]?\d+)?)\s*([kKMBT](?![A-Za-z]))?")
_UNSTATED = re.compile(r"not stated|per recipe|unknown|not printed|default", re.IGNORECASE)
_RATE = re.compile(
    r"(?:(\d+)\s*[x×]\s*)?(\d+(?:\.\d+)?)\s*(?:(?-i:Gb/s|Gbps)|Gbit/s|gbit|GbE)"
    r"((?:\s+[\w-]+){0,3}?\s*per (?:GPU|device|card|chip))?",
    re.IGNORECASE,
)
# of the rate that is stated, what training's collectives reach beside what InfiniBand and RoCE do: hosts' processors
# carry Omni-Path's packets (the rows of one table on 2 to 16 hosts: 6.4 of 50 GB/s)
_FABRICS = {r"omni-?path|\bOPA\b": 0.16, r"\bTCP\b|sockets|\befa\b": 0.6}


class UnusableError(Exception):
    """A row that cannot be predicted or compared; says why."""


def number(text: str) -> float | None:
    """The first number of a cell: `1,024`, `7.5e9`, `175B`, `250k-class (…)`; None where there is none."""
    found = _NUMBER.search(text or "")
    if not found:
        return None
    return float(found[1].replace(",", "")) * _SCALES.get(found[2] or "", 1.0)


def whole(cells: Cells, name: str, default: int | None = None) -> int:
    """A cell's whole number.

    Raises:
        UnusableError: there is none, and no default.
    """
    value = number(cells.get(name, ""))
    if value is None:
        if default is None:
            raise UnusableError(f"{name} is not stated")
        return default
    return int(value)


def stated(text: str) -> bool:
    """True if a cell says something, not that nothing is known."""
    return bool(text.strip()) and not _UNSTATED.match(text.strip())


def precision(cells: Cells, device: Accelerator) -> Precision:
    """Precision of activations."""
    text = cells.get("precision", "").lower()
    names: tuple[Precision, ...] = ("bf16", "fp16", "tf32", "fp32", "fp64")
    found: Precision | None = next((name for name in names if name in text), None)
    if re.search(r"amp|mixed|fp8|fp4|float8|int8", text) or found is None:
        half: Precision = "fp16" if device.generation in ("pascal", "volta", "turing") else "bf16"
        return found if found in ("bf16", "fp16") else half
    if found == "fp32" and re.search(r"tf32", cells.get("notes", ""), re.IGNORECASE):
        return "tf32"
    return found


def products(cells: Cells) -> Products:
    """Precision of products with weights, if it is lower than that of activations."""
    text = cells.get("precision", "").lower()
    if re.search(r"fp4|float4", text):
        return "fp4"
    if "int8" in text:
        return "int8"
    if not re.search(r"fp8|float8", text):
        return ""
    about = f"{text} {cells.get('notes', '').lower()} {cells.get('framework', '').lower()}"
    if "mx" in text:
        return "mxfp8"
    if "row" in text:
        return "fp8-row"
    return "fp8-block" if re.search(r"block|deepgemm|128", text) or "deepseek" in about.split("task=")[0] else "fp8"


def moment_bytes(cells: Cells) -> float:
    """Bytes of each of the optimizer's moments."""
    text = f"{cells.get('precision', '')} {cells.get('zero_fsdp', '')} {cells.get('notes', '')}"
    if re.search(r"8-?bit[ -](adam|optim)", text, re.IGNORECASE):
        return 1.0
    state = r"(adam|optimi[sz]er|moments)[ -]*(states?|moments)?"
    return 2.0 if re.search(rf"(bf16|16-?bit)[ -]{state}|{state} in bf16", text, re.IGNORECASE) else 4.0


def recomputed(cells: Cells) -> Recomputed:
    """Part of the forward pass that is computed again."""
    text = cells.get("act_ckpt", "").lower()
    if not stated(text):
        return "unknown"
    if re.search(r"selective|partial|minimal|save_|norms|projections|core_attn|moe_act", text):
        return "selective"
    if re.search(r"full|block|every|yes|true|uniform|layer", text) and not text.startswith(("none", "no ")):
        return "block"
    return "none"


def sequence(cells: Cells) -> bool:
    """True if norms and residuals are divided among the ranks of tp."""
    text = f"{cells.get('act_ckpt', '')} {cells.get('notes', '')}"
    if re.search(r"no sequence|no SP|sequence-parallel=False", text):
        return False
    return bool(re.search(r"\bseq\+|seq(uence)?[- ]parallel|\+SP\b", text, re.IGNORECASE))


def sharding(text: str, unstated: Sharding) -> Sharding:
    """Sharding of the state among data-parallel ranks.

    Args:
        unstated: what the framework does where the cell says nothing.
    """
    text = text.lower()
    if not stated(text):
        return unstated
    if re.search(r"hybrid|hsdp", text):
        return "hybrid"
    if re.search(r"shard_grad_op|zero[-_ ]?2|optim_grads(?!_params)|not resharded", text):
        return "zero2"
    if re.search(r"zero[-_ ]?3|fsdp|full_shard|optim_grads_params", text):
        return "zero3"
    if re.search(r"zero[-_ ]?1|dist-opt|distributed[- ]opt", text):
        return "zero1"
    return "none"


def between_bytes_per_s(text: str, per_host: int) -> float | None:
    """Network bandwidth of one device; None if no rate is stated.

    A rate is a host's (`8x200Gb/s HDR IB per node`, `100GbE`) unless the text says a device's (`400Gb/s RDMA per GPU`).
    """
    rates = [
        float(times or 1) * float(rate) * 1e9 / 8 / (1 if per_device else per_host)
        for times, rate, per_device in _RATE.findall(text)
    ]
    return max(rates, default=None)


def fabric_share(text: str) -> float:
    """Part of a stated rate that a fabric's software reaches, beside InfiniBand's."""
    return next((share for name, share in _FABRICS.items() if re.search(name, text, re.IGNORECASE)), 1.0)
