"""Descriptions of codecs, and the values of `compress=` in a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import PlanError
from paceline.extensions import ExtensionPoint
from paceline.planning.arguments import Argument, between, converted, pieces, whole


@dataclass(frozen=True)
class CodecInfo:
    """Description of a codec, readable without torch.

    Attributes:
        codec: import path of what makes it: a class or function that takes a `paceline.sync.compress.Coding`.
        sent_bytes: bytes sent for one number of a tensor, from a `Sending`; the planner's prediction.
        arguments: the value after the colon, under "".
        codes_numbers: True if it codes each number by itself, so that it may follow a codec that keeps some:
            `topk:0.01+bf16`.
        keeps_numbers: True if it keeps numbers that a second codec may code.
        of_sums: True if it codes a sum over ranks, and not the numbers of one.
        tried_by_auto: the text with which `compress=auto` tries it; None: it does not.
        order: of those that `auto` tries, the smaller one loses less of the gradients.
    """

    codec: str
    sent_bytes: Callable[[Sending], float]
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    codes_numbers: bool = False
    keeps_numbers: bool = False
    of_sums: bool = False
    tried_by_auto: str | None = None
    order: int = 0


@dataclass(frozen=True)
class Sending:
    """Numbers that a codec is to send, for the prediction of its bytes.

    Attributes:
        value: after the colon, e.g. the kept share; None where the codec takes none.
        number_bytes: bytes of one number that it keeps, after the second codec if there is one.
        plain_bytes: bytes of one number that is not coded.
        matrices: rows, columns and count of the model's weight matrices.
    """

    value: Any
    number_bytes: float
    plain_bytes: float
    matrices: Sequence[tuple[float, float, float]] = ()


def _topk_bytes(sending: Sending) -> float:
    """Bytes of a sparse tensor: kept numbers, each with a 4-byte index."""
    return float(sending.value) * (sending.number_bytes + 4)


def _powersgd_bytes(sending: Sending) -> float:
    """Bytes of two thin factors for each matrix, per number of the matrix."""
    whole_size = sum(rows * columns * times for rows, columns, times in sending.matrices)
    thin = sum(sending.value * (rows + columns) * times for rows, columns, times in sending.matrices)
    return sending.number_bytes * min(1.0, thin / whole_size) if whole_size else sending.plain_bytes


def _share(text: str) -> float:
    return between(0, 1, open_below=True)(text)


_MODULES = "paceline.sync.compress"
_SHARE = Argument(_share, 0.01, "the share of the numbers that is kept, above 0 and at most 1")
_RANK = Argument(whole(1), 4, "the rank of the factors, a whole number, at least 1")
# Scales take less than a hundredth of what is sent, and are left out of the prediction.
CODECS = ExtensionPoint(
    "codec",
    "paceline.codecs",
    CodecInfo,
    {
        "fp16": CodecInfo(f"{_MODULES}.half:fp16", lambda _: 2.0, codes_numbers=True),
        "bf16": CodecInfo(f"{_MODULES}.half:bf16", lambda _: 2.0, codes_numbers=True, tried_by_auto="bf16"),
        "int8": CodecInfo(
            f"{_MODULES}.quantise:int8", lambda _: 1.0, codes_numbers=True, tried_by_auto="int8", order=1
        ),
        "int4": CodecInfo(f"{_MODULES}.quantise:int4", lambda _: 0.5, codes_numbers=True),
        "1bit": CodecInfo(f"{_MODULES}.sign:one_bit", lambda _: 0.125),
        "topk": CodecInfo(f"{_MODULES}.topk:topk", _topk_bytes, {"": _SHARE}, keeps_numbers=True),
        "powersgd": CodecInfo(
            f"{_MODULES}.powersgd:powersgd",
            _powersgd_bytes,
            {"": _RANK},
            keeps_numbers=True,
            of_sums=True,
            # a GPT lost 5 % with powersgd:4, and 1 % with 16
            tried_by_auto="powersgd:16+int8",
            order=2,
        ),
    },
    PlanError,
    words=("none", "auto"),
)


@dataclass(frozen=True)
class CompressSpec:
    """`CODEC[:VALUE][+CODEC]`, e.g. `int8`, `topk:0.01+bf16`.

    The second one codes the numbers that the first one keeps.

    Attributes:
        codecs: name and value of each.
    """

    codecs: tuple[tuple[str, Any], ...]

    @classmethod
    def parse(cls, text: str) -> CompressSpec:
        """Read the value of `compress=`, but for `none` and `auto`.

        Raises:
            PlanError: an unknown codec, a value that it does not take, or two that do not go together.
        """
        found: list[tuple[str, Any]] = []
        infos: list[CodecInfo] = []
        for word in text.split("+"):
            name, given = pieces("compress", word)
            try:
                infos.append(CODECS[name])
            except PlanError as error:
                raise PlanError(f"compress={text}: {error}") from None
            found.append((name, converted(f"compress={text}", name, infos[-1].arguments, given).get("")))
        first, *others = infos
        if len(others) > 1 or (others and not (first.keeps_numbers and others[0].codes_numbers)):
            raise PlanError(
                f"compress={text}: {' or '.join(_those('keeps_numbers'))} may be followed by one of "
                f"{', '.join(_those('codes_numbers'))}, "
                "which codes the numbers that it keeps, e.g. compress=topk:0.01+bf16; other codecs stand alone"
            )
        return cls(tuple(found))

    @property
    def first(self) -> CodecInfo:
        """Description of the only codec, or of the one that keeps numbers."""
        return CODECS[self.codecs[0][0]]

    def sent_bytes(self, plain_bytes: float, matrices: Sequence[tuple[float, float, float]]) -> float:
        """Predicted bytes sent for one number of the gradients, which takes `plain_bytes` as it is."""
        kept = plain_bytes
        for name, value in reversed(self.codecs):
            kept = CODECS[name].sent_bytes(Sending(value, kept, plain_bytes, matrices))
        return kept


def auto_candidates() -> tuple[tuple[str, ...], list[str]]:
    """Codecs that `compress=auto` tries, from the one that loses least.

    Those of packages that cannot be loaded are left out; the second value has their errors.
    """
    known, errors = CODECS.loadable()
    tried = sorted((info for info in known.values() if info.tried_by_auto), key=lambda info: info.order)
    return tuple(str(info.tried_by_auto) for info in tried), errors


def _those(ability: str) -> list[str]:
    return [name for name, info in CODECS.built_in.items() if getattr(info, ability)]
