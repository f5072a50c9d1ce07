"""Models of timm and torchvision for `benchmarks/models.py`, where these can be imported.

torchvision's own operators (nms and the like) are compiled for one build of torch, and importing it fails beside
another. None of the models here uses them; so that the rest can be imported, operators that are missing are declared,
without anything that could compute them.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from functools import cache
from typing import Any

from torch import nn
from torch.library import Library

from models_data import CLASSES

_DECLARED: list[Library] = []  # a library's declarations last as long as it does


def timm(name: str, **options: Any) -> nn.Module:
    """A model of timm by its name."""
    model: nn.Module = _imported("timm").create_model(name, num_classes=CLASSES, **options)
    return model


def torchvision(name: str, **options: Any) -> nn.Module:
    """A classifier of torchvision by its name."""
    model: nn.Module = _imported("torchvision").models.get_model(name, weights=None, num_classes=CLASSES, **options)
    return model


def installed(library: str) -> bool:
    """Whether it is there; timm needs torchvision as well."""
    return all(importlib.util.find_spec(name) is not None for name in {library, "torchvision"})


@cache
def _imported(library: str) -> Any:
    if library != "torchvision":
        _imported("torchvision")
    for _ in range(20):  # one operator is named each time
        try:
            return importlib.import_module(library)
        except RuntimeError as error:
            missing = re.search(r"operator (\w+)::(\w+) does not exist", str(error))
            if missing is None:
                raise
            _declare(*missing.groups())
    raise ImportError(f"{library} lacks more operators than were declared")


def _declare(namespace: str, operator: str) -> None:
    library = Library(namespace, "FRAGMENT")
    library.define(f"{operator}(Tensor input) -> Tensor")
    _DECLARED.append(library)


if installed("torchvision"):  # transformers imports it wherever it is there, and fails where its operators are missing
    _imported("torchvision")
