"""Keys of a configuration: read, known to change nothing, or told as not understood."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.errors import PlanError

_DEEPEST = 20
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none", "null", "")


class Keys:
    """Values by key, with a record of those that were asked for.

    A name finds a key that is equal or ends in `.name`. `auto`, `null` and an empty text count as not given.
    """

    def __init__(
        self, system: str, values: Mapping[str, Any], quiet: Sequence[str] = (), noted: Mapping[str, str] | None = None
    ) -> None:
        """Keys of a system.

        Args:
            quiet: patterns of keys that change neither speed nor memory.
            noted: what is assumed of keys that the prediction does not read, by pattern.
        """
        self.system, self.values = system, dict(values)
        self.read: dict[str, str] = {}
        self._quiet = [re.compile(pattern) for pattern in quiet]
        self._noted = {re.compile(pattern): about for pattern, about in (noted or {}).items()}

    def given(self, *names: str) -> Any:
        """Value of the first of the names that is given; None without one."""
        for name in names:
            for key in self._matching(name):
                value = self.values[key]
                self.read[key] = "" if value is True else _shown(value)
                if value is None or (isinstance(value, str) and value.strip().lower() in ("auto", "null", "")):
                    continue
                return value
        return None

    def number(self, *names: str) -> int | None:
        """A whole number; None if it is not given.

        Raises:
            PlanError: it is something else.
        """
        value = self.given(*names)
        if value is None:
            return None
        try:
            whole = float(str(value))
        except ValueError:
            raise PlanError(f"{self.system}: {names[0]} should be a number, got {value!r}") from None
        if not whole.is_integer():
            raise PlanError(f"{self.system}: {names[0]} should be a whole number, got {value!r}")
        return int(whole)

    def degree(self, *names: str) -> int:
        """A number of at least 1; 1 if it is not given.

        Raises:
            PlanError: it is something else.
        """
        value = self.number(*names)
        if value is not None and value < 1:
            raise PlanError(f"{self.system}: {names[0]} is at least 1, not {value}")
        return value or 1

    def real(self, name: str, default: float) -> float:
        """A number that need not be whole.

        Raises:
            PlanError: it is something else.
        """
        value = self.given(name)
        try:
            return default if value is None else float(value)
        except (TypeError, ValueError):
            raise PlanError(f"{self.system}: {name} should be a number, got {value!r}") from None

    def flag(self, *names: str) -> bool:
        """True if it is given and not false.

        Raises:
            PlanError: it is neither true nor false.
        """
        value = self.given(*names)
        if isinstance(value, bool) or value is None:
            return bool(value)
        text = str(value).lower()
        if text not in (*_TRUE, *_FALSE):
            raise PlanError(f"{self.system}: {names[0]} should be true or false, got {value!r}")
        return text in _TRUE

    def text(self, *names: str) -> str:
        """A text; "" if it is not given."""
        value = self.given(*names)
        return "" if value is None else str(value)

    @property
    def stated(self) -> tuple[tuple[str, str], ...]:
        """Keys that were read, with their values."""
        return tuple(self.read.items())

    @property
    def noted(self) -> tuple[tuple[str, str], ...]:
        """Keys that are known and that the prediction does not read, with what is assumed."""
        return tuple(
            (key, about)
            for key in self._left()
            for pattern, about in self._noted.items()
            if pattern.fullmatch(_last(key)) or pattern.fullmatch(key)
        )

    @property
    def unknown(self) -> tuple[str, ...]:
        """Keys that may matter and that nobody read."""
        noted = {key for key, _ in self.noted}
        return tuple(
            key
            for key in self._left()
            if key not in noted and not any(p.fullmatch(_last(key)) or p.fullmatch(key) for p in self._quiet)
        )

    def _left(self) -> Iterator[str]:
        return (key for key in self.values if key not in self.read)

    def _matching(self, name: str) -> list[str]:
        if name in self.values:
            return [name]
        return [key for key in self.values if key.endswith(f".{name}")]


def flattened(values: Any, above: str = "") -> dict[str, Any]:
    """Nested groups as one, with dotted keys. Lists stay values.

    Raises:
        PlanError: groups are nested too deep, or within themselves.
    """
    if not isinstance(values, Mapping):
        return {above: values}
    if above.count(".") > _DEEPEST:
        raise PlanError(f"{above[:60]}…: groups within groups within groups; a configuration has a few levels")
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flattened(value, f"{above}.{key}" if above else str(key))
    return flat


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
