"""Catalogue of models with published dimensions: its entries, and how families list theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class KnownModel(NamedTuple):
    """A model with published dimensions.

    Attributes:
        name: as users write it.
        family: for the table of the documentation.
        source: where its dimensions stand.
        dimensions: values of `Dimensions`; `seq` is the length that it was trained with.
        parameters: published number in billions, without layers that predict further tokens; None: none is published.
        also: other names.
    """

    name: str
    family: str
    source: str
    dimensions: Mapping[str, Any]
    parameters: float | None
    also: tuple[str, ...] = ()


def family(
    title: str,
    source: str,
    columns: str,
    rows: Mapping[str, Sequence[Any]],
    also: Mapping[str, tuple[str, ...]] | None = None,
    **common: Any,
) -> tuple[KnownModel, ...]:
    """Entries of a family.

    `columns` name the values of each row but the last, which is its billions of parameters.
    """
    names = columns.split()
    return tuple(
        KnownModel(
            name,
            title,
            source,
            common | {key: value for key, value in zip(names, row[:-1], strict=True) if value is not None},
            row[-1],
            (also or {}).get(name, ()),
        )
        for name, row in rows.items()
    )


# RMS norms, three matrices, rotary positions, no biases
LLAMA: dict[str, Any] = {"gated": True, "tied": False, "positions": False}
