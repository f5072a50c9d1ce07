"""Traces of known models, by name."""

from __future__ import annotations

from functools import cache

from paceline.job.known.names import candidates, find_model, key
from paceline.job.read.dimensions import Dimensions
from paceline.planning.model.graph import ModelTrace
from paceline.planning.model.images.known import IMAGE_MODELS, KnownImageModel
from paceline.planning.model.transformer import transformer


def known_dimensions(name: str) -> Dimensions | None:
    """Published dimensions of a language model; None if its name is not known."""
    found = find_model(name)
    return Dimensions.model_validate(dict(found.dimensions)) if found else None


def known_model(name: str, *, seq: int | None = None, vocab: int | None = None) -> ModelTrace | None:
    """Trace of a known language or image model; None if its name is not known.

    Args:
        seq: tokens of a sequence in place of those that it was trained with; image models have none.
        vocab: rows of its embedding, such as a padded number.
    """
    found = find_model(name)
    if found is None:
        image = find_image_model(name)
        return _built(image.name) if image else None
    given = {name: value for name, value in (("seq", seq), ("vocab", vocab)) if value is not None}
    return transformer(Dimensions.model_validate({**found.dimensions, **given}))


def find_image_model(name: str) -> KnownImageModel | None:
    """The known image model of that name; None if there is none."""
    by_name = _image_models()
    return next((by_name[word] for words in candidates(name) if (word := "".join(words)) in by_name), None)


@cache
def _image_models() -> dict[str, KnownImageModel]:
    return {key(name): model for model in IMAGE_MODELS for name in (model.name, *model.also)}


@cache
def _built(name: str) -> ModelTrace:
    return _image_models()[key(name)].build()
