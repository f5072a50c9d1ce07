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
    common: Mapping[str, Any],
    *,
    also: Mapping[str, str] | None = None,
) -> tuple[KnownModel, ...]:
    """Entries of a family.

    `columns` name the values of each row. Its billions of parameters follow, and its other names where it has any (in
    `also`, if they do not fit the line). `common` holds the values of all rows.
    """
    names = columns.split()
    found = []
    for name, row in rows.items():
        *values, parameters = row[: len(names) + 1]
        own = {key: value for key, value in zip(names, values, strict=True) if value is not None}
        others = row[-1] if len(row) > len(names) + 1 else (also or {}).get(name, "")
        found.append(KnownModel(name, title, source, {**common, **own}, parameters, tuple(others.split())))
    return tuple(found)


# RMS norms, three matrices, rotary positions, no biases
LLAMA: dict[str, Any] = {"gated": True, "tied": False, "positions": False}
