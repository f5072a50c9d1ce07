"""Models of a table's rows: by their dimensions as stated, or by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import JobError
from paceline.job.read.dimensions import Dimensions
from paceline.planning.model.graph import ModelTrace
from paceline.planning.model.known import known_dimensions, known_model
from paceline.planning.model.transformer import transformer
from paceline.planning.tables.cells import Cells, UnusableError, number, whole

_GATED = re.compile(r"llama|mistral|mixtral|qwen|gemma|deepseek|swiglu|internlm|yi-|olmo|gated|palm", re.IGNORECASE)
# part of BERT's sequences of 512 tokens that is text, in bins of 64 tokens (MLPerf's and LDDL's Wikipedia)
_TEXT = 0.56
# frameworks of today train without dropout
_MODERN = re.compile(r"composer|foundry|fsdp|titan|olmo|core|nemo|maxtext|h100|b200|gb\d00|tpu", re.IGNORECASE)


def model_of(cells: Cells, others: Sequence[Cells], tp: int, stages: int) -> ModelTrace:
    """The model of a row.

    Stated dimensions come first; what is not stated follows from the model's name, or from other rows.

    Raises:
        UnusableError: neither its dimensions nor its name are known.
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
    """Tokens of a sample, where they are stated."""
    text = cells.get("seq_len", "")
    value = number(text)
    if value is None:
        found = re.search(r"seq\w* ?len\w*\D{0,60}?(\d{2,6})\b", cells.get("notes", ""))
        return int(found[1]) if found else None
    return int(value) * 1024 // 1000 if re.search(r"\d\s*[kK]\b", text) else int(value)


def _agree(named: Dimensions, cells: Cells) -> bool:
    """True if what a row states of width, heads and depth is the named model's."""
    pairs = (("hidden", named.hidden), ("n_heads", named.heads), ("ffn", named.feed_forward))
    return all(number(cells.get(name, "")) in (None, value) for name, value in pairs) and _depth(cells) in (
        None,
        named.layers,
    )


def _depth(cells: Cells) -> int | None:
    layers = number(cells.get("n_layers", ""))
    return None if layers is None else int(layers)


def _changed(named: Dimensions, cells: Cells, tp: int) -> Dimensions:
    """A named model with the row's sequence, vocabulary and masked tokens."""
    seq = _sequence(cells)
    # of an encoder-decoder, the length that is stated is the encoder's
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
    """Fraction of tokens that a masked language model's head computes, where the row tells."""
    pairs = re.findall(r"(\d+) of (\d+)\b", cells.get("notes", ""))
    found = next((int(few) / int(of) for few, of in pairs if int(of) == seq), None)
    if re.search(r"no MLM head|fine-?tuning|squad", cells.get("notes", ""), re.IGNORECASE):
        return {"predicted": 1 / seq}
    if found is None and re.search(r"\bbert", cells.get("model", ""), re.IGNORECASE):
        megatron = re.search(r"megatron|libai", cells.get("framework", ""), re.IGNORECASE)
        found = None if megatron else {128: 20 / 128, 512: 80 / 512}.get(seq, 0.16)
    return {"predicted": found} if found else {}


def _padded(vocab: int, tp: int, framework: str) -> int:
    """A vocabulary as frameworks pad it.

    Megatron does to 128 for each rank of tp, others to what tensor cores read.
    """
    wide = 128 * tp if tp > 1 or re.search(r"megatron|nemo|libai", framework, re.IGNORECASE) else 8
    return -(-vocab // wide) * wide


def _dense(cells: Cells, seq: int) -> int:
    """Tokens of a sample that are computed, without padding if a recipe leaves it out.

    NVIDIA's BERT for PyTorch and Paddle does. Of its sequences of 512 tokens about half are text.
    """
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
        gated = _gated_by_size(base, layers, parameters, gated)
    return _checked(
        {
            "layers": layers,
            "gated": gated,
            "tied": not re.search(r"untie-embeddings|untied|llama|maxtext", notes, re.IGNORECASE),
            "causal": not re.search(r"bert|t5|vit", cells["model"], re.IGNORECASE),
            "dropout": not _MODERN.search(f"{cells.get('framework', '')} {cells.get('gpu', '')}"),
            **base,
            **_masked(cells, seq),
            "seq": _dense(cells, seq),
        }
    )


def _gated_by_size(base: Mapping[str, Any], layers: int, parameters: float, likely: bool) -> bool:
    """True if three matrices a feed-forward part come nearer to the stated parameters than two."""

    def off(gated: bool) -> float:
        return abs(transformer(_checked({"layers": layers, "gated": gated, **base})).parameters / parameters - 1)

    return likely if abs(off(True) - off(False)) < 0.02 else off(True) < off(False)


def _heads_of_others(cells: Cells, others: Sequence[Cells], hidden: int) -> int:
    """Heads of other rows with the same width, or such as are about 128 wide."""
    for other in others:
        if other.get("n_heads") and number(other.get("hidden", "")) == hidden:
            return whole(other, "n_heads")
    return min(
        (heads for heads in range(1, hidden + 1) if hidden % heads == 0), key=lambda heads: abs(hidden / heads - 128)
    )
