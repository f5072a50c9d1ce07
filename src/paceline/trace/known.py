"""Traces of known models, by name."""

from __future__ import annotations

from paceline.job.known.names import find_model
from paceline.job.read.dimensions import Dimensions
from paceline.trace.graph import ModelTrace
from paceline.trace.transformer import transformer


def known_dimensions(name: str) -> Dimensions | None:
    """Published dimensions of a language model; None if its name is not known."""
    found = find_model(name)
    return Dimensions.model_validate(dict(found.dimensions)) if found else None


def known_model(name: str, *, seq: int | None = None, vocab: int | None = None) -> ModelTrace | None:
    """Trace of a known model; None if its name is not known.

    Args:
        seq: tokens of a sequence in place of those that it was trained with.
        vocab: rows of its embedding, such as a padded number.
    """
    found = find_model(name)
    if found is None:
        return None
    given = {key: value for key, value in (("seq", seq), ("vocab", vocab)) if value is not None}
    return transformer(Dimensions.model_validate({**found.dimensions, **given}))
