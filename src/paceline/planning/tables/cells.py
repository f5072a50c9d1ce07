"""Parser of free-text table cells: numbers, precisions, recomputation, sharding and links."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from paceline.cluster.catalogue import Accelerator
from paceline.errors import JobError
from paceline.job.model import Dimensions
from paceline.planning.cost.layout import Precision, Products
from paceline.planning.model.graph import ModelTrace
from paceline.planning.model.known import known_dimensions, known_model
from paceline.planning.model.transformer import transformer

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
# Achieved share of the stated rate, relative to the share that InfiniBand and RoCE achieve (0.72), by all-reduces of
# NCCL. Omni-Path without the PSM2 plug-in: 40 and 54 of 400 Gbit/s on 4 and 16 hosts (bigscience-workshop/bigscience,
# experiments/bandwidth), since host processors carry its packets. TCP: 4.7 of 12.5 GB/s (NVIDIA/nccl, issue 398).
_FABRICS = {r"omni-?path|\bOPA\b": 0.16, r"\bTCP\b|sockets": 0.52}


# parts of a layer in Megatron Core's `recompute_modules`
_MODULES = re.compile(r"\b(core_attn|moe_act|layernorm|mla_up_proj|shared_experts|moe|mlp)\b")


class UnusableError(Exception):
    """Raised for a row that cannot be predicted or compared. The text states the reason."""


def number(text: str) -> float | None:
    """Return the first number in a cell, such as `1,024`, `7.5e9` or `175B`.

    The result is None if the cell has no number.
    """
    found = _NUMBER.search(text or "")
    if not found:
        return None
    return float(found[1].replace(",", "")) * _SCALES.get(found[2] or "", 1.0)


def whole(cells: Cells, name: str, default: int | None = None) -> int:
    """Return the integer in a cell, or the default.

    Raises:
        UnusableError: the cell has no number, and there is no default.
    """
    value = number(cells.get(name, ""))
    if value is None:
        if default is None:
            raise UnusableError(f"{name} is not stated")
        return default
    return int(value)


def stated(text: str) -> bool:
    """True if a cell has a value, rather than a note that it is unknown."""
    return bool(text.strip()) and not _UNSTATED.match(text.strip())


def precision(cells: Cells, device: Accelerator) -> Precision:
    """Return the precision of activations."""
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
    """Return the reduced precision of matrix products with weights; "" if not reduced."""
    text = cells.get("precision", "").lower()
    if re.search(r"fp4|float4", text):
        return "fp4"
    if "int8" in text:
        return "int8"
    if not re.search(r"fp8|float8", text):
        return ""
    if "mx" in text and not text.startswith("fp8-cs"):  # "FP8-CS (FP8-MX)" states the recipe of another column
        return "mxfp8"
    if "row" in text:
        return "fp8-row"
    # HAI-LLM's scales are of tiles and blocks of 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)
    own = re.search(r"hai-?llm", cells.get("framework", ""), re.IGNORECASE)
    return "fp8-block" if own or re.search(r"block|deepgemm|128|fine-?grained", text) else "fp8"


def moment_bytes(cells: Cells) -> float:
    """Return the bytes per element of each optimizer moment."""
    text = f"{cells.get('precision', '')} {cells.get('zero_fsdp', '')} {cells.get('notes', '')}"
    if re.search(r"8-?bit[ -](adam|optim)", text, re.IGNORECASE):
        return 1.0
    state = r"(adam|optimi[sz]er|moments)[ -]*(states?|moments)?"
    return 2.0 if re.search(rf"(bf16|16-?bit)[ -]{state}|{state} in bf16", text, re.IGNORECASE) else 4.0


def recomputed_modules(cells: Cells) -> frozenset[str]:
    """Return the parts of a layer that are recomputed, by Megatron Core's names.

    The names are in `act_ckpt`, or in the notes after `recompute`.
    """
    told = re.findall(r"recompute[\w ]*\W{0,3}([^;.]*)", cells.get("notes", ""), re.IGNORECASE)
    return frozenset(_MODULES.findall(" ".join((cells.get("act_ckpt", ""), *told)).lower()))


def recomputed(cells: Cells) -> Recomputed:
    """Return the kind of activation recomputation."""
    text = cells.get("act_ckpt", "").lower()
    if not stated(text):
        return "selective" if recomputed_modules(cells) else "unknown"
    if re.search(r"selective|partial|minimal|save_|norms|projections", text) or _MODULES.search(text):
        return "selective"
    if re.search(r"full|block|every|yes|true|uniform|layer", text) and not text.startswith(("none", "no ")):
        return "block"
    return "none"


def sequence(cells: Cells, default: bool = False) -> bool:
    """True if tp ranks divide the tokens of norms and residuals.

    Args:
        default: the framework's default, used if the row states neither it nor its flags.
    """
    text = f"{cells.get('act_ckpt', '')} {cells.get('notes', '')}"
    if re.search(r"no sequence|no SP|sequence-parallel=False", text):
        return False
    if re.search(r"\bseq\+|seq(uence)?[- ]parallel|\+SP\b", text, re.IGNORECASE):
        return True
    return default and "flags: " not in text


def expert_tp(cells: Cells) -> int:
    """Return the number of ranks that divide each expert, 1 if not stated."""
    text = f"{cells.get('ep', '')} {cells.get('model', '')} {cells.get('notes', '')}"
    found = re.search(
        r"(?:(?<![a-z])etp|expert[- ](?:tp|tensor[- ]parallel\w*(?:[- ]size)?))\W{0,3}(\d+)", text, re.IGNORECASE
    )
    return max(int(found[1]), 1) if found else 1


def sharding(text: str, unstated: Sharding) -> Sharding:
    """Return the sharding of the state among data-parallel ranks.

    Args:
        unstated: the framework's default, used if the cell is empty.
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
    """Return the network bandwidth of one device; None if no rate is stated.

    A rate applies to a host (`8x200Gb/s HDR IB per node`, `100GbE`), unless the text says that it is per device
    (`400Gb/s RDMA per GPU`).
    """
    rates = [
        float(times or 1) * float(rate) * 1e9 / 8 / (1 if per_device else per_host)
        for times, rate, per_device in _RATE.findall(text)
    ]
    return max(rates, default=None)


