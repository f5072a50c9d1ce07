"""Terminal output with rich that escapes control characters in text."""

from __future__ import annotations

from collections.abc import Iterable

from rich import console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from paceline.text import printable


class Console(console.Console):
    """Rich console that escapes control characters in text, but not rich's own control codes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of an object to print."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)
