"""Extension points: named descriptions from paceline and from installed packages.

A description is a small object without heavy imports. It contains the import path of the class that does the work.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Generic, TypeVar

from paceline.errors import DataError, PacelineError
from paceline.text import nearest

T = TypeVar("T")


class ExtensionPoint(Generic[T]):
    """Named extensions of one type: sync rules, codecs, transports, …

    A package adds an extension with an entry point, whose value `module:INFO` is a description. Built-in names are
    reserved.

    Args:
        noun: name of the type, for error texts.
        group: the group of its entry points, e.g. `paceline.codecs`.
        kind: the class of the descriptions.
        built_in: paceline's own descriptions, by name.
        error: error class for unknown names, and for descriptions that cannot be loaded.
        words: other accepted names, for hints in errors.
    """

    def __init__(
        self,
        noun: str,
        group: str,
        kind: type[T],
        built_in: Mapping[str, T],
        error: type[PacelineError] = PacelineError,
        words: Sequence[str] = (),
    ) -> None:
        self.noun, self.group, self.kind, self.built_in = noun, group, kind, built_in
        self.error, self.words = error, words

    @cached_property
    def installed(self) -> dict[str, EntryPoint]:
        """Return entry points of other packages, by name."""
        return {entry.name: entry for entry in entry_points(group=self.group) if entry.name not in self.built_in}

    @property
    def names(self) -> list[str]:
        """Known names, the built-in ones first."""
        return [*self.built_in, *self.installed]

    def __contains__(self, name: str) -> bool:
        """True if the name is known; an installed description may still fail to load."""
        return name in self.built_in or name in self.installed

    def __getitem__(self, name: str) -> T:
        """Return the description of a name.

        Raises:
            PacelineError: the name is unknown, or its description cannot be loaded. The class is `error`.
        """
        if name in self.built_in:
            return self.built_in[name]
        if name not in self.installed:
            raise self.error(
                "extension.unknown",
                'unknown {noun} "{name}". {hint}',
                noun=self.noun,
                name=name,
                hint=nearest(name, [*self.words, *self.names]),
            )
        return self._load(self.installed[name])

    def all(self) -> dict[str, T]:
        """Return every description by name. Raises the same errors as `[]`."""
        return {name: self[name] for name in self.names}

    def loadable(self) -> tuple[dict[str, T], list[str]]:
        """Return all descriptions that can be loaded, by name, and the errors of the others.

        Use this to choose among all extensions, so that a broken package cannot prevent the choice of another one.
        """
        found, errors = dict(self.built_in), []
        for name in self.installed:
            try:
                found[name] = self[name]
            except PacelineError as error:
                errors.append(str(error))
        return found, errors

    def _load(self, entry: EntryPoint) -> T:
        origin = f'the {self.noun} "{entry.name}" that a package registers under {self.group} ({entry.value})'
        try:
            found = entry.load()
        except Exception as error:
            raise self.error(
                "extension.not_loaded",
                "{origin} cannot be loaded: {kind}: {error}",
                origin=origin,
                kind=type(error).__name__,
                error=error,
            ) from error
        if not isinstance(found, self.kind):
            raise self.error(
                "extension.wrong_class",
                "{origin} is a {class_name}, but it must be a {wanted}",
                origin=origin,
                class_name=type(found).__name__,
                wanted=self.kind.__name__,
            )
        return found


def optional_package(module: str, package: str, extra: str = "data") -> ModuleType:
    """Import a module of an optional package, which only some types of data need.

    Raises:
        DataError: the package is not installed.
    """
    if package == "transformers":
        quiet_transformers()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            "data.package_missing",
            "this data needs {package}, which cannot be imported ({error}). Run: pip install 'paceline[{extra}]'",
            package=package,
            extra=extra,
            error=error,
        ) from error


def quiet_transformers() -> None:
    """Silence what libraries log when transformers or peft imports them: missing kernels, and deprecations."""
    for noisy in ("torchao", "bitsandbytes", "torch.utils._pytree"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