def fabric_share(text: str) -> float:
    """Return the achieved fraction of a network's rate, relative to InfiniBand."""
    return next((share for name, share in _FABRICS.items() if re.search(name, text, re.IGNORECASE)), 1.0)


_GATED = re.compile(r"llama|mistral|mixtral|qwen|gemma|deepseek|swiglu|internlm|yi-|olmo|gated|palm", re.IGNORECASE)
# share of BERT's 512-token sequences that is text, in bins of 64 tokens (MLPerf's and LDDL's Wikipedia)
_TEXT = 0.56
# current frameworks train without dropout
_MODERN = re.compile(r"composer|foundry|fsdp|titan|olmo|core|nemo|maxtext|h100|b200|gb\d00|tpu", re.IGNORECASE)


def model_of(cells: Cells, others: Sequence[Cells], tp: int, stages: int) -> ModelTrace:
    """Return the trace of a row's model.

    Stated dimensions take precedence. Missing dimensions are inferred from the model's name or from other rows.

    Raises:
        UnusableError: the row states no dimensions, and the model's name is unknown.
    """
    named = known_dimensions(cells.get("model", ""))
    if number(cells.get("hidden", "")) is None:
        if named is not None:
            return transformer(_changed(named, cells, tp), tp)
        known = known_model(cells.get("model", ""), seq=_sequence(cells))
        if known is None:
            raise UnusableError(f'hidden is not stated, and "{cells.get("model", "")}" is no model that is known')
        return known
    if named is not None and _agree(named, cells):
        return transformer(_changed(named, cells, tp), tp)
    return transformer(_stated(cells, others, tp, stages), tp)


