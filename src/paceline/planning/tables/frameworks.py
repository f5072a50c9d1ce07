"""Framework of a table's row, by what it says of it."""

from __future__ import annotations

import re
from dataclasses import replace

from paceline.cluster.catalogue.hardware import Accelerator
from paceline.planning.cost import frameworks as known
from paceline.planning.cost.frameworks import Framework
from paceline.planning.tables.cells import Cells

# In the order in which they are tried
_NAMES: tuple[tuple[str, Framework], ...] = (
    (r"titan.*(?:compile|float8|async)", known.TORCHTITAN_COMPILED),
    (r"titan", known.TORCHTITAN),
    (r"maxtext|pax|\bjax|xla|paxml|praxis|levanter|t5x", known.MAXTEXT),
    (r"megatron-deepspeed|megatron.deepspeed", known.MEGATRON_DEEPSPEED),
    (r"deepspeed", known.DEEPSPEED),
    (r"composer|llm-foundry", known.COMPOSER),
    (r"hai-?llm", known.HAI_LLM),
    (r"libai|oneflow", known.ONEFLOW),
    (r"paddle", known.PADDLE),
    (r"\b(?:tf|tensorflow) ?1[89]\.\d\d", known.HOROVOD_UNFUSED),
    (r"horovod|\btf\b|tensorflow", known.HOROVOD),
    (r"fsdp|pytorch 2|lit-?gpt|olmo|lightning|meta internal|nanotron", known.FSDP),
    (r"ddp|apex|mxnet|dali", known.DDP),
)
_MODERN = re.compile(r"core|nemo|bridge|transformer ?engine|\bdev\b|h[12]\d\d|b[23]00|mi3\d\d", re.IGNORECASE)
_FLASH = re.compile(r"(?<!no )flash(?!\w* not)|transformer_engine|xformers|sdpa|splash", re.IGNORECASE)


def framework_of(cells: Cells, device: Accelerator) -> Framework:
    """The framework of a row, with its attention and launches as the row says."""
    name, notes = cells.get("framework", ""), cells.get("notes", "")
    found = _by_name(cells, device)
    profile = found.profile
    if device.generation in ("pascal", "volta", "turing") and profile.flash:
        profile = replace(profile, flash=False)  # FlashAttention needs Ampere
    elif not profile.flash and _FLASH.search(f"{name} {notes}"):
        profile = replace(profile, flash=True, attention=2)
    elif re.search(r"no flash|flash\w* off|without flash", notes, re.IGNORECASE):
        profile = replace(profile, flash=False)
    if re.search(r"gpt.?oss", cells.get("model", ""), re.IGNORECASE) and _nemo(cells) < (26, 6):
        profile = replace(profile, flash=False)  # sinks, which fused kernels did not have before cuDNN 9.13
    if re.search(r"deterministic-mode=True", notes):
        profile = replace(profile, attention=1, kernels=1.5 * profile.kernels)
    if found is known.COMPOSER:
        profile = replace(profile, attention=1)  # its models add ALiBi's biases: FlashAttention in Triton
    if _unpadded(cells) and device.generation not in ("pascal", "volta") and "16" in cells.get("precision", ""):
        profile = replace(profile, flash=True, attention=1)  # apex's fused attention for sequences of any length
    if re.search(r"LAUNCH_BLOCKING=1", notes):
        profile = replace(profile, blocking=True)
    if re.search(r"async ?tp|userbuffers|tp-comm-overlap=True", f"{name} {notes}", re.IGNORECASE):
        profile = replace(profile, overlaps_tp=known.OVERLAPPED_TP)
    found = replace(found, profile=profile)
    # NVIDIA's recipes for speed keep and sum gradients in 16 bits
    narrow = found.name.startswith(known.MEGATRON_CORE.name) and re.search(
        r"task=|bridge|recipe", f"{name} {notes}", re.IGNORECASE
    )
    return replace(found, gradient_bytes=2.0) if narrow else found


def _unpadded(cells: Cells) -> bool:
    """True of NVIDIA's pre-training of BERT with PyTorch or PaddlePaddle."""
    recipe = re.search(r"pre-?training", cells.get("notes", ""), re.IGNORECASE)
    by = re.search(r"pytorch|paddle", cells.get("framework", ""), re.IGNORECASE)
    return bool(recipe and by and re.search(r"\bbert", cells.get("model", ""), re.IGNORECASE))


def _nemo(cells: Cells) -> tuple[int, int]:
    """Year and month of NeMo's container; (0, 0) where it is not told."""
    found = re.search(r"\b(2\d)\.(\d\d)\b.{0,12}NeMo", f"{cells.get('source', '')} {cells.get('framework', '')}")
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _by_name(cells: Cells, device: Accelerator) -> Framework:
    name = cells.get("framework", "").lower()
    for pattern, framework in _NAMES:
        if re.search(pattern, name):
            return framework
    if "megatron" in name or "nemo" in name:
        about = f"{name} {cells.get('gpu', '')} {cells.get('notes', '')}"
        if _nemo(cells) >= (26, 6) and "MX" in cells.get("precision", "").upper():
            return known.MEGATRON_CORE_FUSED
        return known.MEGATRON_CORE if _MODERN.search(about) else known.MEGATRON_LM
    if "fsdp" in cells.get("zero_fsdp", "").lower():
        return known.FSDP
    if "ddp" in cells.get("zero_fsdp", "").lower():
        return known.DDP
    return known.MAXTEXT if device.kind == "tpu" else known.OTHER