def _sequence(cells: Cells) -> int | None:
    text = cells.get("seq_len", "")
    value = number(text)
    if value is None:
        found = re.search(r"seq\w* ?len\w*\D{0,60}?(\d{2,6})\b", cells.get("notes", ""))
        return int(found[1]) if found else None
    return int(value) * 1024 // 1000 if re.search(r"\d\s*[kK]\b", text) else int(value)


def _agree(named: Dimensions, cells: Cells) -> bool:
    pairs = (("hidden", named.hidden), ("n_heads", named.heads), ("ffn", named.feed_forward))
    return all(number(cells.get(name, "")) in (None, value) for name, value in pairs) and _depth(cells) in (
        None,
        named.layers,
    )


def _depth(cells: Cells) -> int | None:
    layers = number(cells.get("n_layers", ""))
    return None if layers is None else int(layers)


def _changed(named: Dimensions, cells: Cells, tp: int) -> Dimensions:
    """Return the dimensions of a named model with the values that a row states."""
    seq = _sequence(cells)
    # for an encoder-decoder, the stated length is the encoder's
    longer = {"source_seq": seq, "seq": named.seq} if named.encoder_layers else {"seq": seq}
    values: dict[str, Any] = {key: value for key, value in longer.items() if value} | {
        "vocab": whole(cells, "vocab", named.vocab)
    }
    values.setdefault("seq", named.seq)
    values["vocab"] = _padded(values["vocab"], tp, cells.get("framework", ""))
    if re.search(r"w/o MTP|without MTP", cells.get("model", ""), re.IGNORECASE):
        values["mtp"] = 0
    values |= _masked(cells, values["seq"])
    values["seq"] = _dense(cells, values["seq"])
    if _MODERN.search(f"{cells.get('framework', '')} {cells.get('gpu', '')}"):
        values["dropout"] = False
    return _checked(named.model_dump(exclude_unset=True) | values)


def _checked(values: Mapping[str, Any]) -> Dimensions:
    try:
        return Dimensions(**values)
    except (ValueError, JobError) as error:
        raise UnusableError(str(error).strip().splitlines()[-1]) from error


def _masked(cells: Cells, seq: int) -> dict[str, float]:
    """Return the fraction of tokens that a masked language model's head computes.

    The result is empty if the fraction is unknown.
    """
    pairs = re.findall(r"(\d+) of (\d+)\b", cells.get("notes", ""))
    found = next((int(few) / int(of) for few, of in pairs if int(of) == seq), None)
    if re.search(r"no MLM head|fine-?tuning|squad", cells.get("notes", ""), re.IGNORECASE):
        return {"predicted": 1 / seq}
    if found is None and re.search(r"\bbert", cells.get("model", ""), re.IGNORECASE):
        megatron = re.search(r"megatron|libai", cells.get("framework", ""), re.IGNORECASE)
        found = None if megatron else {128: 20 / 128, 512: 80 / 512}.get(seq, 0.16)
    return {"predicted": found} if found else {}


def _padded(vocab: int, tp: int, framework: str) -> int:
    """Pad the vocabulary to the multiple that the framework uses."""
    wide = 128 * tp if tp > 1 or re.search(r"megatron|nemo|libai", framework, re.IGNORECASE) else 8
    return -(-vocab // wide) * wide


def _dense(cells: Cells, seq: int) -> int:
    """Return the sequence length without padding tokens, if the framework skips them."""
    recipe = re.search(r"pre-?training", cells.get("notes", ""), re.IGNORECASE) and re.search(
        r"pytorch|paddle", cells.get("framework", ""), re.IGNORECASE
    )
    bert = re.search(r"\bbert", cells.get("model", ""), re.IGNORECASE)
    return round(seq * _TEXT) if recipe and bert and seq >= 512 else seq


def _stated(cells: Cells, others: Sequence[Cells], tp: int, stages: int) -> Dimensions:
    hidden, vocab = whole(cells, "hidden"), whole(cells, "vocab", 50_257)
    seq = _sequence(cells)
    if seq is None:
        raise UnusableError("seq_len is not stated")
    ffn = whole(cells, "ffn", 4 * hidden)
    heads = whole(cells, "n_heads", _heads_of_others(cells, others, hidden))
    kv_heads = whole(cells, "n_kv_heads", heads)
    notes = " ".join(cells.values())
    base: dict[str, Any] = {
        "hidden": hidden,
        "ffn": ffn,
        "heads": heads,
        "seq": seq,
        "vocab": _padded(vocab, tp, cells.get("framework", "")),
    }
    base["kv_heads"] = kv_heads if heads % kv_heads == 0 else heads
    width = re.search(r"attention width = (\d+) x (\d+)", notes)
    if width or hidden % heads:
        base["head_dim"] = int(width[2]) if width else -(-hidden // heads)
    gated = bool(_GATED.search(notes))
    alike = re.search(r"\b(un)?tied?[ -]+(\w+[ -]+){0,2}embeddings", notes, re.IGNORECASE)
    tied = not (alike[1] if alike else re.search(r"untied|llama|maxtext", notes, re.IGNORECASE))
    # models with gates have rotary positions
    shape: Mapping[str, bool] = {"gated": gated, "tied": tied, "positions": not gated}
    parameters = number(cells.get("n_params", ""))
    layers = _depth(cells)
    if layers is None:
        if parameters is None:
            raise UnusableError("neither n_layers nor n_params is stated")
        per_layer = (12 if not gated else 4 + 3 * ffn / hidden) * hidden**2
        layers = max(round((parameters - vocab * hidden) / per_layer / stages), 1) * stages
    experts, top_k = re.search(r"num-experts=(\d+)", notes), re.search(r"moe-router-topk=(\d+)", notes)
    if experts:
        base |= {"experts": int(experts[1]), "top_k": int(top_k[1]) if top_k else 1}
        wide = re.search(r"moe-ffn-hidden-size=(\d+)", notes)
        base |= {"expert_ffn": int(wide[1])} if wide else {}
    elif parameters and number(cells.get("ffn", "")):
        shape = _shape_by_size({"layers": layers, **base}, parameters, shape, free=not alike)
    return _checked(
        {
            "layers": layers,
            **shape,
            "causal": not re.search(r"bert|t5|vit", cells["model"], re.IGNORECASE),
            "dropout": not _MODERN.search(f"{cells.get('framework', '')} {cells.get('gpu', '')}"),
            **base,
            **_masked(cells, seq),
            "seq": _dense(cells, seq),
        }
    )


def _shape_by_size(
    base: Mapping[str, Any], parameters: float, likely: Mapping[str, bool], *, free: bool
) -> Mapping[str, bool]:
    """Choose gated, tied and learned positions by a model's number of parameters.

    Args:
        parameters: the stated number. A rounded number decides only about gates, which change it the most.
        likely: the values by the model's name, which are kept if they match about as well.
        free: False if `tied` is stated.
    """
    tolerance = 0.02 if parameters % 1e6 == 0 else 0.001
    open_to = ("gated",) if tolerance > 0.01 else (*(("tied",) if free else ()), "positions", "gated")
    choices = [dict(likely)]
    for name in open_to:
        choices += [{**choice, name: not choice[name]} for choice in choices]
    off = [abs(transformer(_checked({**base, **choice})).parameters / parameters - 1) for choice in choices]
    # the first of about equal choices is the one that changes the least
    return next(choice for choice, each in zip(choices, off, strict=True) if each - min(off) < tolerance)


def _heads_of_others(cells: Cells, others: Sequence[Cells], hidden: int) -> int:
    """Return the number of heads in other rows with the same model width.

    If there are none, heads are about 128 wide.
    """
    for other in others:
        if other.get("n_heads") and number(other.get("hidden", "")) == hidden:
            return whole(other, "n_heads")
    return min(
        (heads for heads in range(1, hidden + 1) if hidden % heads == 0), key=lambda heads: abs(hidden / heads - 128)
    )
